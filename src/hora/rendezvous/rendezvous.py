"""Meeting: how the ranks of a run find the coordinator and agree on the token, under whichever launcher started them.

hora       the launcher hosts the coordinator; address in the environment, token through an inherited descriptor
torchrun   rank 0 hosts it; address and token through torchrun's store
mpirun     rank 0 hosts it; on one host through an abstract Unix socket, whose peers' uid the kernel vouches for;
           between hosts through mpi4py
slurm      rank 0 hosts it; on one node through the abstract socket; between nodes on the step's first node, with a
           token from a file that all nodes can read
alone      a coordinator inside this process

On one host all listen on loopback. On several each listens on the address that the user named (HORA_BIND, or an
interface by HORA_INTERFACE), else on the one from which it reaches the coordinator; rank 0, who hosts it, on the one by
which the launcher knows its host.
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

from ..coordinator import CoordinatorClient, CoordinatorLine, CoordinatorService, LocalHub
from ..errors import HoraError, Timeout, Unauthorized
from ..net import handshake, interface
from .environment import ProcessIdentity

log = logging.getLogger(__name__)

MEET_S = 120.0
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass
class Rendezvous:
    """A member's line to the coordinator, the token, and the coordinator itself where this process hosts it.

    `bind` is the address on which this process listens for the others.
    """

    control: CoordinatorLine
    token: bytes
    service: CoordinatorService | None = None
    bind: str = LOOPBACK


def rendezvous(identity: ProcessIdentity) -> Rendezvous:
    """Blocks until the coordinator is reached; an error names the address that was tried."""
    if identity.bind in ("0.0.0.0", "::") and not identity.one_host:
        raise ValueError(
            f"HORA_BIND={identity.bind} is no address by which the others could reach this process: name one of this "
            "host's, or its interface by HORA_INTERFACE"
        )
    if identity.launcher == "hora":
        return _through_launcher(identity)
    if identity.launcher == "torchrun":
        return _through_store(identity)
    if identity.launcher == "alone":
        return Rendezvous(LocalHub(1).line(), handshake.new_token(), bind=identity.bind or LOOPBACK)
    if identity.one_host:
        return _through_socket(identity)
    if identity.launcher == "mpirun":
        return _through_mpi(identity)
    return _through_first_node(identity)


def _chosen(identity: ProcessIdentity) -> str:
    """The address to listen on where the user, or there being one host, decides it; else empty."""
    if identity.bind or identity.one_host:
        return identity.bind or LOOPBACK
    if not identity.interface:
        return ""
    try:
        return interface.named(identity.interface)
    except ValueError as problem:
        raise ValueError(f"HORA_INTERFACE on {identity.host}: {problem}") from None


def _own_address(identity: ProcessIdentity, name: str) -> str:
    """Rank 0's on several hosts, whose launcher calls this one `name`."""
    try:
        return interface.outward(name)
    except OSError as problem:
        raise HoraError(
            f"{identity.name} on {identity.host} finds no address by which the other hosts reach it: {problem}; "
            "HORA_INTERFACE names one"
        ) from None


def _line(identity: ProcessIdentity, address: tuple[str, int], token: bytes, timeout_s: float = 30.0) -> Rendezvous:
    """Reaches the coordinator at `address`, which another process hosts."""
    try:
        control = CoordinatorClient(address, token, timeout_s)
    except HoraError as problem:
        if identity.one_host or isinstance(problem, Unauthorized):
            raise
        raise HoraError(
            f"{identity.name} on {identity.host} cannot reach the coordinator at {address[0]}:{address[1]}: {problem}; "
            "if that is not the network between the hosts, HORA_INTERFACE names another interface (eth1, 10.0.0.0/24)"
        ) from None
    try:
        bind = _chosen(identity) or interface.route_to(address[0])
    except OSError as problem:
        raise HoraError(f"{identity.name} on {identity.host} finds no route to {address[0]}: {problem}") from None
    return Rendezvous(control, token, bind=bind)


def _through_launcher(identity: ProcessIdentity) -> Rendezvous:
    if identity.token_fd is None:
        raise HoraError("HORA_RANK is set but HORA_TOKEN_FD is not: was this process started by hora run?")
    try:
        token = os.pread(identity.token_fd, 32, 0)
    except OSError as problem:
        raise HoraError(
            f"the run's token cannot be read from descriptor {identity.token_fd}: {problem}. A wrapper between "
            "hora run and the script must pass its descriptors on (subprocess: close_fds=False)."
        ) from None
    return _line(identity, _address(identity.address), token)


def _host(identity: ProcessIdentity, token: bytes, bind: str, port: int = 0, data: str = "") -> Rendezvous:
    """Rank 0 hosts the coordinator at `bind`, and listens for the others at `data` where that is not the same."""
    try:
        service = CoordinatorService(
            token, identity.size, servers=identity.servers or 0, run=identity.job, bind=bind, port=port
        )
    except OSError as problem:
        raise HoraError(f"rank 0 on {identity.host} cannot listen on {bind}:{port}: {problem}") from None
    service.start()
    if not identity.one_host:
        log.warning(
            "ranks on several hosts meet at %s:%d (%s); HORA_INTERFACE chooses another",
            bind, service.address[1], interface.name_of(bind) or identity.host,
        )  # fmt: skip
    return Rendezvous(CoordinatorClient(service.address, token), token, service, data or bind)


def _words(meeting: Rendezvous) -> str:
    """Where and with what the others reach the coordinator that this meeting hosts."""
    assert meeting.service is not None
    host, port = meeting.service.address
    return f"{host} {port} {meeting.token.hex()}"


def _through_store(identity: ProcessIdentity) -> Rendezvous:
    from torch.distributed import PrefixStore, TCPStore

    host, port = _address(identity.address)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    try:
        plain = TCPStore(
            host,
            port,
            identity.num_processes,
            identity.hosts_coordinator and not agent,
            datetime.timedelta(seconds=MEET_S),
            wait_for_workers=False,
        )
    except Exception as problem:
        raise HoraError(f"{identity.name} cannot reach torchrun's store at {host}:{port}: {problem}") from None
    store = PrefixStore(f"hora/{identity.job}", plain)
    if identity.hosts_coordinator:
        meeting = _host(identity, handshake.new_token(), _chosen(identity) or _own_address(identity, host))
        store.set("control", _words(meeting))
    else:
        meeting = _from_words(identity, store.get("control").decode())
    meeting.store = plain  # type: ignore[attr-defined]  # it must live as long as others may still read it
    return meeting


def _through_socket(identity: ProcessIdentity) -> Rendezvous:
    """Rank 0 hands address and token to whoever connects under the same uid."""
    name = hashlib.sha256(f"{identity.job}|{os.getuid()}".encode()).hexdigest()[:24]
    address = f"\0hora-meet-{name}"
    if identity.hosts_coordinator:
        meeting = _host(identity, handshake.new_token(), _chosen(identity))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address)
        except OSError as problem:
            raise HoraError(f"rank 0 cannot open the meeting place of job {identity.job!r}: {problem}") from None
        listening.listen(identity.num_processes)
        others = identity.num_processes - 1
        threading.Thread(target=_hand_out, args=(listening, _words(meeting), others), daemon=True).start()
        return meeting
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(10.0)
                sock.connect(address)
                if handshake.peer_credentials(sock)[1] != os.getuid():
                    raise Unauthorized("another user's process sits at this job's meeting place")
                words = sock.makefile().readline()
            return _from_words(identity, words)
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            if time.monotonic() > deadline:
                raise Timeout(f"{identity.name} waited {MEET_S:g} s for rank 0 of job {identity.job!r}") from None
            time.sleep(0.02)


def _hand_out(listening: socket.socket, words: str, count: int) -> None:
    with listening:
        while count:
            sock, _ = listening.accept()
            with sock, contextlib.suppress(OSError):
                if handshake.peer_credentials(sock)[1] == os.getuid():
                    sock.sendall(words.encode() + b"\n")
                    count -= 1


def _through_mpi(identity: ProcessIdentity) -> Rendezvous:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        raise HoraError(
            f"mpirun started ranks on several hosts; to meet they need mpi4py (pip install hora[mpi]): {problem}"
        ) from None
    meeting = None
    if identity.hosts_coordinator:
        bind = _chosen(identity) or _own_address(identity, socket.gethostname())
        meeting = _host(identity, handshake.new_token(), bind)
    line = bytearray((_words(meeting).encode() if meeting else b"").ljust(256))
    MPI.COMM_WORLD.Bcast([line, MPI.BYTE], root=0)
    return meeting or _from_words(identity, line.decode())


def _through_first_node(identity: ProcessIdentity) -> Rendezvous:
    if not identity.token_file:
        raise HoraError(
            f"this Slurm step spans several nodes ({identity.address}): set HORA_TOKEN_FILE to a file of 32 random "
            "bytes, mode 0600, that all nodes can read "
            "(head -c 32 /dev/urandom > ~/.hora-token; chmod 600 ~/.hora-token)"
        )
    token = read_token_file(identity.token_file)
    first = first_host(identity.address)
    port = 20000 + int.from_bytes(hashlib.sha256(identity.job.encode()).digest()[:2], "little") % 20000
    if identity.hosts_coordinator:  # where the others look for it: by the name of its host
        return _host(identity, token, identity.bind or _own_address(identity, first), port, _chosen(identity))
    return _line(identity, (first, port), token, MEET_S)


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


def _from_words(identity: ProcessIdentity, words: str) -> Rendezvous:
    try:
        host, port, token = words.split()
    except ValueError:
        raise HoraError("rank 0 ended before it said where to meet") from None
    return _line(identity, (host, int(port)), bytes.fromhex(token))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
