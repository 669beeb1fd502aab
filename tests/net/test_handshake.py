"""Who gets in: both ends prove the token, and strangers cost little and not for long."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hora.errors import HoraError, Unauthorized
from hora.net import handshake
from hora.net.handshake import HANDSHAKE_S, MAGIC, NONCE_BYTES, PROOF_BYTES, AuthenticatedListener, connect

TOKEN, OTHER = b"a" * 32, b"b" * 32
LIMIT_S = 2 * HANDSHAKE_S  # patience, and as much again for a busy machine


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    with client, server:
        yield client, server


class Server:
    """A listener on loopback that keeps what was welcomed."""

    def __init__(self, purpose: str = "test", port: int = 0) -> None:
        self.sock = socket.create_server(("127.0.0.1", port), backlog=256)
        self.address: tuple[str, int] = self.sock.getsockname()
        self.welcomed: list[socket.socket] = []
        self.listener = AuthenticatedListener(self.sock, TOKEN, purpose, self.welcomed.append)

    def close(self) -> None:
        self.listener.close()
        for sock in self.welcomed:
            sock.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def both(
    pair: tuple[socket.socket, socket.socket],
    client_token: bytes,
    server_token: bytes,
    client_purpose: str = "test",
    server_purpose: str = "test",
) -> tuple[BaseException | None, BaseException | None]:
    """What the client and the server raised. Each closes its end when it is refused, as the callers do."""
    raised: list[BaseException | None] = [None, None]

    def side(index: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            raised[index] = error
            pair[index].close()

    client = functools.partial(handshake.client_handshake, pair[0], client_token, client_purpose)
    server = functools.partial(handshake.server_handshake, pair[1], server_token, server_purpose)
    threads = [threading.Thread(target=side, args=args) for args in ((0, client), (1, server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return raised[0], raised[1]


def closed_within(sock: socket.socket, limit_s: float) -> float:
    """How long it took until the other end closed; reads what comes before that."""
    started = time.monotonic()
    sock.settimeout(limit_s)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            sock.settimeout(max(0.01, limit_s - (time.monotonic() - started)))
    return time.monotonic() - started


def test_a_token_has_256_bits_and_is_never_the_same() -> None:
    tokens = {handshake.new_token() for _ in range(100)}
    assert len(tokens) == 100 and {len(token) for token in tokens} == {32}


def test_two_that_hold_the_token_are_let_in_and_can_talk(pair: tuple[socket.socket, socket.socket]) -> None:
    assert both(pair, TOKEN, TOKEN) == (None, None)
    assert pair[0].gettimeout() is None and pair[1].gettimeout() is None
    pair[0].sendall(b"hello")
    assert pair[1].recv(5) == b"hello"


def test_a_wrong_token_is_refused_on_both_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = both(pair, OTHER, TOKEN)
    assert isinstance(client, Unauthorized) and "another token" in str(client)
    assert isinstance(server, Unauthorized)


def test_a_proof_for_one_purpose_does_not_open_another(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = both(pair, TOKEN, TOKEN, "control", "link")
    assert isinstance(client, Unauthorized) and isinstance(server, Unauthorized)


def test_a_client_that_skips_the_servers_proof_still_has_to_give_its_own(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    client.sendall(MAGIC + bytes(NONCE_BYTES) + bytes(PROOF_BYTES))
    with pytest.raises(Unauthorized, match="wrong token"):
        handshake.server_handshake(server, TOKEN, "test")


def test_a_server_without_the_token_is_found_out(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    server.sendall(os.urandom(NONCE_BYTES + PROOF_BYTES))
    with pytest.raises(Unauthorized, match="another run"):
        handshake.client_handshake(client, TOKEN, "test")
    server.settimeout(0.5)
    assert len(server.recv(4096)) == len(MAGIC) + NONCE_BYTES  # the client gave nothing away after that
    with pytest.raises(TimeoutError):
        server.recv(1)


def test_a_server_that_returns_the_clients_own_words_is_found_out(pair: tuple[socket.socket, socket.socket]) -> None:
    """Reflection: a proof of one side is none of the other, so a client cannot be made to answer for a server."""
    client, server = pair

    def reflect() -> None:
        hello = server.recv(4096)
        nonce = hello[len(MAGIC) :]
        server.sendall(nonce + handshake._proof(TOKEN, "client", "test", nonce, nonce))

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(Unauthorized):
        handshake.client_handshake(client, TOKEN, "test")
    thread.join()


def test_the_bytes_of_a_good_client_are_refused_when_replayed(server: Server) -> None:
    recorded = bytearray()

    class Recorder:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def sendall(self, data: bytes) -> None:
            recorded.extend(data)
            self._sock.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    with socket.create_connection(server.address) as sock:
        handshake.client_handshake(Recorder(sock), TOKEN, "test")  # type: ignore[arg-type]
        assert _eventually(lambda: len(server.welcomed) == 1)
    assert len(recorded) == len(MAGIC) + NONCE_BYTES + PROOF_BYTES
    with socket.create_connection(server.address) as sock:
        sock.sendall(recorded)
        assert closed_within(sock, LIMIT_S) < LIMIT_S
    assert len(server.welcomed) == 1


@pytest.mark.parametrize("right_magic", [True, False])
def test_at_most_69_bytes_are_read_from_a_stranger(
    pair: tuple[socket.socket, socket.socket], right_magic: bool
) -> None:
    client, server = pair
    sent = (MAGIC if right_magic else b"GET /") + os.urandom(8192 - 5)
    client.sendall(sent)
    with pytest.raises(Unauthorized):
        handshake.server_handshake(server, TOKEN, "test")
    read = 69 if right_magic else len(MAGIC) + NONCE_BYTES
    server.settimeout(1.0)
    left = b""
    while len(left) < len(sent) - read:
        left += server.recv(1 << 16)
    assert left == sent[read:]


def test_strangers_that_stall_are_dropped_in_time(server: Server) -> None:
    stop = threading.Event()
    silent, half, unproved, slow = (socket.create_connection(server.address) for _ in range(4))
    half.sendall(MAGIC + bytes(10))
    unproved.sendall(MAGIC + bytes(NONCE_BYTES))
    threading.Thread(target=_trickle, args=(slow, stop), daemon=True).start()
    started = time.monotonic()
    for sock in (silent, half, unproved, slow):
        closed_within(sock, LIMIT_S)
        assert time.monotonic() - started < LIMIT_S
        sock.close()
    stop.set()
    assert server.welcomed == []


def _trickle(sock: socket.socket, stop: threading.Event) -> None:
    with contextlib.suppress(OSError):
        for byte in MAGIC + bytes(NONCE_BYTES):
            sock.sendall(bytes([byte]))
            if stop.wait(0.5):
                return


def test_a_client_gives_up_on_a_server_that_says_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        handshake.client_handshake(pair[0], TOKEN, "test", timeout_s=0.2)


def test_strangers_do_not_hold_up_one_of_ours(server: Server) -> None:
    strangers = [socket.create_connection(server.address) for _ in range(10)]
    started = time.monotonic()
    connect(server.address, TOKEN, "test", 10.0).close()
    assert time.monotonic() - started < HANDSHAKE_S  # it did not wait for them to be dropped
    for sock in strangers:
        sock.close()


def test_200_silent_strangers_keep_one_of_ours_out_for_seconds_at_most_and_take_no_memory(server: Server) -> None:
    threads, memory = threading.active_count(), _resident_bytes()
    strangers = [socket.create_connection(server.address) for _ in range(200)]
    assert _eventually(lambda: threading.active_count() > threads)
    assert threading.active_count() <= threads + handshake.MAX_HANDSHAKES
    started = time.monotonic()
    connect(server.address, TOKEN, "test", 20.0).close()
    assert time.monotonic() - started < 10.0
    assert _resident_bytes() - memory < 50 << 20
    for sock in strangers:
        assert closed_within(sock, LIMIT_S) < LIMIT_S
        sock.close()
    assert _eventually(lambda: threading.active_count() <= threads)
    assert len(server.welcomed) == 1


def test_dial_waits_for_one_who_does_not_listen_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found: list[Server] = []
    threading.Timer(0.2, lambda: found.append(Server(port=port))).start()
    connect(("127.0.0.1", port), TOKEN, "test", 10.0).close()
    assert _eventually(lambda: bool(found))
    found[0].close()


def test_dial_gives_up_in_time_and_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(HoraError, match=f"127.0.0.1:{port}"):
        connect(("127.0.0.1", port), TOKEN, "test", 0.3)


def test_dial_gives_up_at_once_when_the_other_end_is_known_to_be_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    tries: list[int] = []

    def check() -> None:
        tries.append(1)
        if len(tries) == 3:
            raise HoraError("it is dead")

    with pytest.raises(HoraError, match="it is dead"):
        connect(address, TOKEN, "test", 30.0, check=check)


def test_a_closed_listener_accepts_nobody_and_ends_its_thread() -> None:
    server = Server("gone")
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, 1.0)
    assert _eventually(lambda: "hora-listen-gone" not in {thread.name for thread in threading.enumerate()})


def test_a_welcome_that_fails_costs_only_its_own_connection() -> None:
    def welcome(sock: socket.socket) -> None:
        raise ValueError("no")

    listening = socket.create_server(("127.0.0.1", 0))
    listener = AuthenticatedListener(listening, TOKEN, "test", welcome)
    for _ in range(3):
        with connect(listening.getsockname(), TOKEN, "test", 5.0) as sock:
            assert closed_within(sock, LIMIT_S) < LIMIT_S
    listener.close()


def _eventually(holds: Callable[[], bool], patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
