"""Peak: how much memory the processes of a run have needed, as the kernel counts it.

The kernel keeps for each process the greatest resident set that it ever had, and that counts shared memory in full for
everyone who maps it. So what others pay of it is told as well: the sum of `own_bytes` over all processes of a run is
what the machine needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import threading
from collections.abc import Iterator

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
    """`peak_bytes`: the greatest resident set. `shared_bytes`: most that it had of memory which others map too;
    `others_bytes`: most of that which is theirs to pay, since what k processes map costs each of them a k-th."""

    peak_bytes: int = 0
    shared_bytes: int = 0
    others_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        return self.peak_bytes - self.others_bytes


def can_watch() -> bool:
    """Whether the kernel tells who pays for shared memory."""
    rollup = pathlib.Path("/proc/self/smaps_rollup")
    return rollup.exists() and _number("Pss_Shmem", rollup.read_text()) is not None


@contextlib.contextmanager
def watching() -> Iterator[dict[Seat, Footprint]]:
    """What the workers and servers that descend from this process need, looked at from outside until the block ends.

    Of several processes with one seat, as a rank's own children are, the largest counts."""
    found: dict[int, tuple[Seat, Footprint]] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_EVERY_S):
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError):  # it has ended
                    _look(pid, found)

    watcher = threading.Thread(target=watch, name="peak", daemon=True)
    watcher.start()
    largest: dict[Seat, Footprint] = {}
    try:
        yield largest
    finally:
        done.set()
        watcher.join()
        for seat, footprint in sorted(found.values(), key=lambda one: one[1].peak_bytes):
            largest[seat] = footprint


def _look(pid: int, found: dict[int, tuple[Seat, Footprint]]) -> None:
    home = pathlib.Path(f"/proc/{pid}")
    if pid not in found:
        environ = dict(item.split("=", 1) for item in (home / "environ").read_text().split("\0") if "=" in item)
        if "HORA_ROLE" not in environ:
            return
        found[pid] = ((environ["HORA_ROLE"], int(environ["HORA_RANK"])), Footprint())
    footprint = found[pid][1]
    status = (home / "status").read_text()
    shared = _number("RssShmem", status) or 0
    footprint.peak_bytes = max(footprint.peak_bytes, _number("VmHWM", status) or 0)
    if shared:
        paid = _number("Pss_Shmem", (home / "smaps_rollup").read_text()) or 0
        footprint.shared_bytes = max(footprint.shared_bytes, shared)
        footprint.others_bytes = max(footprint.others_bytes, shared - paid)


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
