"""The coordinator behind its socket, over real loopback connections."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from hora.collectives import Group
from hora.coordinator import CoordinatorClient, CoordinatorEvent, CoordinatorService, Member
from hora.coordinator.client import PURPOSE
from hora.coordinator.messages import Join, decode_answer
from hora.errors import HoraError, Timeout, Unauthorized
from hora.net.framing import MAX_FRAME_BYTES, FrameReader, frame
from hora.net.handshake import connect
from hora.rendezvous.context import RunContext
from hora.world import World

TOKEN = b"s" * 32


@pytest.fixture
def serve() -> Iterator[Callable[[int], CoordinatorService]]:
    started: list[CoordinatorService] = []

    def start(size: int) -> CoordinatorService:
        service = CoordinatorService(TOKEN, size)
        service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()


class Line:
    """A client that has joined, and what it heard."""

    def __init__(self, service: CoordinatorService, rank: int) -> None:
        self.client = CoordinatorClient(service.address, TOKEN, 10.0)
        self.heard: list[CoordinatorEvent] = []
        self._news = threading.Condition()
        self.client.subscribe(self._hear)
        self.member = Member("worker", rank, "test", os.getpid())

    def _hear(self, event: CoordinatorEvent) -> None:
        with self._news:
            self.heard.append(event)
            self._news.notify_all()

    def await_event(self, kind: str, count: int = 1) -> CoordinatorEvent:
        with self._news:
            assert self._news.wait_for(lambda: len([e for e in self.heard if e.kind == kind]) >= count, 10.0), kind
            return [e for e in self.heard if e.kind == kind][count - 1]


def lines(service: CoordinatorService, size: int) -> list[Line]:
    """`size` clients that have joined, in order of rank."""
    made = [Line(service, rank) for rank in range(size)]
    threads = [threading.Thread(target=line.client.join, args=(line.member, "", 10.0)) for line in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)
        assert not thread.is_alive()
    return made


def raw(service: CoordinatorService, member: Member | None = None) -> socket.socket:
    """An authenticated connection without a client behind it; as `member` it has asked to join."""
    sock = connect(service.address, TOKEN, PURPOSE, 5.0)
    if member is not None:
        sock.sendall(frame(Join(id=1, member=member)))
    sock.settimeout(10.0)
    return sock


def ended(sock: socket.socket) -> bool:
    """Whether the other end has closed; reads what is still to come."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def eventually(holds: Callable[[], bool], patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_members_join_share_values_and_send_messages(serve: Callable[[int], CoordinatorService]) -> None:
    service = serve(2)
    zero, one = lines(service, 2)
    with pytest.raises(Timeout, match="'k'"):
        zero.client.get("k", timeout_s=0.05)
    one.client.put("k", b"value")
    assert zero.client.get("k") == b"value" and service.values("k") == {"k": b"value"}
    zero.client.send("topic", b"body", (1,))
    told = one.await_event("message")
    assert (told.topic, told.body, told.member) == ("topic", b"body", zero.member)
    one.client.stop("enough")
    assert zero.await_event("stop").text == one.await_event("stop").text == "enough"
    one.client.leave()
    assert zero.await_event("left").member == one.member


def test_a_get_that_waits_is_answered_by_a_later_put(serve: Callable[[int], CoordinatorService]) -> None:
    zero, one = lines(serve(2), 2)
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(zero.client.get("later", 10.0)))
    waiter.start()
    one.client.put("other", b"")  # the service has gone on since
    one.client.put("later", b"came")
    waiter.join(10.0)
    assert found == [b"came"]


def test_a_client_with_another_token_is_refused(serve: Callable[[int], CoordinatorService]) -> None:
    with pytest.raises(Unauthorized):
        CoordinatorClient(serve(1).address, b"x" * 32, 5.0)


def test_a_refused_join_says_why(serve: Callable[[int], CoordinatorService]) -> None:
    line = Line(serve(2), 7)
    with pytest.raises(HoraError, match="0 to 1"):
        line.client.join(line.member, timeout_s=5.0)


def test_a_member_that_dies_without_a_word_is_reported_dead(serve: Callable[[int], CoordinatorService]) -> None:
    zero, one = lines(serve(2), 2)
    one.client.close()
    died = zero.await_event("died")
    assert died.member == one.member and died.text == "its connection broke"


def test_a_reported_death_reaches_the_others_before_the_connection_breaks(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(3)
    zero, one, two = lines(service, 3)
    service.report_death(1, "killed by SIGKILL")
    assert zero.await_event("died").text == two.await_event("died").text == "killed by SIGKILL"
    one.client.close()
    zero.client.put("k", b"")
    assert [event.text for event in zero.heard if event.kind == "died"] == ["killed by SIGKILL"]


def test_a_death_before_anybody_listens_is_heard_by_the_first_who_does(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(2)
    joined = raw(service, Member("worker", 1, "test", 1))
    client = CoordinatorClient(service.address, TOKEN, 10.0)
    client.join(Member("worker", 0, "test", os.getpid()), timeout_s=10.0)
    service.report_death(1, "killed")
    client.put("k", b"")  # its answer comes after the event
    heard: list[tuple[str, str]] = []
    client.subscribe(lambda event: heard.append((event.kind, event.text)))
    assert heard == [("formed", ""), ("died", "killed")]
    client.close()
    joined.close()


def test_a_reported_end_is_told_as_left_and_a_bad_end_after_it_as_died(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(2)
    zero, _ = lines(service, 2)
    service.report_exit(1)
    assert zero.await_event("left").member.rank == 1  # type: ignore[union-attr]
    service.report_death(1, "exit code 3")
    assert zero.await_event("died").text == "exit code 3"


def test_a_death_before_all_have_joined_ends_the_wait_of_those_who_have(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(2)
    line = Line(service, 0)
    threading.Timer(0.1, service.report_death, (1, "ModuleNotFoundError")).start()
    with pytest.raises(HoraError, match=r"rank 1.*ModuleNotFoundError"):
        line.client.join(line.member, timeout_s=10.0)


def test_the_line_that_breaks_ends_every_wait_and_says_so_once(serve: Callable[[int], CoordinatorService]) -> None:
    service = serve(1)
    (line,) = lines(service, 1)
    lost: list[str] = []
    line.client.on_lost = lost.append
    threading.Timer(0.1, service.close).start()
    with pytest.raises(HoraError, match="connection to the coordinator"):
        line.client.get("never", 10.0)
    assert eventually(lambda: len(lost) == 1)
    with pytest.raises(HoraError, match="connection to the coordinator"):
        line.client.put("k", b"")


def test_a_member_that_does_not_read_is_dropped_and_the_others_go_on(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(3)
    deaf = raw(service, Member("worker", 2, "test", 1))
    zero, one = lines(service, 2)
    for _ in range(400):  # 25 MB: more than the kernel's buffers and the backlog together
        zero.client.send("noise", bytes(64 << 10), (2,))
    zero.client.put("still", b"there")
    assert one.client.get("still") == b"there"
    assert zero.await_event("died").member.rank == one.await_event("died").member.rank == 2  # type: ignore[union-attr]
    zero.client.send("quiet", b"", (1,))
    assert one.await_event("message").topic == "quiet"
    deaf.close()


def test_a_member_dropped_while_it_speaks_does_not_take_the_service_down(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(2)
    deaf = raw(service, Member("worker", 1, "test", 1))
    (zero,) = lines(service, 1)
    with service._lock:  # the loop waits here: both ends have something for it
        for connection in list(service._connections.values()):
            if service.coordinator._by_connection.get(connection.number) == ("worker", 1):
                deaf.sendall(frame(Join(id=2, member=Member("worker", 1, "test", 1))))
                time.sleep(0.2)  # the loop has seen it readable and waits for its turn
                service._drop(connection, "does not read")
    assert zero.await_event("died").text == "its connection broke"
    zero.client.put("still", b"there")
    deaf.close()


def _try(work: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        work()


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


NONSENSE = {
    "random bytes": random.Random(1).randbytes(4096),
    "an oversized length": struct.pack("<I", MAX_FRAME_BYTES + 1) + b"x" * 64,
    "the largest length": b"\xff\xff\xff\xff",
    "no message": framed(b"\xc1" * 200),
    "an empty frame": framed(b""),
    "another type": framed(b"\x07"),
    "a wrong field": framed(b"\x82\xa2do\xa3put\xa3key\x01"),
    "text that is none": framed(b"\x82\xa2do\xa4stop\xa6reason\xa1\xff"),
    "endless nesting": framed(b"\x82\xa2do\xa4stop\xa1x" + b"\x91" * 50_000),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_drops_only_the_connection_it_came_on(serve: Callable[[int], CoordinatorService], what: str) -> None:
    service = serve(2)
    zero, one = lines(service, 2)
    sock = raw(service)
    sock.sendall(NONSENSE[what])
    assert ended(sock), what
    sock.close()
    zero.client.put("k", b"v")
    assert one.client.get("k") == b"v"
    assert not [event for event in zero.heard if event.kind == "died"]


def test_a_member_that_talks_nonsense_is_dead_to_the_others(serve: Callable[[int], CoordinatorService]) -> None:
    service = serve(2)
    sock = raw(service, Member("worker", 1, "test", 1))
    (zero,) = lines(service, 1)
    sock.sendall(NONSENSE["the largest length"])
    assert zero.await_event("died").member.rank == 1  # type: ignore[union-attr]
    sock.close()


def test_seeded_nonsense_never_stops_the_service(serve: Callable[[int], CoordinatorService]) -> None:
    service = serve(2)
    zero, one = lines(service, 2)
    chance = random.Random(7)
    good = frame(Join(id=1, member=Member("worker", 5, "test", 1)))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(150):
        data = bytearray(good * chance.randint(1, 3))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with raw(service) as sock:
            _try(lambda sock=sock, data=data: sock.sendall(data[: chance.randint(1, len(data))]))
    zero.client.put("k", b"v")
    assert one.client.get("k") == b"v"
    assert eventually(lambda: len(service._connections) == 2)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


def test_a_frame_announced_and_never_sent_takes_no_memory(serve: Callable[[int], CoordinatorService]) -> None:
    service = serve(1)
    (zero,) = lines(service, 1)
    sock = raw(service)
    sock.sendall(struct.pack("<I", MAX_FRAME_BYTES) + b"x")
    zero.client.put("k", b"")
    assert eventually(lambda: 5 in [len(c.frames._pending) for c in list(service._connections.values())])
    sock.close()


def test_a_stream_is_cut_into_frames_wherever_it_is_split() -> None:
    messages = [frame(Join(id=i, member=Member("worker", i, "h" * i, i))) for i in range(20)]
    stream, chance, frames, bodies = b"".join(messages), random.Random(3), FrameReader(), []
    while stream:
        count = chance.randint(1, 40)
        bodies += frames.feed(stream[:count])
        stream = stream[count:]
    assert bodies == [message[4:] for message in messages]


def test_an_answer_too_large_for_a_frame_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="limit"):
        frame(Join(member=Member("worker", 0, "h" * MAX_FRAME_BYTES, 1)))
    with pytest.raises(ValueError):
        decode_answer(b"\x80")


def test_close_leaves_no_port_thread_or_descriptor(serve: Callable[[int], CoordinatorService]) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    service = serve(2)
    made = lines(service, 2)
    service.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(service.address, 1.0)
    for line in made:
        line.client.close()
    assert eventually(lambda: threading.active_count() <= threads)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_a_connection_that_proves_its_token_while_the_service_closes_is_closed(
    serve: Callable[[int], CoordinatorService],
) -> None:
    service = serve(1)
    service.close()
    mine, theirs = socket.socketpair()
    service._add(theirs)
    assert mine.recv(1) == b""
    mine.close()


@pytest.mark.parametrize(("transport", "algorithm"), [("tcp", "ring"), ("shm", "shared"), ("shm", "ring")])
def test_no_tensor_bytes_pass_through_the_coordinator(
    serve: Callable[[int], CoordinatorService], transport: str, algorithm: str
) -> None:
    service = serve(2)
    passed: dict[int, int] = collections.defaultdict(int)
    together = threading.Barrier(2, timeout=20.0)
    errors: list[BaseException] = []

    def work(group: Group) -> None:
        group.all_reduce(torch.ones(16), algorithm=algorithm)  # connections are made and addresses known
        for numel in (1 << 10, 1 << 21):
            tensor = torch.full((numel,), float(group.rank + 1))
            together.wait()
            before = service.bytes_in + service.bytes_out
            together.wait()
            group.all_reduce(tensor, algorithm=algorithm)
            together.wait()
            if group.rank == 0:
                passed[numel * 4] = service.bytes_in + service.bytes_out - before
            assert bool((tensor == 3).all())

    def rank(number: int) -> None:
        try:
            client = CoordinatorClient(service.address, TOKEN, 10.0)
            answer = client.join(Member("worker", number, "test", os.getpid()), timeout_s=10.0)
            context = RunContext(control=client, token=TOKEN, rank=number, timeout_s=20.0)
            world = World(context, answer.members, answer.generation, transport=transport)
            try:
                work(world.group)
            finally:
                world.close()
                client.leave()
                client.close()
        except BaseException as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
        assert not thread.is_alive()
    assert not errors, errors
    # A wait longer than NOTICE_S asks its question over the coordinator: a few hundred bytes, whatever the size.
    assert passed[4096] < 4096 and passed[8 << 20] < 4096, dict(passed)
