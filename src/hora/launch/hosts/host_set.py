"""Sites: all hosts of a run together: who goes where, what is asked of all before anything starts, what is heard."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import selectors
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...terminal.screen import RankStream
from ..process_set import Seat
from ..signal_pipe import STOPPING, SignalPipe
from .messages import FromAgent, FromLauncher, StartProcess
from .remote_host import ENDED, RemoteHost, RemoteProcess

END_S = 6.0
CLOSE_S = 1.0

Answer = TypeVar("Answer", bound=FromAgent)


class SignalReceived(Exception):
    """A signal came while the hosts were being asked."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
    """Where a seat is: on which site, and as which of its ranks there."""

    site: RemoteHost
    local_rank: int
    local_size: int


class HostSet:
    """`places` says where each seat is. Main thread only."""

    def __init__(self, sites: Sequence[RemoteHost], wake: SignalPipe) -> None:
        self.all = list(sites)
        self.places: dict[Seat, ProcessPlace] = {}
        self.describe: Callable[[Seat], StartProcess]  # what to tell the agent of a seat
        self._wake = wake
        self._told: set[int] = set()

    def ask(
        self,
        question: Callable[[RemoteHost], FromLauncher | None],
        kind: type[Answer],
        timeout_s: float,
        sorry: Callable[[RemoteHost], str],
    ) -> list[Answer]:
        """One question to every site, and all answers, in order. ValueError with `sorry(site)` for one that has none.

        Stopped if a signal comes first."""
        for site in self.all:
            message = question(site)
            if message is not None:
                site.send(message)
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.PollSelector() as selector:
            selector.register(self._wake.fd, selectors.EVENT_READ, None)
            while len(answers) < len(self.all):
                self._register(selector)
                now = time.monotonic()
                ready = selector.select(max(0.0, min(deadline - now, 0.2)))
                now = time.monotonic()
                for key, events in ready:
                    if key.data is None:
                        for number in self._wake.read():
                            if number in STOPPING:
                                raise SignalReceived(number)
                    else:
                        attend(key.data, key.fd, events, now)
                for number, site in enumerate(self.all):
                    if number not in answers and (answer := site.take(kind)) is not None:
                        answers[number] = answer
                    elif number not in answers and (site.lost or now >= deadline):
                        self._hear_out(site)
                        why = site.lost if site.lost not in ("", ENDED) else sorry(site)
                        raise ValueError(f"host {site.name}: {why}")
                    site.tick(now, watching=False)
        return [answers[number] for number in range(len(self.all))]

    def _register(self, selector: selectors.BaseSelector) -> None:
        there = dict(selector.get_map())
        wanted: dict[int, tuple[int, RemoteHost]] = {}
        for site in self.all:
            wanted |= watched(site)
        for key in there.values():
            if key.data is not None and wanted.get(key.fd) != (key.events, key.data):
                selector.unregister(key.fd)
        for fd, (events, site) in wanted.items():
            if fd not in selector.get_map():
                selector.register(fd, events, site)

    @staticmethod
    def _hear_out(site: RemoteHost) -> None:
        """What was said about the way there comes at times a little later than its end."""
        deadline = time.monotonic() + 0.3
        while site.err_fd >= 0 and time.monotonic() < deadline:
            if not site.read_complaints():
                time.sleep(0.01)

    # -- the run -----------------------------------------------------------------------------------------------------

    def start(self, seat: Seat, out: RankStream, err: RankStream) -> RemoteProcess:
        return self.places[seat].site.start(self.describe(seat), out, err)

    def newly_lost(self) -> list[RemoteHost]:
        """Those that were lost since this was asked last."""
        lost = [site for site in self.all if site.lost and id(site) not in self._told]
        self._told.update(map(id, lost))
        return lost

    def finish(self, folder: str | None) -> list[RemoteHost]:
        """All agents end what is left and go; the files that they send are put into `folder`. Whoever has not said
        goodbye `END_S` after the last that was heard of anybody is returned, and a signal ends the patience too."""
        for site in self.all:
            site.keep = _keeper(folder)
            site.ask_to_end()
        deadline = time.monotonic() + END_S
        with selectors.PollSelector() as selector:
            while (
                left := [site for site in self.all if not site.over and not site.lost]
            ) and time.monotonic() < deadline:
                self._register(selector)
                for key, events in selector.select(0.1):
                    if key.data in left:
                        attend(key.data, key.fd, events, time.monotonic())
                        deadline = time.monotonic() + END_S
                if set(self._wake.read()) & set(STOPPING):
                    break
        return [site for site in self.all if not site.over]

    def close(self) -> None:
        close_all(self.all)


def close_all(sites: Sequence[RemoteHost]) -> None:
    """All at once: one that does not go by itself holds nobody up."""
    for site in sites:
        site.hang_up()
    deadline = time.monotonic() + CLOSE_S
    for site in sites:
        site.close(max(0.0, deadline - time.monotonic()))


def watched(site: RemoteHost) -> dict[int, tuple[int, RemoteHost]]:
    """The descriptors of a site to wait for, and what for."""
    if site.lost or site.over:
        return {}
    wanted = {site.read_fd: (selectors.EVENT_READ, site)}
    if site.pending:
        wanted[site.write_fd] = (selectors.EVENT_WRITE, site)
    if site.err_fd >= 0:
        wanted[site.err_fd] = (selectors.EVENT_READ, site)
    return wanted


def attend(site: RemoteHost, fd: int, events: int, now: float) -> list[str]:
    """One of its descriptors is ready. Returns what was said on the way there, to be shown once ranks run."""
    if fd == site.write_fd and events & selectors.EVENT_WRITE:
        site.write()
    elif fd == site.read_fd:
        site.read(now)
    elif fd == site.err_fd:
        return site.read_complaints()
    return []


def _keeper(folder: str | None) -> Callable[[str, bytes], None]:
    def keep(name: str, data: bytes) -> None:
        if folder is None or pathlib.PurePath(name).name != name or name.startswith("."):
            return
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "ab") as file:
                file.write(data)

    return keep
