"""HostSet: all hosts of a run: which process runs where, requests to all agents, and their end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import select
import time
from collections.abc import Callable, Sequence

from .. import messages
from ..process import OutputSink, RunProcess, Slot
from ..signal_pipe import SignalPipe, Watched, poll
from .remote_host import ENDED, RemoteHost, Reply

END_S = 6.0
CLOSE_S = 1.0
ERROR_OUTPUT_S = 0.3


class SignalReceived(Exception):
    """A stopping signal came while the hosts were being connected."""

    def __init__(self, number: int) -> None:
        self.number = number


def check_signals(signals: SignalPipe) -> None:
    """SignalReceived if there was one since the last call."""
    for number in signals.stop_signals():
        raise SignalReceived(number)


@dataclasses.dataclass(frozen=True)
class OpenedHosts:
    """Connections to agents that have not been greeted, with the processes for each, in order. `explain` says why a
    host does not answer."""

    hosts: Sequence[RemoteHost]
    slots: Sequence[Sequence[Slot]]
    explain: Callable[[RemoteHost], str]


class HostSet:
    """`places` has the host of each process, and the message that starts it there. Not thread-safe."""

    ready = True  # agents queue the processes until they can start them

    def __init__(self, hosts: Sequence[RemoteHost], signals: SignalPipe, log: Callable[[str], None]) -> None:
        self.all = list(hosts)
        self.pid = 0  # there is no fork server of our own
        self.places: dict[Slot, tuple[RemoteHost, messages.StartProcess]] = {}
        self._signals = signals
        self._log = log
        self._announced: set[int] = set()

    def ask(
        self,
        request: Callable[[RemoteHost], messages.ToAgent],
        kind: type[Reply],
        timeout_s: float,
        explain: Callable[[RemoteHost], str],
    ) -> list[Reply]:
        """Sends each host a request and returns the replies in order. Blocks for at most `timeout_s`.

        ValueError with `explain(host)` if one does not reply. SignalReceived if a stopping signal comes first."""
        for host in self.all:
            host.send(request(host))
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout_s
        now = time.monotonic()
        while len(replies) < len(self.all):
            poll({self._signals.fd: (select.POLLIN, lambda: None), **self.descriptors()}, min(deadline - now, 0.2))
            check_signals(self._signals)
            now = time.monotonic()
            for number, host in enumerate(self.all):
                if number not in replies and (reply := host.take_reply(kind)) is not None:
                    replies[number] = reply
                elif number not in replies and (host.lost or now >= deadline):
                    host.await_error_output(ERROR_OUTPUT_S)
                    why = host.lost if host.lost not in ("", ENDED) else explain(host)
                    raise ValueError(f"host {host.name}: {why}")
                host.tick(now, reading=False)
        return [replies[number] for number in range(len(self.all))]

    # -- the run -----------------------------------------------------------------------------------------------------

    def start(self, slot: Slot, out: OutputSink, err: OutputSink) -> RunProcess:
        """OSError if its host is lost."""
        host, message = self.places[slot]
        host.log = self._log
        return host.start(message, out, err)

    def descriptors(self) -> Watched:
        watched: Watched = {}
        for host in self.all:
            watched |= host.descriptors()
        return watched

    def pause_output(self, paused: bool) -> None:
        for host in self.all:
            host.hold_output(paused)

    def next_deadline(self) -> float | None:
        return min((host.next_deadline() for host in self.all if not host.lost), default=None)

    def tick(self, now: float) -> None:
        """Sends heartbeats and logs each lost host once."""
        for host in self.all:
            host.tick(now)
            if host.lost and id(host) not in self._announced:
                self._announced.add(id(host))
                names = [process.name for process in host.processes.values() if process.running]
                also = f"; {', '.join(names)} with it" if names else ""
                self._log(f"host {host.name} ({host.address}) is lost: {host.lost}{also}")

    def take_ended(self) -> list[RunProcess]:
        """The processes that have ended since the last call, reaped."""
        ended = [process for host in self.all for process in host.processes.values() if process.has_ended()]
        for process in ended:
            process.reap()
        return ended

    def finish(self, folder: str | None) -> list[RemoteHost]:
        """Tells all agents to end and writes the trace files that they send into `folder`. Returns the hosts whose
        agent did not confirm within END_S after the last message of any. Blocks; a stopping signal ends the wait."""
        for host in self.all:
            host.keep_file = _file_writer(folder)
            host.tell_to_end()
        deadline = time.monotonic() + END_S
        while any(not host.ended and not host.lost for host in self.all) and time.monotonic() < deadline:
            received_bytes = [host.received_bytes for host in self.all]
            poll(self.descriptors(), 0.1)
            if received_bytes != [host.received_bytes for host in self.all]:
                deadline = time.monotonic() + END_S
            if self._signals.stop_signals():
                break
        return [host for host in self.all if not host.ended]

    def close(self) -> None:
        close_all(self.all)


def close_all(hosts: Sequence[RemoteHost]) -> None:
    """Closes the connections side by side, so that one that takes long does not delay the others."""
    for host in hosts:
        host.hang_up()
    deadline = time.monotonic() + CLOSE_S
    for host in hosts:
        host.close(max(0.0, deadline - time.monotonic()))


def _file_writer(folder: str | None) -> Callable[[str, bytes], None]:
    def write(name: str, data: bytes) -> None:
        if folder is None or pathlib.PurePath(name).name != name or name.startswith("."):
            return
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "ab") as file:
                file.write(data)

    return write
