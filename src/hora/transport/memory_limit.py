"""How much memory may still be taken: asked before shared memory is allocated, since the answer later is a signal."""

from __future__ import annotations

import contextlib
import pathlib

MARGIN_BYTES = 64 << 20  # left for other processes


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
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
                usage, cache = "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            folder = base / path.lstrip("/")
            while True:
                with contextlib.suppress(OSError, ValueError):
                    allowed = int((folder / limit).read_text())  # "max" is no number: no limit here
                    used = int((folder / usage).read_text()) - _reclaimable(folder, cache)
                    left.append(max(0, allowed - max(0, used)))
                if folder == base or base not in folder.parents:
                    break
                folder = folder.parent
    return left


def _reclaimable(folder: pathlib.Path, field: str) -> int:
    """Files read long ago count as usage, but the kernel drops them before it refuses memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{field} "):
                return int(line.split()[1])
    return 0
