"""Rendezvous: how the processes of a run reach the coordinator and get the run's token, under each launcher.

hora       the launcher hosts the coordinator; address in the environment, token through an inherited descriptor
torchrun   rank 0 hosts it; address and token through torchrun's store
mpirun     rank 0 hosts it; on one host through an abstract Unix socket with a check of the peer's uid (SO_PEERCRED);
           between hosts through mpi4py
slurm      rank 0 hosts it; on one node through the abstract socket; between nodes on the step's first node, with a
           token from a file that all nodes can read
alone      a coordinator inside this process

On one host all processes listen on loopback. On several hosts a process listens on the address of HORA_BIND or of the
interface HORA_INTERFACE, else on the one from which it reaches the coordinator. Rank 0, if it hosts the coordinator,
listens on the address by which the launcher knows its host.
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

from ..coordinator import CoordinatorClient, CoordinatorConnection, CoordinatorService, InProcessCoordinator
from ..errors import HoraError, Timeout, Unauthorized
from ..net import handshake, interface
from .context import LOOPBACK, TIMEOUT_S, ProcessIdentity, RunContext

log = logging.getLogger(__name__)

RENDEZVOUS_S = 120.0


def rendezvous(identity: ProcessIdentity, *, timeout_s: float = TIMEOUT_S, shared: bool = True) -> RunContext:
    """Blocks until the coordinator is reached; an error names the address that was tried."""
    if identity.bind in ("0.0.0.0", "::") and not identity.one_host:
        raise ValueError(
            f"HORA_BIND={identity.bind}: the other hosts cannot reach this process at that address; name an address of "
            "this host, or set HORA_INTERFACE to its network interface"
        )
    return dataclasses.replace(_connect(identity), timeout_s=timeout_s, shared=shared)


def _connect(identity: ProcessIdentity) -> RunContext:
    if identity.launcher == "hora":
        return _through_launcher(identity)
    if identity.launcher == "torchrun":
        return _through_store(identity)
    if identity.launcher == "alone":
        return _context(identity, InProcessCoordinator(1).connect(), handshake.new_token(), identity.bind or LOOPBACK)
    if identity.one_host:
        return _through_socket(identity)
    if identity.launcher == "mpirun":
        return _through_mpi(identity)
    return _through_first_node(identity)


def _context(
    identity: ProcessIdentity,
    control: CoordinatorConnection,
    token: bytes,
    bind: str,
    service: CoordinatorService | None = None,
) -> RunContext:
    """Without server processes the workers of the launch host one server each."""
    servers = {"num_servers": identity.servers or identity.size, "colocated": identity.servers is None}
    found = {"control": control, "token": token, "bind": bind, "service": service, "timeout_s": TIMEOUT_S}
    return RunContext(**(vars(identity) | servers | found))


def _bind_address(identity: ProcessIdentity) -> str:
    """The address to listen on: the user's choice, or loopback on one host; else empty."""
    if identity.bind or identity.one_host:
        return identity.bind or LOOPBACK
    if not identity.interface:
        return ""
    try:
        return interface.address_on(identity.interface)
    except ValueError as problem:
        raise ValueError(f"HORA_INTERFACE on {identity.host}: {problem}") from None


def _own_address(identity: ProcessIdentity, name: str) -> str:
    """Rank 0's address on several hosts; the launcher calls this host `name`."""
    try:
        return interface.reachable_address(name)
    except OSError as problem:
        raise HoraError(
            f"{identity.name} found no address at which other hosts can reach it: {problem}; set HORA_INTERFACE"
        ) from None


def _dial(identity: ProcessIdentity, address: tuple[str, int], token: bytes, timeout_s: float = 30.0) -> RunContext:
    """Connects to the coordinator of another process."""
    try:
        control = CoordinatorClient(address, token, timeout_s)
    except HoraError as problem:
        if identity.one_host or isinstance(problem, Unauthorized):
            raise
        raise HoraError(
            f"{identity.name} cannot reach the coordinator at {address[0]}:{address[1]}: {problem}; "
            "if that is not the network between the hosts, set HORA_INTERFACE to another interface (eth1, 10.0.0.0/24)"
        ) from None
    try:
        bind = _bind_address(identity) or interface.route_to(address[0])
    except OSError as problem:
        raise HoraError(f"{identity.name} has no route to {address[0]}: {problem}") from None
    return _context(identity, control, token, bind)


def _through_launcher(identity: ProcessIdentity) -> RunContext:
    if identity.token_fd is None:
        raise HoraError("HORA_RANK is set but HORA_TOKEN_FD is not: was this process started by hora run?")
    try:
        token = os.pread(identity.token_fd, 32, 0)
    except OSError as problem:
        raise HoraError(
            f"the run's token cannot be read from descriptor {identity.token_fd}: {problem}. A wrapper between "
            "hora run and the script must pass its descriptors on (subprocess: close_fds=False)."
        ) from None
    return _dial(identity, _address(identity.address), token)


def _host(identity: ProcessIdentity, token: bytes, bind: str, port: int = 0, data: str = "") -> RunContext:
    """Starts the coordinator in this process, listening at `bind`; `data`: the address for the other connections."""
    try:
        service = CoordinatorService(token, identity.size, servers=identity.servers or 0, bind=bind, port=port)
    except OSError as problem:
        raise HoraError(f"rank 0 on {identity.host} cannot listen on {bind}:{port}: {problem}") from None
    service.start()
    if not identity.one_host:
        log.warning(
            "the coordinator listens for other hosts at %s:%d (%s); set HORA_INTERFACE for another address",
            bind, service.address[1], interface.name_of(bind) or identity.host,
        )  # fmt: skip
    return _context(identity, CoordinatorClient(service.address, token), token, data or bind, service)


def _encode(context: RunContext) -> str:
    """Address and token of the coordinator that this process hosts, for the other ranks."""
    assert context.service is not None
    host, port = context.service.address
    return f"{host} {port} {context.token.hex()}"


def _decode(identity: ProcessIdentity, text: str) -> RunContext:
    try:
        host, port, token = text.split()
    except ValueError:
        raise HoraError("rank 0 ended before it published the coordinator's address; see its own error") from None
    return _dial(identity, (host, int(port)), bytes.fromhex(token))


def _through_store(identity: ProcessIdentity) -> RunContext:
    from torch.distributed import PrefixStore, TCPStore

    host, port = _address(identity.address)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    try:
        plain = TCPStore(
            host,
            port,
            identity.num_processes,
            identity.hosts_coordinator and not agent,
            datetime.timedelta(seconds=RENDEZVOUS_S),
            wait_for_workers=False,
        )
    except Exception as problem:
        raise HoraError(f"{identity.name} cannot reach torchrun's store at {host}:{port}: {problem}") from None
    store = PrefixStore(f"hora/{identity.job}", plain)
    if identity.hosts_coordinator:
        context = _host(identity, handshake.new_token(), _bind_address(identity) or _own_address(identity, host))
        store.set("control", _encode(context))
    else:
        context = _decode(identity, store.get("control").decode())
    return dataclasses.replace(context, store=plain)


def _through_socket(identity: ProcessIdentity) -> RunContext:
    """Rank 0 sends address and token to every process of the same uid that connects."""
    name = hashlib.sha256(f"{identity.job}|{os.getuid()}".encode()).hexdigest()[:24]
    address = f"\0hora-meet-{name}"
    if identity.hosts_coordinator:
        context = _host(identity, handshake.new_token(), _bind_address(identity))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address)
        except OSError as problem:
            raise HoraError(f"rank 0 cannot open the rendezvous socket of job {identity.job!r}: {problem}") from None
        listening.listen(identity.num_processes)
        others = identity.num_processes - 1
        threading.Thread(target=_publish, args=(listening, _encode(context), others), daemon=True).start()
        return context
    deadline = time.monotonic() + RENDEZVOUS_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(10.0)
                sock.connect(address)
                if handshake.peer_credentials(sock)[1] != os.getuid():
                    raise Unauthorized("the rendezvous socket of this job belongs to another user's process")
                text = sock.makefile().readline()
            return _decode(identity, text)
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            if time.monotonic() > deadline:
                raise Timeout(f"{identity.name} waited {RENDEZVOUS_S:g} s for rank 0 of job {identity.job!r}") from None
            time.sleep(0.02)


def _publish(listening: socket.socket, text: str, count: int) -> None:
    with listening:
        while count:
            sock, _ = listening.accept()
            with sock, contextlib.suppress(OSError):
                if handshake.peer_credentials(sock)[1] == os.getuid():
                    sock.sendall(text.encode() + b"\n")
                    count -= 1


def _through_mpi(identity: ProcessIdentity) -> RunContext:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        raise HoraError(
            f"mpirun started ranks on several hosts, which needs mpi4py (pip install hora[mpi]): {problem}"
        ) from None
    context = None
    if identity.hosts_coordinator:
        bind = _bind_address(identity) or _own_address(identity, socket.gethostname())
        context = _host(identity, handshake.new_token(), bind)
    text = bytearray((_encode(context).encode() if context else b"").ljust(256))
    MPI.COMM_WORLD.Bcast([text, MPI.BYTE], root=0)
    return context or _decode(identity, text.decode())


def _through_first_node(identity: ProcessIdentity) -> RunContext:
    if not identity.token_file:
        raise HoraError(
            f"this Slurm step spans several nodes ({identity.address}): set HORA_TOKEN_FILE to a file of 32 random "
            "bytes, mode 0600, that all nodes can read "
            "(head -c 32 /dev/urandom > ~/.hora-token; chmod 600 ~/.hora-token)"
        )
    token = read_token_file(identity.token_file)
    first = first_host(identity.address)
    port = 20000 + int.from_bytes(hashlib.sha256(identity.job.encode()).digest()[:2], "little") % 20000
    if identity.hosts_coordinator:  # at the address of the host name that the other ranks dial
        return _host(identity, token, identity.bind or _own_address(identity, first), port, _bind_address(identity))
    return _dial(identity, (first, port), token, RENDEZVOUS_S)


def read_token_file(path: str) -> bytes:
    """The token: 32 bytes or more, from a file that only its owner may read."""
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise HoraError(f"{path} can be read by other users: chmod 600 {path}")
            token = file.read(4096)
    except OSError as problem:
        raise HoraError(f"the token file cannot be read: {problem}") from None
    if len(token) < 32:
        raise HoraError(f"{path} holds {len(token)} bytes; a token needs at least 32 random bytes")
    return token


def first_host(nodes: str) -> str:
    """The first host of Slurm's compact list: `n[07-09,12],m1` -> `n07`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if not found:
        raise HoraError(f"Slurm's node list {nodes!r} names no host")
    return found.group(1) + (found.group(2) or "")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
