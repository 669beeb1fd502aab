"""One worker's push for several, encoded pushes, and workers or servers that vanish: what a server makes of them."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
import torch
from checker import Checker
from simulation import LR, Plan, World

from hora.errors import HoraError
from hora.net.message_socket import MessageSocket
from hora.server.block_memory import BlockMemory
from hora.server.layout import cut
from hora.server.messages import BeginStep, ChunkReady, DropStep, EnterLoop, Push, WorkerHello
from hora.server.push_codec import PushCodec
from hora.server.state import Rules
from hora.server.worker_session import WorkerSession


def lone(num_workers: int, rules: Rules | None = None) -> World:
    return World(0, rules or Rules(), [Plan([]) for _ in range(num_workers)], Checker(), gaps=0.0)


def said(world: World, rank: int, step: int, value: float, **words: Any) -> list[Any]:
    """A worker's whole step; one with a `carrier` pushes nothing."""
    server = world.servers[0]
    chunks = server.store.part.chunks
    if words.get("carrier", -1) >= 0:
        return server.handle(rank, BeginStep(step, 0, 0, **words))
    out = server.handle(rank, BeginStep(step, 0, len(chunks), **words))
    for chunk in chunks:
        gradients = [torch.full((block.numel,), value, dtype=torch.float64) for block in chunk.blocks]
        out += server.handle(rank, Push(step, chunk.number, [1] * len(chunk.blocks)), gradients)
    return out


def moved(world: World) -> float:
    server = world.servers[0]
    found = set()
    for block in server.store.part.blocks:
        before = world.parameters[block.index].detach().reshape(-1)[block.start : block.stop]
        found |= set(((before - server.store.flats[block.number]) / LR).tolist())
    assert len(found) == 1
    return float(found.pop())


@pytest.mark.parametrize("seed", range(12))
def test_a_push_for_a_host_counts_as_its_workers_would_in_any_order(seed: int) -> None:
    """Ranks 0 and 2 are one host, 1 and 3 another: weights 1, 2, 3 and 2 with gradients 8, 4, 2 and 1."""
    world = lone(4)
    steps: list[tuple[int, float, dict[str, Any]]] = [
        (0, (1 * 8 + 3 * 2) / 4, {"weight": 1.0, "total": 1.0, "factor": 4.0}),
        (1, (2 * 4 + 2 * 1) / 4, {"weight": 2.0, "total": 2.0, "factor": 4.0}),
        (2, 0.0, {"weight": 3.0, "total": 3.0, "carrier": 0}),
        (3, 0.0, {"weight": 2.0, "total": 2.0, "carrier": 1}),
    ]
    random.Random(seed).shuffle(steps)
    out: list[Any] = []
    for rank, value, words in steps:
        out += said(world, rank, 0, value, **words)
    assert moved(world) == (1 * 8 + 2 * 4 + 3 * 2 + 2 * 1) / 8
    assert world.servers[0].now == 1
    answered = sorted(rank for (_, rank), message in out if isinstance(message, ChunkReady))
    num_chunks = len(world.servers[0].store.part.chunks)
    assert answered == [0] * num_chunks + [1] * num_chunks  # once per host


def test_words_of_one_that_does_not_push_reach_all() -> None:
    world = lone(2)
    said(world, 1, 0, 0.0, carrier=0, stop=True, nonfinite="the gradient of w on rank 1 is not finite")
    out = said(world, 0, 0, 1.0, factor=2.0)
    assert all(ready.stop and "rank 1" in ready.skipped for _, ready in out) and moved(world) == 0


def test_a_leader_that_is_gone_before_its_push_was_complete_takes_its_mates_gradients_with_it() -> None:
    world = lone(3)
    server = world.servers[0]
    said(world, 1, 0, 0.0, carrier=0)
    said(world, 2, 0, 4.0)
    server.handle(0, BeginStep(0, 0, len(server.store.part.chunks), factor=2.0))
    server.leave(0)
    assert moved(world) == 0 and server.now == 0  # no mean that counts samples without their gradients


def test_a_folded_step_that_was_dropped_may_begin_again_and_circles_end() -> None:
    world = lone(2)
    server = world.servers[0]
    said(world, 1, 0, 0.0, carrier=0)
    server.handle(0, BeginStep(0, 0, len(server.store.part.chunks), carrier=1))  # each leaves it to the other
    for rank in (0, 1):
        server.handle(rank, DropStep(0))
    said(world, 1, 0, 0.0, carrier=0)
    said(world, 0, 0, 3.0, factor=2.0)
    assert moved(world) == 3.0


# -- encoded ---------------------------------------------------------------------------------------------------------


def session_of(rules: Rules) -> tuple[WorkerSession, Any, socket.socket]:
    parameter = torch.nn.Parameter(torch.zeros(4096))
    part = cut([parameter], [torch.optim.SGD([parameter], lr=1.0)], 1, 1 << 20).parts[0]
    mine, theirs = socket.socketpair()
    line = MessageSocket(mine, lambda *_: memoryview(b""), bytes, bytes)
    session = WorkerSession(
        0, line, part, [torch.float32], PushCodec(rules.wire, rules.codec, part, [torch.float32]), 0, 1024
    )
    session.open(WorkerHello(0, "rank 0", "", []), None)
    return session, part.chunks[0], theirs


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "topk"])
def test_an_encoded_push_of_the_wrong_length_is_refused_and_nothing_is_allocated(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Rules(wire=wire)
    session, _, _other = session_of(rules)
    assert rules.codec is not None
    right = rules.codec.num_bytes(4096)
    push = Push(0, 0, [0], wire=wire)
    room = session.payload_buffer(push, right)
    assert len(room) == right  # in the chunk's own place
    for wrong in (right - 1, right + 1, 4096 * 4, 1 << 50):
        with pytest.raises(HoraError, match="no place"):
            session.payload_buffer(push, wrong)
    for other in ("fp32", "int4", *({"fp16", "int8"} - {wire})):
        with pytest.raises(HoraError, match="no place"):
            session.payload_buffer(Push(0, 0, [0], wire=other), right)
    fresh, _, _end = session_of(rules)
    monkeypatch.setattr(PushCodec, "decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(HoraError, match="wire="):
        fresh.gradients_of(push)  # nothing came behind it
    with pytest.raises(HoraError, match="wire="):
        fresh.gradients_of(Push(0, 0, [0], wire="int4"))


def test_topk_that_names_elements_that_do_not_exist_is_refused() -> None:
    session, _, _other = session_of(Rules(wire="topk"))
    push = Push(0, 0, [0], wire="topk")
    room = session.payload_buffer(push, 8 * 41)
    room[:] = b"\x7f" * len(room)
    with pytest.raises(HoraError, match="cannot be decoded"):
        session.gradients_of(push)


def test_what_was_encoded_is_decoded_into_its_place() -> None:
    rules = Rules(wire="int8")
    session, chunk, _other = session_of(rules)
    wire = PushCodec("int8", rules.codec, session.part, [torch.float32])
    memory = BlockMemory(1, chunk.num_bytes)
    vector = memory.tensor(0, 4096, torch.float32)
    vector.copy_(torch.linspace(-1, 1, 4096))
    data = wire.encode(chunk, memory.data[: chunk.num_bytes], chunk.blocks)
    room = session.payload_buffer(Push(0, 0, [0], wire="int8"), len(data))
    room[:] = bytes(data.tolist())
    (found,) = session.gradients_of(Push(0, 0, [0], wire="int8"))
    torch.testing.assert_close(found + wire.residuals[0], torch.linspace(-1, 1, 4096))
    assert 0 < float(wire.residuals[0].abs().max()) < 0.01


def test_what_is_not_finite_leaves_no_error_behind() -> None:
    rules = Rules(wire="int8")
    _, chunk, _other = session_of(rules)
    wire = PushCodec("int8", rules.codec, session_of(rules)[0].part, [torch.float32])
    memory = BlockMemory(1, chunk.num_bytes)
    memory.tensor(0, 4096, torch.float32).fill_(float("nan"))
    wire.encode(chunk, memory.data[: chunk.num_bytes], chunk.blocks)
    assert bool((wire.residuals[0] == 0).all())


# -- vanished --------------------------------------------------------------------------------------------------------


def test_under_ssp_one_that_is_reported_dead_is_waited_for_no_more() -> None:
    """Its connection shows nothing: the server is told to part with it."""
    world = lone(2, Rules(mode="ssp", staleness=0))
    server = world.servers[0]
    server.handle(1, EnterLoop())
    assert said(world, 0, 0, 1.0) == []
    freed = server.leave(1)
    assert len(freed) == len(server.store.part.chunks) and server.staleness(0) == 0
    assert len(said(world, 0, 1, 1.0)) == len(server.store.part.chunks)
