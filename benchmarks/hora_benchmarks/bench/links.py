"""Links: the simulated hosts and networks of `hora bench local` and `hora bench hosts`.

Namespaces   a network namespace for each host, joined by a bridge; both directions of each link are shaped by the
             kernel (`tc tbf`), and what crosses it is counted by the kernel too. Needs root, `ip` and `tc`.
Limited      plain processes on loopback, where the transport limits what each of them sends: Hora's own TCP only.

        host 0 ── veth ──┐
        host 1 ── veth ──┤
        host 2 ── veth ──┼── bridge, in a namespace of its own
        host 3 ── veth ──┘

Both are context managers: inside, workers may be started; after it nothing is left, whatever happened.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from hora.rendezvous.environment import NAMES

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SETTINGS = ("HORA_RATE_BYTES_PER_S", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
DEVICE = "eth0"
FIRST_PORT = 29500
BURST, QUEUE = "256kb", "50ms"  # a smaller burst costs most of a core at 1 Gbit/s
CONTROL = "reno"  # every kernel has it; bbr takes a token bucket's burst for the link, and at times uses half of it
COMMAND_S = 20.0

_numbers = itertools.count()


def bits_per_s(rate: str) -> int:
    """100mbit, 2.5gbit or 512kbit, as `tc` writes them. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate.strip().lower())
    bits = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if bits < 1:
        raise ValueError(f"{rate!r} is no rate; write for example 100mbit or 1gbit")
    return bits


class Links(Protocol):
    """`note` says what the figures of a table were measured on.

    `counter`, a file, holds the bytes that have left a worker, where the worker itself reads it; where there is none,
    other systems than Hora do not feel the rate either.
    """

    note: str
    counter: str | None

    def __enter__(self) -> Links: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def command(self, rank: int, meeting: int) -> list[str]:
        """What a worker's command line begins with: more variables may follow, then the program.

        Workers of the same `meeting` meet each other.
        """
        ...


def obstacle() -> str:
    """Why there can be no namespaces here; empty if there can. Tried, since root in a container may be denied."""
    if os.getuid() != 0:
        return "not root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with Namespaces(1, "1gbit"):
            return ""
    except RuntimeError as error:
        return str(error)


class Namespaces:
    """Their names carry this process, so that what a killed one left can be told from what another one uses."""

    counter: str | None = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"

    def __init__(self, size: int, rate: str) -> None:
        """So many hosts."""
        if not 1 <= size <= 250:
            raise ValueError(f"1 to 250 hosts have an address each, not {size}")
        bits_per_s(rate)
        self.note = f"network namespaces, links shaped both ways by tc tbf, TCP with {CONTROL}"
        self._rate = rate
        self._name = f"hora-{os.getpid()}-{_birth(os.getpid())}-{next(_numbers)}"
        self._size = size

    def __enter__(self) -> Namespaces:
        sweep()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, rank: int, meeting: int, *, size: int | None = None, per_host: int = 1) -> list[str]:
        """As every link's. Ranks live `per_host` to a host, in order; without `size` there are as many as hosts."""
        host = rank // per_host
        words = _words(rank, size or self._size, self.address(0), FIRST_PORT + meeting, per_host)
        words += [f"HORA_BIND={self.address(host)}", f"GLOO_SOCKET_IFNAME={DEVICE}"]
        return ["ip", "netns", "exec", self.host(host), "env", *words]

    def host(self, number: int) -> str:
        """The name of its namespace."""
        return f"{self._name}-host{number}"

    def address(self, number: int) -> str:
        """Private, and known inside of the namespaces only."""
        return f"10.83.0.{number + 1}"

    def _make(self) -> None:
        switch = f"{self._name}-switch"
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for number in range(self._size):
            host, plug = self.host(number), f"plug{number}"
            _call("ip", "netns", "add", host)
            _call("ip", "-n", host, "link", "set", "lo", "up")
            _call("ip", "netns", "exec", host, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONTROL}")
            _call("ip", "link", "add", DEVICE, "netns", host, "type", "veth", "peer", "name", plug, "netns", switch)
            _call("ip", "-n", switch, "link", "set", plug, "master", "bridge")
            _call("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", DEVICE)
            for place, device in ((host, DEVICE), (switch, plug)):  # what leaves the host, and what comes to it
                shape = ["tbf", "rate", self._rate, "burst", BURST, "latency", QUEUE]
                _call("tc", "-n", place, "qdisc", "add", "dev", device, "root", *shape)
                _call("ip", "-n", place, "link", "set", device, "up")

    def _remove(self) -> None:
        with _undisturbed():
            for name in _namespaces():
                if name.startswith(f"{self._name}-"):
                    _delete(name)


class Limited:
    """Only Hora's traffic is limited and counted."""

    counter: str | None = None

    def __init__(self, size: int, rate: str, why: str = "") -> None:
        reason = f" (no network namespaces: {why})" if why else ""
        self.note = f"rate limit of the transport, for what each worker sends, not of a wire{reason}"
        self._bytes_per_s = bits_per_s(rate) / 8
        self._size = size
        self._ports: dict[int, int] = {}

    def __enter__(self) -> Limited:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ports.clear()

    def command(self, rank: int, meeting: int) -> list[str]:
        port = self._ports.setdefault(meeting, _free_port())
        words = _words(rank, self._size, "127.0.0.1", port, self._size)
        return ["env", *words, f"HORA_RATE_BYTES_PER_S={self._bytes_per_s:.0f}"]


def sweep() -> None:
    """Removes what processes of ours left that were killed: their pid is gone, or is another process by now."""
    for name in _namespaces():
        match = re.fullmatch(r"hora-(\d+)-(\d+)-\d+-(?:host\d+|switch)", name)
        if match and _birth(int(match[1])) != match[2]:
            _delete(name)


def _words(rank: int, size: int, address: str, port: int, local_size: int) -> list[str]:
    """The rank's variables as torchrun sets them. Those of a run that we belong to are not passed on."""
    local_rank = rank % local_size
    return [
        *(f"--unset={name}" for name in (*NAMES, *SETTINGS)),
        f"RANK={rank}",
        f"WORLD_SIZE={size}",
        f"LOCAL_RANK={local_rank}",
        f"LOCAL_WORLD_SIZE={local_size}",
        f"MASTER_ADDR={address}",
        f"MASTER_PORT={port}",
        "OMP_NUM_THREADS=1",
    ]


def _namespaces() -> list[str]:
    """All named namespaces; the folder exists once one was created."""
    folder = pathlib.Path("/run/netns")
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _delete(name: str) -> None:
    """With the processes that still run in it: veths last as long as the last process of their namespace."""
    with contextlib.suppress(RuntimeError):  # another process removed it at the same time
        for pid in _call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        _call("ip", "netns", "delete", name)


def _call(*command: str) -> str:
    """Raises RuntimeError with the tool's message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise RuntimeError(f"{' '.join(command[:6])} …: {said}")
    return done.stdout


def _birth(pid: int) -> str:
    """When this process began, in the kernel's ticks: a pid may be used again, both together never. Empty if gone."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and the like have to wait, also for the tools that we call."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
