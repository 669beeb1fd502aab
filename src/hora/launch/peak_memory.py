"""The peak memory of this process, as the kernel counts it."""

from __future__ import annotations

import pathlib
import re
import sys


def peak_bytes() -> float:
    """The greatest resident set that this process ever had. VmHWM, since ru_maxrss starts with the parent's."""
    status = pathlib.Path("/proc/self/status")
    match = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if match is not None:
        return int(match[1]) * 1024.0
    import resource

    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(rusage) if sys.platform == "darwin" else float(rusage) * 1024
