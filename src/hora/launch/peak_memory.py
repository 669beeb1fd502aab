"""Peak: how much memory the processes of a run have needed, as the kernel counts it.

The kernel keeps for each process the greatest resident set that it ever had, and that counts shared memory in full for
everyone who maps it. So a run is looked at again and again with shared memory dealt out: what k processes map costs
each of them a k-th, and what all have at one look adds up to what the machine holds at that moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import threading

LOOK_EVERY_S = 0.05

Seat = tuple[str, int]  # a role, and a number within it


def peak_bytes() -> float:
    """The most memory that this process has held. VmHWM, since ru_maxrss starts with what the parent held."""
    status = pathlib.Path("/proc/self/status")
    peak = _number("VmHWM", status.read_text()) if status.exists() else None
    if peak is not None:
        return float(peak)
    import resource

    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(rusage) if sys.platform == "darwin" else float(rusage) * 1024


@dataclasses.dataclass(kw_only=True)
class Footprint:
    """`peak_bytes`: the greatest resident set ever, shared memory in full. `own_bytes`: the greatest at any look,
    shared memory dealt out; `together_bytes`: this at the look at which all processes together had most."""

    peak_bytes: int = 0
    own_bytes: int = 0
    together_bytes: int = 0


def can_watch() -> bool:
    """Whether the kernel tells who pays for shared memory."""
    rollup = pathlib.Path("/proc/self/smaps_rollup")
    return rollup.exists() and _number("Pss_Shmem", rollup.read_text()) is not None


class Watch:
    """Looks from outside at the workers and servers that descend from this process, until it is stopped or the `with`
    block ends; `seats` is complete then.

    Stop it before the first of them leaves, or the rest pay for what that one mapped. Of several processes with one
    seat, as a rank's own children are, the largest counts."""

    def __init__(self) -> None:
        self.seats: dict[Seat, Footprint] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        most = 0
        while not self._done.wait(LOOK_EVERY_S):
            now = _look(self.seats)
            if sum(now.values()) > most:
                most = sum(now.values())
                for seat, footprint in self.seats.items():
                    footprint.together_bytes = now.get(seat, 0)


def _look(seats: dict[Seat, Footprint]) -> dict[Seat, int]:
    """What each has now, shared memory dealt out."""
    now: dict[Seat, int] = {}
    for pid in _descendants(os.getpid()):
        home = pathlib.Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it has ended
            seat = _seat(home)
            if seat is None:
                continue
            status = (home / "status").read_text()
            own, peak = _number("VmRSS", status) or 0, _number("VmHWM", status) or 0
            if shared := _number("RssShmem", status):
                own -= shared - (_number("Pss_Shmem", (home / "smaps_rollup").read_text()) or 0)
            now[seat] = max(now.get(seat, 0), own)
            footprint = seats.setdefault(seat, Footprint())
            footprint.peak_bytes = max(footprint.peak_bytes, peak)
            footprint.own_bytes = max(footprint.own_bytes, own)
    return now


def _seat(home: pathlib.Path) -> Seat | None:
    environ = dict(item.split("=", 1) for item in (home / "environ").read_text().split("\0") if "=" in item)
    return (environ["HORA_ROLE"], int(environ["HORA_RANK"])) if "HORA_ROLE" in environ else None


def _number(name: str, text: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = pathlib.Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
