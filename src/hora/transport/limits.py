"""How much memory may still be taken: asked before shared memory is allocated, since the answer later is a signal."""

from __future__ import annotations

import contextlib
import pathlib

MARGIN_BYTES = 64 << 20  # left for everybody else


def available_bytes(root: str = "/") -> int:
    """The smaller of the host's available memory and what is left under the memory limits of our cgroup."""
    return min([_mem_available(pathlib.Path(root)), *_cgroup_left(pathlib.Path(root))])


def shortage(wanted_bytes: int) -> str | None:
    """Why `wanted_bytes` of shared memory should not be taken; None if they may."""
    left = available_bytes()
    if wanted_bytes + MARGIN_BYTES <= left:
        return None
    return (
        f"{wanted_bytes >> 20} MiB of shared memory wanted, {left >> 20} MiB left "
        f"(host and cgroup limit, of which {MARGIN_BYTES >> 20} MiB are kept free)"
    )


def _mem_available(root: pathlib.Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_left(root: pathlib.Path) -> list[int]:
    """What every memory cgroup above us still allows: version 2 (one tree) or version 1 (a tree of its own)."""
    left = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            folder = base / path.lstrip("/")
            while True:
                with contextlib.suppress(OSError, ValueError):
                    allowed = int((folder / limit).read_text())  # "max" is no number: no limit here
                    left.append(max(0, allowed - int((folder / usage).read_text())))
                if folder == base or base not in folder.parents:
                    break
                folder = folder.parent
    return left
