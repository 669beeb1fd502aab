"""Meeting: how the ranks of a run find the coordinator and agree on the token, under whichever launcher started them.

hora       the launcher hosts the coordinator; address in the environment, token through an inherited descriptor
torchrun   rank 0 hosts it; address and token through torchrun's store
mpirun     rank 0 hosts it; on one host through an abstract Unix socket, whose peers' uid the kernel vouches for;
           between hosts through mpi4py
slurm      rank 0 hosts it; on one node through the abstract socket; between nodes on the step's first node, with a
           token from a file that all nodes can read
alone      a coordinator inside this process
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import logging
import os
import re
import socket
import stat
import threading
import time

from .. import handshake
from ..coordinator import Client, Control, LocalHub, Service
from ..errors import HoraError, Timeout, Unauthorized
from .environment import Identity

log = logging.getLogger(__name__)

MEET_S = 120.0


@dataclasses.dataclass
class Meeting:
    """A member's line to the coordinator, the token, and the coordinator itself where this process hosts it."""

    control: Control
    token: bytes
    service: Service | None = None


def meet(identity: Identity) -> Meeting:
    """Blocks until the coordinator is reached; an error names the address that was tried."""
    if identity.launcher == "hora":
        return _through_launcher(identity)
    if identity.launcher == "torchrun":
        return _through_store(identity)
    if identity.launcher == "alone":
        return Meeting(LocalHub(1).line(), handshake.new_token())
    if identity.one_host:
        return _through_socket(identity)
    if identity.launcher == "mpirun":
        return _through_mpi(identity)
    return _through_first_node(identity)


def _through_launcher(identity: Identity) -> Meeting:
    if identity.token_fd is None:
        raise HoraError("HORA_RANK is set but HORA_TOKEN_FD is not: was this process started by hora run?")
    try:
        token = os.pread(identity.token_fd, 32, 0)
    except OSError as problem:
        raise HoraError(
            f"the run's token cannot be read from descriptor {identity.token_fd}: {problem}. A wrapper between "
            "hora run and the script must pass its descriptors on (subprocess: close_fds=False)."
        ) from None
    return Meeting(Client(_address(identity.address), token), token)


def _host(identity: Identity, token: bytes, bind: str, port: int = 0) -> Service:
    service = Service(token, identity.size, run=identity.job, bind=bind, port=port)
    service.start()
    return service


def _through_store(identity: Identity) -> Meeting:
    from torch.distributed import PrefixStore, TCPStore

    host, port = _address(identity.address)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    try:
        plain = TCPStore(
            host,
            port,
            identity.size,
            identity.rank == 0 and not agent,
            datetime.timedelta(seconds=MEET_S),
            wait_for_workers=False,
        )
    except Exception as problem:
        raise HoraError(f"rank {identity.rank} cannot reach torchrun's store at {host}:{port}: {problem}") from None
    store = PrefixStore(f"hora/{identity.job}", plain)
    if identity.rank == 0:
        token = handshake.new_token()
        bind = "127.0.0.1" if identity.one_host else identity.bind
        service = _host(identity, token, _reachable(identity, bind, host))
        store.set("control", f"{service.address[0]} {service.address[1]} {token.hex()}")
        meeting = Meeting(Client(service.address, token), token, service)
    else:
        meeting = _from_words(store.get("control").decode())
    meeting.store = plain  # type: ignore[attr-defined]  # it must live as long as others may still read it
    return meeting


def _reachable(identity: Identity, bind: str, master: str) -> str:
    """Where rank 0 listens when ranks are on several hosts: the address the launcher named, unless one was given."""
    if identity.one_host or bind != "127.0.0.1":
        return bind
    return socket.gethostbyname(master)


def _through_socket(identity: Identity) -> Meeting:
    """Rank 0 hands address and token to whoever connects under the same uid."""
    name = hashlib.sha256(f"{identity.job}|{os.getuid()}".encode()).hexdigest()[:24]
    address = f"\0hora-meet-{name}"
    if identity.rank == 0:
        token = handshake.new_token()
        service = _host(identity, token, "127.0.0.1")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address)
        except OSError as problem:
            raise HoraError(f"rank 0 cannot open the meeting place of job {identity.job!r}: {problem}") from None
        listening.listen(identity.size)
        words = f"{service.address[0]} {service.address[1]} {token.hex()}"
        threading.Thread(target=_hand_out, args=(listening, words, identity.size - 1), daemon=True).start()
        return Meeting(Client(service.address, token), token, service)
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(10.0)
                sock.connect(address)
                if handshake.peer_credentials(sock)[1] != os.getuid():
                    raise Unauthorized("another user's process sits at this job's meeting place")
                words = sock.makefile().readline()
            return _from_words(words)
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            if time.monotonic() > deadline:
                raise Timeout(f"rank {identity.rank} waited {MEET_S:g} s for rank 0 of job {identity.job!r}") from None
            time.sleep(0.02)


def _hand_out(listening: socket.socket, words: str, count: int) -> None:
    with listening:
        while count:
            sock, _ = listening.accept()
            with sock, contextlib.suppress(OSError):
                if handshake.peer_credentials(sock)[1] == os.getuid():
                    sock.sendall(words.encode() + b"\n")
                    count -= 1


def _through_mpi(identity: Identity) -> Meeting:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        raise HoraError(
            f"mpirun started ranks on several hosts; to meet they need mpi4py (pip install hora[mpi]): {problem}"
        ) from None
    service, words = None, b""
    token = handshake.new_token()
    if identity.rank == 0:
        bind = identity.bind if identity.bind != "127.0.0.1" else socket.gethostbyname(socket.gethostname())
        service = _host(identity, token, bind)
        words = f"{service.address[0]} {service.address[1]} {token.hex()}".encode()
    line = bytearray(words.ljust(256))
    MPI.COMM_WORLD.Bcast([line, MPI.BYTE], root=0)
    if service:
        return Meeting(Client(service.address, token), token, service)
    return _from_words(line.decode())


def _through_first_node(identity: Identity) -> Meeting:
    if not identity.token_file:
        raise HoraError(
            f"this Slurm step spans several nodes ({identity.address}): set HORA_TOKEN_FILE to a file of 32 random "
            "bytes, mode 0600, that all nodes can read "
            "(head -c 32 /dev/urandom > ~/.hora-token; chmod 600 ~/.hora-token)"
        )
    token = read_token_file(identity.token_file)
    first = first_host(identity.address)
    port = 20000 + int.from_bytes(hashlib.sha256(identity.job.encode()).digest()[:2], "little") % 20000
    service = _host(identity, token, socket.gethostbyname(first), port) if identity.rank == 0 else None
    return Meeting(Client((first, port), token, MEET_S), token, service)


def read_token_file(path: str) -> bytes:
    """32 bytes or more from a file that nobody else can read."""
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise HoraError(f"{path} can be read by others: chmod 600 {path}")
            token = file.read(4096)
    except OSError as problem:
        raise HoraError(f"the token file cannot be read: {problem}") from None
    if len(token) < 32:
        raise HoraError(f"{path} holds {len(token)} bytes; a token has 32 random ones at least")
    return token


def first_host(nodes: str) -> str:
    """The first host of Slurm's compact list: `n[07-09,12],m1` -> `n07`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if not found:
        raise HoraError(f"Slurm's node list {nodes!r} names no host")
    return found.group(1) + (found.group(2) or "")


def _from_words(words: str) -> Meeting:
    try:
        host, port, token = words.split()
    except ValueError:
        raise HoraError("rank 0 ended before it said where to meet") from None
    return Meeting(Client((host, int(port)), bytes.fromhex(token)), bytes.fromhex(token))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
