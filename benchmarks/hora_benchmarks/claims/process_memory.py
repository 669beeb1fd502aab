"""MemoryWatch: how much memory the processes of a run need, as the kernel counts it.

The kernel keeps for each process the greatest resident set that it ever had, which counts shared memory in full for
every process that maps it. So a run is sampled repeatedly with shared memory divided: what k processes map costs each
of them a k-th, and the sum over all processes at one sample is what the machine holds at that moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import threading

SAMPLE_EVERY_S = 0.05

Slot = tuple[str, int]  # role and rank


@dataclasses.dataclass(kw_only=True)
class Footprint:
    """`peak_bytes`: the greatest resident set ever, shared memory in full. `own_bytes`: the greatest at any sample,
    shared memory divided; `together_bytes`: this at the sample at which all processes together had most."""

    peak_bytes: int = 0
    own_bytes: int = 0
    together_bytes: int = 0


def can_watch() -> bool:
    """Whether the kernel tells how shared memory is divided."""
    rollup = pathlib.Path("/proc/self/smaps_rollup")
    return rollup.exists() and _number("Pss_Shmem", rollup.read_text()) is not None


class MemoryWatch:
    """Samples from outside the workers and servers that descend from this process, until it is stopped or the `with`
    block ends; `footprints` is complete then.

    Stop it before the first of them leaves, or the rest pay for what that one mapped. Of several processes with one
    slot, as a rank's own children are, the largest counts."""

    def __init__(self) -> None:
        self.footprints: dict[Slot, Footprint] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="peak", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _loop(self) -> None:
        most = 0
        while not self._done.wait(SAMPLE_EVERY_S):
            now = _sample(self.footprints)
            if sum(now.values()) > most:
                most = sum(now.values())
                for slot, footprint in self.footprints.items():
                    footprint.together_bytes = now.get(slot, 0)


def _sample(footprints: dict[Slot, Footprint]) -> dict[Slot, int]:
    """What each has now, shared memory divided."""
    now: dict[Slot, int] = {}
    for pid in _descendants(os.getpid()):
        home = pathlib.Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it has ended
            slot = _slot(home)
            if slot is None:
                continue
            status = (home / "status").read_text()
            own, peak = _number("VmRSS", status) or 0, _number("VmHWM", status) or 0
            if shared := _number("RssShmem", status):
                own -= shared - (_number("Pss_Shmem", (home / "smaps_rollup").read_text()) or 0)
            now[slot] = max(now.get(slot, 0), own)
            footprint = footprints.setdefault(slot, Footprint())
            footprint.peak_bytes = max(footprint.peak_bytes, peak)
            footprint.own_bytes = max(footprint.own_bytes, own)
    return now


def _slot(home: pathlib.Path) -> Slot | None:
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
