"""Checkpoints under ps, and strangers on a server's port."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import shard
from hora.net.handshake import connect
from hora.net.message_socket import HEADER, MessageSocket
from hora.server import messages
from hora.server.loop import PURPOSE
from hora.strategies.common.sync import LoopEvent
from hora.training import checkpointing
from test_saving import Saver, on, trained
from workers import CLOSE, data, mse, net, state

# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "ps/2"), (2, "ps/2")),
        ((2, "ps/1"), (3, "ps/3tcp")),
        ((3, "ps/2tcp"), (2, "ring")),
        ((2, "shared:update=sharded"), (2, "ps/2")),
        ((1, "shared"), (2, "ps/1")),
        ((2, "ps/2"), (1, "ps/1")),
    ],
)
def test_25_steps_and_25_after_a_restore_are_50(
    first: tuple[int, str], second: tuple[int, str], optimizer: str, tmp_path: pathlib.Path
) -> None:
    """Whatever the strategy, the number of workers and the number of servers were and are."""
    on(first[0], lambda group: Saver(group, first[1], optimizer).train(25).save(tmp_path))

    def rest(group: Group) -> torch.Tensor:
        saver = Saver(group, second[1], optimizer)
        assert saver.restore(tmp_path) == 25
        saver.train(50)
        return state(saver.model)

    wanted = trained(1, 50, "shared", optimizer)
    for found in on(second[0], rest):
        torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("mode", ["async", "ssp,staleness=2", "async,prefetch=true", "async,sync_every=4"])
def test_a_checkpoint_at_the_end_of_an_epoch_is_what_the_servers_have(mode: str, tmp_path: pathlib.Path) -> None:
    """Saved by two, restored by three on another number of servers: the same parameters and momentum, the next epoch,
    and of that every sample once."""

    def begin(group: Group, servers: int) -> tuple[Any, ...]:
        one = trainings.training(group, f"ps:mode={mode}/{servers}")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        one.prepare(model, optimizer)
        service = trainings.data_service(one, group, leased=True)
        return one, model, optimizer, one.adopt(shard(data(30), one, global_batch=6, service=service))

    def train(group: Group, servers: int, count: int, restore: bool) -> tuple[Any, ...]:
        one, model, optimizer, loader = begin(group, servers)
        before = None
        if restore:
            assert checkpointing.restore(one, group, str(tmp_path)) == steps
            before = state(model)
        seen, epochs = [], []
        for epoch in one.epochs(count):
            epochs.append(epoch)
            for x, y, numbers in loader:
                seen += numbers.tolist()
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        saved = checkpointing.save(one, group, str(tmp_path), "ps:mode=async", 2) if not restore else ""
        kept = one.sync.snapshot().states[0]
        return before, state(model), seen, epochs, saved, kept["0.weight"]["momentum_buffer"], one.step

    first = ranks.run(2, lambda group: train(group, 2, 1, False))
    steps = int(first[0][4].rpartition("step-")[2])
    assert steps == first[0][6] and first[0][1].equal(first[1][1]), "all hold the newest parameters after the save"
    second = ranks.run(3, lambda group: train(group, 1, 2, True))
    assert all(each[0].equal(first[0][1]) for each in second)
    assert all(each[3] == [1] for each in second)
    assert sorted(n for each in second for n in each[2]) == [*range(30)]
    third = ranks.run(1, lambda group: _momentum(begin(group, 1), group, tmp_path))
    torch.testing.assert_close(third[0], first[0][5], rtol=0, atol=0)


def _momentum(begun: tuple[Any, ...], group: Group, folder: pathlib.Path) -> torch.Tensor:
    checkpointing.restore(begun[0], group, str(folder))
    return begun[0].sync.snapshot().states[0]["0.weight"]["momentum_buffer"]


# -- strangers -------------------------------------------------------------------------------------------------------


def raw(address: tuple[str, int], *words: bytes, stay_s: float = 0.0) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, 2.0) as sock:
        for word in words:
            sock.sendall(word)
        time.sleep(stay_s)


def line_to(address: tuple[str, int], token: bytes = ranks.TOKEN) -> MessageSocket:
    return MessageSocket(
        connect(address, token, PURPOSE), lambda *_: memoryview(bytearray(1 << 20)), messages.encode, messages.decode
    )


def hears(line: MessageSocket) -> list[messages.ServerMessage]:
    """What the server says before it closes."""
    found: list[messages.ServerMessage] = []
    deadline = time.monotonic() + 3.0
    with contextlib.suppress(Exception):
        while time.monotonic() < deadline and not any(
            isinstance(m, messages.ServerError | messages.Refused) for m in found
        ):
            for message in line.receive():
                found.append(message)
            time.sleep(0.005)
    line.close()
    return found


def random_bytes(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    for seed in range(5):
        raw(address, random.Random(seed).randbytes(2000))


def a_wrong_token(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    with pytest.raises(Exception, match=r"."):
        line_to(address, b"x" * 32)


def a_slow_loris(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    for _ in range(20):
        threading.Thread(target=raw, args=(address, b"H"), kwargs={"stay_s": 1.5}, daemon=True).start()


def garbage_after_the_handshake(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = line_to(address)
    line.sock.sendall(HEADER.pack(40, 0) + b"\xc1" * 40)
    hears(line)


def an_endless_message(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = line_to(address)
    line.sock.sendall(HEADER.pack(2**32 - 1, 2**63))
    hears(line)


def a_push_as_the_first_word(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = line_to(address)
    line.send(messages.Push(0, 0, [0]))
    said = hears(line)
    assert not said or isinstance(said[0], messages.ServerError)


def another_model(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = line_to(address)
    line.send(messages.WorkerHello(7, "rank 7", "?", [["0.weight", [9, 9], "float64"]]))
    (said,) = hears(line)
    assert isinstance(said, messages.Refused) and "the models differ: rank 7 has 0.weight [9, 9]" in said.reason


def the_rank_of_another(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = line_to(address)
    line.send(messages.WorkerHello(0, "an impostor", hello.fingerprint, hello.entries))
    (said,) = hears(line)
    assert isinstance(said, messages.Refused) and "which is already connected" in said.reason


def guest(address: tuple[str, int], hello: messages.WorkerHello) -> MessageSocket:
    line = line_to(address)
    line.send(messages.WorkerHello(7, "rank 7", hello.fingerprint, hello.entries))
    return line


def a_push_for_a_chunk_that_is_none(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    for chunk in (-1, 10**6):
        line = guest(address, hello)
        line.send(messages.BeginStep(0, 0, 1))
        line.send(messages.Push(0, chunk, [0]))
        assert isinstance(hears(line)[-1], messages.ServerError)


def a_push_of_absurd_size(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = guest(address, hello)
    body = messages.encode(messages.Push(0, 0, [0]))
    line.sock.sendall(HEADER.pack(len(body), 1 << 50) + body + b"x" * 1000)
    hears(line)


def parameters_for_a_chunk_that_is_none(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    for chunk in (-3, 10**6):
        line = guest(address, hello)
        line.send(messages.FillParameters(chunk))
        assert isinstance(hears(line)[-1], messages.ServerError)


def optimizer_state_that_is_none(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    for blob in (None, b"\x93garbage"):
        line = guest(address, hello)
        line.send(messages.LoadState(), blob)
        assert isinstance(hears(line)[-1], messages.ServerError)


def a_blob_of_a_terabyte(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = guest(address, hello)
    body = messages.encode(messages.PutBlob("x"))
    line.sock.sendall(HEADER.pack(len(body), 1 << 39) + body + b"x" * 1000)
    hears(line)


def memory_that_is_nowhere(address: tuple[str, int], hello: messages.WorkerHello) -> None:
    line = line_to(address)
    line.send(messages.WorkerHello(7, "rank 7", hello.fingerprint, hello.entries, "nowhere"))
    assert isinstance(hears(line)[-1], messages.ServerError)


STRANGERS = [
    random_bytes, a_wrong_token, a_slow_loris, garbage_after_the_handshake, an_endless_message,
    a_push_as_the_first_word, another_model, the_rank_of_another, a_push_for_a_chunk_that_is_none,
    a_push_of_absurd_size, parameters_for_a_chunk_that_is_none, optimizer_state_that_is_none, a_blob_of_a_terabyte,
    memory_that_is_nowhere,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_strangers_on_a_servers_port_are_refused_and_the_training_is_unharmed(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One after the other, while two workers train: in sync these end with the parameters of an undisturbed run."""
    told: list[int] = []

    def train(group: Group, visited: bool) -> torch.Tensor:
        one = trainings.training(group, f"ps:mode={mode}/1{'' if visited else 'tcp'}")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        one.prepare(model, optimizer)
        one.sync.join(LoopEvent.ENTERED)

        def steps(start: int, stop: int) -> None:
            for step in range(start, stop):
                x, y, _ = data(30)[(2 * step + group.rank) % 30]
                mse(model, x[None], y[None]).backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(0, 3)
        for number, stranger in enumerate(STRANGERS):
            if group.rank == 0 and visited:
                host, port, _ = group.control.get("ps/0", 5.0).decode().split()
                layout = one.sync._client.layout
                hello = messages.WorkerHello(0, "", layout.fingerprint, one.sync.registry.entries())
                before = len(caplog.records)
                stranger((host, int(port)), hello)
                told.append(len(caplog.records) - before)
            steps(3 + number, 4 + number)
        one.sync.join(LoopEvent.FINISHED)
        group.barrier("done")
        one.sync._refresh()
        return state(model)

    with caplog.at_level(logging.WARNING):
        found = ranks.run(2, lambda group: train(group, True))
    assert len(told) == len(STRANGERS) and max(told) <= 5, dict(zip([s.__name__ for s in STRANGERS], told, strict=True))
    assert found[0].equal(found[1])
    if mode == "sync":
        torch.testing.assert_close(found[0], ranks.run(2, lambda group: train(group, False))[0], rtol=0, atol=CLOSE)
