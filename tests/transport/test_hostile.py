"""A hostile network: what strangers, impostors and broken peers can do to ranks that talk over TCP."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hora.collectives import Group
from hora.coordinator import Member
from hora.errors import HoraError, Mismatch, PeerLost, Timeout, Unauthorized
from hora.net.handshake import MAGIC as HELLO
from hora.net.handshake import NONCE_BYTES, PROOF_BYTES, connect
from hora.transport import GroupSpec
from hora.transport.base import COLLECTIVES, NUM_CHANNELS, POINT_TO_POINT
from hora.transport.tcp import HEADER, INTRODUCTION, MAGIC, PURPOSE, TcpListener, TcpTransport
from hora.world import World
from ranks import TOKEN, Run

LIMIT_S = 4.0  # a stranger is dropped after 2 s: as much again for a busy machine
GENERATION, GROUP = 1, 0  # of the first group of a run


def port_of(world: World) -> Any:
    return world._transports.resources.get("tcp")


class Dance:
    """Ranks that reduce changing values over TCP, and check every sum, until they are told to end."""

    def __init__(self, size: int) -> None:
        self.num_rounds = 0
        self._enough = threading.Event()
        self.run = Run(size, "tcp").start(self._work)
        assert _eventually(lambda: self.num_rounds > 2)

    def _work(self, group: Group) -> None:
        step = 0
        while True:
            step += 1
            tensor = torch.full((3000,), float(group.rank + step))
            tensor[0] = float(self._enough.is_set()) if group.rank == 0 else 0.0
            group.all_reduce(tensor, algorithm="ring" if step % 2 else "star")
            expected = group.size * step + group.size * (group.size - 1) // 2
            assert bool((tensor[1:] == expected).all()), f"step {step}"
            if group.rank == 0:
                self.num_rounds = step
            if tensor[0] > 0:
                return

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [port_of(world).address for world in self.run.worlds if world and port_of(world)]

    def goes_on(self) -> bool:
        seen = self.num_rounds
        return _eventually(lambda: self.num_rounds > seen + 2)

    def finish(self) -> None:
        self._enough.set()
        self.run.finish()
        assert self.run.errors == [None] * self.run.size


@pytest.fixture
def dance() -> Iterator[Dance]:
    made = Dance(3)
    yield made
    made.finish()


def impostor(
    address: tuple[str, int], rank: int, channel: int = COLLECTIVES, generation: int = GENERATION, group: int = GROUP
) -> socket.socket:
    """A connection that holds the token and introduces itself as `rank`."""
    sock = connect(address, TOKEN, PURPOSE, 10.0)
    sock.sendall(INTRODUCTION.pack(generation, group, rank, channel))
    return sock


def dropped(sock: socket.socket) -> bool:
    """Whether the other end closes within `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    with sock:
        try:
            while True:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                if not sock.recv(4096):
                    return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_strangers_are_dropped_and_the_run_goes_on(dance: Dance) -> None:
    chance = random.Random(5)
    strangers = []
    for address in dance.addresses:
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n", HELLO, chance.randbytes(4096), HELLO + chance.randbytes(500)):
            sock = socket.create_connection(address)
            sock.sendall(hello)
            strangers.append(sock)
        with pytest.raises(Unauthorized):
            connect(address, b"wrong" * 6, PURPOSE, 5.0)
        with pytest.raises(Unauthorized):
            connect(address, TOKEN, "control", 5.0)  # the right token for another door
    assert dance.goes_on()
    assert all(dropped(sock) for sock in strangers)
    assert dance.goes_on()


def test_an_introduction_that_stalls_is_dropped(dance: Dance) -> None:
    mute = connect(dance.addresses[0], TOKEN, PURPOSE, 5.0)
    half = connect(dance.addresses[1], TOKEN, PURPOSE, 5.0)
    half.sendall(INTRODUCTION.pack(GENERATION, GROUP, 1, 0)[:7])
    assert dropped(mute) and dropped(half)
    assert dance.goes_on()


def test_an_introduction_that_is_wrong_is_dropped(dance: Dance) -> None:
    address = dance.addresses[0]
    for wrong in (
        {"rank": 3},
        {"rank": 0xFFFFFFFF},
        {"rank": 0},  # itself
        {"rank": 1, "channel": NUM_CHANNELS},
        {"rank": 1, "generation": GENERATION - 1},
        {"rank": 1},  # taken: rank 1 has sent here before
        {"rank": 2},
    ):
        assert dropped(impostor(address, **wrong)), wrong
    assert dance.goes_on()


def test_a_silent_crowd_delays_the_first_message_by_seconds_at_most() -> None:
    crowded = threading.Event()

    def work(group: Group) -> float:
        crowded.wait(20.0)
        return float(group.all_reduce(torch.tensor([1.0]), algorithm="ring"))

    run = Run(2, "tcp").start(work)
    assert _eventually(lambda: all(run.worlds))
    crowd = [
        socket.create_connection(port_of(world).address)
        for world in run.worlds
        if world and port_of(world)
        for _ in range(100)
    ]
    started = time.monotonic()
    crowded.set()
    run.finish()
    assert run.results == [2.0, 2.0] and time.monotonic() - started < 15.0
    for sock in crowd:
        sock.close()


def test_a_few_hundred_short_connections_change_nothing_and_leave_nothing() -> None:
    chance = random.Random(11)
    threads, descriptors, memory = threading.active_count(), _num_descriptors(), _resident_bytes()
    dance = Dance(3)
    for _ in range(300):
        address = chance.choice(dance.addresses)
        kind = chance.choice(("noise", "hello", "proof", "introduction", "reset"))
        with contextlib.suppress(OSError):
            if kind == "introduction":
                with connect(address, TOKEN, PURPOSE, 10.0) as sock:
                    sock.sendall(chance.randbytes(chance.choice((0, 3, INTRODUCTION.size, 300))))
                continue
            with socket.create_connection(address) as sock:
                if kind == "noise":
                    sock.sendall(chance.randbytes(chance.randint(0, 2000)))
                elif kind == "hello":
                    sock.sendall((HELLO + chance.randbytes(NONCE_BYTES))[: chance.randint(1, 37)])
                elif kind == "proof":
                    sock.sendall(HELLO + chance.randbytes(NONCE_BYTES + PROOF_BYTES + chance.randint(0, 100)))
                    sock.settimeout(LIMIT_S)
                    sock.recv(4096)
                else:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert dance.goes_on()
    dance.finish()
    assert _eventually(lambda: threading.active_count() <= threads + 1)
    assert _eventually(lambda: _num_descriptors() <= descriptors + 4), _num_descriptors() - descriptors
    assert _resident_bytes() - memory < 50 << 20


# -- impostors: they hold the token ------------------------------------------------------------------------------------


def test_a_wrong_introduction_that_came_early_does_not_break_the_group_it_names() -> None:
    port = TcpListener(TOKEN, "127.0.0.1")
    early = [impostor(port.address, rank) for rank in (7, 1, 1)]
    assert _eventually(lambda: sum(map(len, port._early.values())) == 3)
    members = tuple(Member("worker", rank, "test", os.getpid()) for rank in range(2))
    spec = GroupSpec(rank=0, members=members, generation=GENERATION, group=GROUP)
    transport = TcpTransport(spec, port, lambda peer: port.address)
    assert list(transport._in) == [(1, COLLECTIVES)]
    assert dropped(early[0])
    transport.close()
    port.close()
    for sock in early:
        sock.close()


def test_a_connection_for_a_group_that_never_comes_ends_with_the_port() -> None:
    port = TcpListener(TOKEN, "127.0.0.1")
    early = impostor(port.address, 1, group=99)
    assert _eventually(lambda: bool(port._early))
    port.close()
    assert dropped(early)
    with pytest.raises(HoraError, match="closed"):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            mine.sendall(INTRODUCTION.pack(GENERATION, GROUP, 1, 0))
            port._on_connection(theirs)


def header(length: int, fingerprint: int = 5, magic: bytes = MAGIC, generation: int = GENERATION) -> bytes:
    return HEADER.pack(magic, generation, GROUP, POINT_TO_POINT, fingerprint, length)


FALSE_MESSAGES = {
    "an oversized length": (header(1 << 62), Mismatch),
    "the largest length": (header((1 << 64) - 1), Mismatch),
    "a length too small": (header(3), Mismatch),
    "another fingerprint": (header(4000, fingerprint=6), Mismatch),
    "another magic": (header(4000, magic=b"XXXX"), Mismatch),
    "another generation": (header(4000, generation=GENERATION + 1), Mismatch),
    "random bytes": (random.Random(2).randbytes(4096), Mismatch),
    "an end at once": (None, PeerLost),
    "half a header and the end": (header(4000)[:11], PeerLost),
    "half of the data and the end": (header(4000) + bytes(2000), PeerLost),
}


@pytest.mark.parametrize("what", FALSE_MESSAGES)
def test_a_false_message_is_an_error_that_names_the_peer_and_allocates_nothing(what: str) -> None:
    data, expected = FALSE_MESSAGES[what]
    memory: list[int] = []

    def work(group: Group) -> None:
        if group.rank == 0:
            memory.append(_resident_bytes())
            group.transport.recv(1, torch.zeros(1000), POINT_TO_POINT, fingerprint=5).wait()

    run = Run(2, "tcp").start(work)
    assert _eventually(lambda: bool(memory))
    assert run.worlds[0] and port_of(run.worlds[0])
    with impostor(port_of(run.worlds[0]).address, 1, POINT_TO_POINT) as sock:
        if data:
            sock.sendall(data)
        if expected is PeerLost:
            sock.shutdown(socket.SHUT_WR)
        started = time.monotonic()
        run.finish()
    assert time.monotonic() - started < 10.0
    assert type(run.errors[0]) is expected and "rank 1" in str(run.errors[0]), run.errors[0]
    assert _resident_bytes() - memory[0] < 50 << 20


@pytest.mark.parametrize("num_bytes", [0, 11, HEADER.size + 3999])
def test_a_message_that_never_ends_is_waited_for_until_the_timeout_and_the_peer_named(num_bytes: int) -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.transport.recv(1, torch.zeros(1000), POINT_TO_POINT, fingerprint=5).wait()

    run = Run(2, "tcp", timeout_s=1.0).start(work)
    assert _eventually(lambda: run.worlds[0] is not None)
    assert run.worlds[0] and port_of(run.worlds[0])
    with impostor(port_of(run.worlds[0]).address, 1, POINT_TO_POINT) as sock:
        sock.sendall((header(4000) + bytes(4000))[:num_bytes])
        run.finish()
    assert isinstance(run.errors[0], Timeout) and "rank 1" in str(run.errors[0])


def test_a_false_message_inside_a_collective_ends_it_on_every_rank() -> None:
    shown, called = threading.Event(), threading.Event()

    def work(group: Group) -> None:
        if group.rank == 1:
            shown.wait(20.0)  # the impostor was faster
        else:
            called.set()
        group.all_reduce(torch.ones(1000), algorithm="star", name="sum")

    run = Run(3, "tcp").start(work)
    assert called.wait(10.0) and _eventually(lambda: all(run.worlds))
    assert run.worlds[0] and port_of(run.worlds[0])
    with impostor(port_of(run.worlds[0]).address, 1) as sock:
        sock.sendall(HEADER.pack(MAGIC, GENERATION, GROUP, COLLECTIVES, 0, 1 << 60))
        assert _eventually(lambda: run.errors[0] is not None)
        shown.set()
        run.finish()
    assert isinstance(run.errors[0], Mismatch) and "rank 1" in str(run.errors[0]) and "sum" in str(run.errors[0])
    assert all(isinstance(error, HoraError) for error in run.errors), run.errors


# -- peers that are gone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["died", "left"])
def test_a_peer_that_is_gone_before_the_first_message_to_it_is_lost_and_not_dialled_on(end: str) -> None:
    gone = threading.Event()

    def work(group: Group) -> float:
        if group.rank == 1:
            world = run.worlds[1]
            assert world and port_of(world)
            port_of(world).close()
            gone.set()
            return 0.0
        gone.wait(20.0)
        started = time.monotonic()
        threading.Timer(0.2, depart).start()
        with pytest.raises(PeerLost, match="rank 1"):
            group.transport.send(1, torch.ones(4)).wait()
        return time.monotonic() - started

    def depart() -> None:
        if end == "died":
            run.hub.died(1, "killed by SIGKILL")
        else:
            run.hub._deliver(run.hub.coordinator.ended("worker", 1))

    run = Run(2, "tcp")
    run.start(work).finish()
    assert run.errors == [None, None] and run.results[0] < 5.0


def _eventually(holds: Callable[[], bool], patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
