"""What every transport promises, checked over each of them with ranks as threads."""

from __future__ import annotations

import functools
import gc
import os
import socket
import threading
import time

import pytest
import torch

from hora.collectives import Group
from hora.errors import HoraError, PeerLost, Timeout
from hora.transport import tcp
from hora.transport.base import COLLECTIVES, POINT_TO_POINT
from hora.transport.context import TransportContext
from ranks import Run, failures, run


def test_a_message_arrives_as_it_was_sent(transport: str) -> None:
    def work(group: Group) -> None:
        link = group.transport
        for numel in (0, 1, 7, 4096, 300_001):
            data = torch.arange(numel, dtype=torch.float32)
            if group.rank == 0:
                link.send(1, data, fingerprint=numel).wait()
            else:
                got = torch.full((numel,), -1.0)
                link.recv(0, got, fingerprint=numel).wait()
                assert torch.equal(got, data)

    run(2, work, transport)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_dtype_travels(transport: str, dtype: torch.dtype) -> None:
    def work(group: Group) -> None:
        data = (torch.arange(1001) % 2).to(dtype)
        if group.rank == 0:
            group.transport.send(1, data).wait()
        else:
            got = torch.zeros(1001, dtype=dtype)
            group.transport.recv(0, got).wait()
            assert torch.equal(got, data)

    run(2, work, transport)


def test_messages_between_two_ranks_keep_their_order(transport: str) -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            sends = [group.transport.send(1, torch.full((3,), float(i)), fingerprint=i) for i in range(20)]
            for handle in sends:
                handle.wait()
        else:
            for i in range(20):
                got = torch.zeros(3)
                group.transport.recv(0, got, fingerprint=i).wait()
                assert got.tolist() == [i] * 3

    run(2, work, transport)


def test_large_sends_in_both_directions_do_not_block_each_other(transport: str) -> None:
    def work(group: Group) -> None:
        other = 1 - group.rank
        data, got = torch.full((2_000_000,), float(group.rank)), torch.zeros(2_000_000)
        sending = group.transport.send(other, data)
        group.transport.recv(other, got).wait()
        sending.wait()
        assert bool((got == other).all())

    run(2, work, transport)


def test_channels_are_kept_apart(transport: str) -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            first = group.transport.send(1, torch.ones(4), COLLECTIVES)
            second = group.transport.send(1, torch.full((4,), 2.0), POINT_TO_POINT)
            first.wait()
            second.wait()
        else:
            got = torch.zeros(4)
            group.transport.recv(0, got, POINT_TO_POINT).wait()
            assert got.tolist() == [2.0] * 4
            group.transport.recv(0, got, COLLECTIVES).wait()
            assert got.tolist() == [1.0] * 4

    run(2, work, transport)


def test_landing_reduces_in_pieces_instead_of_replacing(transport: str) -> None:
    def work(group: Group) -> None:
        data = torch.arange(500_000, dtype=torch.float32)
        if group.rank == 0:
            group.transport.send(1, data).wait()
        else:
            total = torch.ones(500_000)
            group.transport.recv(0, total, combine=lambda part, piece: part.add_(piece)).wait()
            assert torch.equal(total, data + 1)

    run(2, work, transport)


def test_another_fingerprint_is_refused_before_data_is_written(transport: str) -> None:
    landed = torch.zeros(8)

    def work(group: Group) -> None:
        if group.rank == 0:
            group.transport.send(1, torch.ones(8), fingerprint=5)
        else:
            group.transport.recv(0, landed, fingerprint=6).wait()

    errors = failures(2, lambda group: group.barrier() or work(group), transport)
    assert isinstance(errors[1], HoraError)
    assert landed.tolist() == [0.0] * 8


def test_a_message_of_another_length_is_refused(transport: str) -> None:
    def work(group: Group) -> None:
        group.barrier()
        if group.rank == 0:
            group.transport.send(1, torch.ones(8))
        else:
            group.transport.recv(0, torch.zeros(9)).wait()

    assert isinstance(failures(2, work, transport)[1], HoraError)


def test_abort_wakes_a_waiter_with_its_cause(transport: str) -> None:
    def work(group: Group) -> float:
        if group.rank == 0:
            return 0.0
        threading.Timer(0.3, lambda: group.transport.abort(PeerLost("the moon fell", (0,)))).start()
        begin = time.monotonic()
        with pytest.raises(PeerLost, match="the moon fell"):
            group.transport.recv(0, torch.zeros(4)).wait()
        with pytest.raises(PeerLost, match="the moon fell"):
            group.transport.send(0, torch.zeros(4))
        return time.monotonic() - begin

    assert run(2, work, transport)[1] < 2


def test_a_wait_that_outlasts_the_timeout_says_who_waited_for_whom(transport: str) -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            group.transport.recv(0, torch.zeros(4)).wait()
        else:
            time.sleep(1.5)

    error = failures(2, work, transport, timeout_s=1.0)[1]
    assert isinstance(error, Timeout)
    assert "rank 1 (" in str(error) and "for rank 0 (" in str(error) and "timeout_s=1" in str(error)


def test_what_was_sent_before_leaving_is_still_received(transport: str) -> None:
    if transport == "engine":
        pytest.skip("an engine ends its links when a rank leaves: what it has not delivered is the engine's to lose")
    left = threading.Event()

    def work(group: Group) -> None:
        if group.rank == 0:
            group.transport.send(1, torch.ones(100)).wait()
            started.worlds[0].control.leave()  # type: ignore[union-attr]
            left.set()
        else:
            left.wait(10)
            got = torch.zeros(100)
            group.transport.recv(0, got).wait()
            assert got.sum() == 100
            with pytest.raises(PeerLost, match="has left the run"):
                group.transport.recv(0, got).wait()

    started = Run(2, transport)
    started.start(work).finish()
    assert started.errors == [None, None]


@pytest.mark.cases(2)
def test_groups_that_were_closed_leave_no_thread_and_no_open_file(transport: str) -> None:
    algorithm = "engine" if transport == "engine" else "ring"

    def use() -> None:
        run(2, lambda group: group.all_reduce(torch.ones(3), algorithm=algorithm), transport)

    def held() -> list[int]:
        gc.collect()
        return [len(os.listdir("/proc/self/fd")), threading.active_count()]

    use()  # what is made once for all stays
    time.sleep(0.2)
    before = held()
    for _ in range(5):
        use()
    deadline = time.monotonic() + 20
    while (more := [now - then for now, then in zip(held(), before, strict=True)]) and max(more) > 0:
        assert time.monotonic() < deadline, f"{more[0]} files and {more[1]} threads more than before"
        time.sleep(0.05)  # threads end in their own time


def test_traffic_is_counted_per_peer(transport: str) -> None:
    def work(group: Group) -> tuple[list[int], list[int]]:
        before = list(group.transport.sent_messages), list(group.transport.sent_bytes)
        if group.rank == 0:
            group.transport.send(1, torch.zeros(10)).wait()
            group.transport.send(2, torch.zeros(0)).wait()
        else:
            group.transport.recv(0, torch.zeros(10 if group.rank == 1 else 0)).wait()
        messages = [a - b for a, b in zip(group.transport.sent_messages, before[0], strict=True)]
        return messages, [a - b for a, b in zip(group.transport.sent_bytes, before[1], strict=True)]

    results = run(3, work, transport)
    assert results[0] == ([0, 1, 1], [0, 40, 0])
    assert results[1] == results[2] == ([0, 0, 0], [0, 0, 0])


# -- registered memory ------------------------------------------------------------------------------------------

SHARING = pytest.mark.parametrize("sharing", ["memory", "shm"])


@SHARING
def test_registered_memory_is_seen_by_all(sharing: str) -> None:
    def work(group: Group) -> None:
        memory = group.buffer("numbers", 1000, torch.int32)
        memory.mine.fill_(group.rank + 1)
        memory.signal(1)
        memory.await_all(1)
        assert [int(part.sum()) for part in memory.peers] == [1000 * (r + 1) for r in range(group.size)]
        memory.signal(2)
        memory.await_all(2)

    run(3, work, sharing)


@SHARING
def test_two_buffers_do_not_disturb_each_other(sharing: str) -> None:
    def work(group: Group) -> None:
        one, two = group.buffer("one", 10, torch.float32), group.buffer("two", 10, torch.float32)
        one.mine.fill_(1)
        two.mine.fill_(2)
        group.barrier()
        assert float(one.peers[1 - group.rank].sum()) == 10 and float(two.peers[1 - group.rank].sum()) == 20

    run(2, work, sharing)


@SHARING
def test_a_fingerprint_is_kept_until_two_epochs_later(sharing: str) -> None:
    def work(group: Group) -> None:
        memory = group.buffer("fingerprints", 1, torch.float32)
        for turn in range(6):
            memory.signal(4 * turn + 1, 100 + turn)
            memory.await_all(4 * turn + 1)
            assert memory.fingerprint_of(1 - group.rank, 4 * turn + 1) == 100 + turn
            memory.signal(4 * turn + 2)
            memory.await_all(4 * turn + 2)

    run(2, work, sharing)


@SHARING
def test_an_awaited_signal_ends_with_the_cause_of_an_abort(sharing: str) -> None:
    def work(group: Group) -> None:
        memory = group.buffer("never", 1, torch.float32)
        if group.rank == 0:
            threading.Timer(0.2, lambda: group.transport.abort(HoraError("enough"))).start()
            with pytest.raises(HoraError, match="enough"):
                memory.await_signal(1, 1)

    run(2, work, sharing)


@pytest.mark.parametrize("private", ["tcp", "engine"])
def test_a_transport_without_shared_memory_says_so(private: str) -> None:
    def work(group: Group) -> None:
        with pytest.raises(HoraError, match="no memory that all ranks see"):
            group.transport.buffer("none", 1, torch.float32)
        with pytest.raises(ValueError, match="use 'ring' or 'auto'"):
            group.all_reduce(torch.ones(3), algorithm="shared")

    run(2, work, private)


def test_a_rank_that_cannot_be_reached_is_named_with_the_address_that_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hora.transport.tcp.connect", functools.partial(tcp.connect, timeout_s=0.3))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    published = TransportContext.published

    def elsewhere(context: TransportContext, rank: int, name: str) -> bytes:
        return f"127.0.0.1 {port}".encode() if name == "tcp" else published(context, rank, name)

    monkeypatch.setattr(TransportContext, "published", elsewhere)

    def work(group: Group) -> None:
        if group.rank == 0:
            group.send(torch.ones(3), to=1)
        else:
            group.recv(torch.ones(3), source=0)

    error = failures(2, work, "tcp", timeout_s=2.0)[0]
    assert isinstance(error, HoraError) and str(error).startswith("rank 0 (host test"), error
    assert "cannot reach rank 1 (host test" in str(error) and f"at 127.0.0.1 port {port}" in str(error)
