"""Machine: what this process may use of the machine it runs on. Needs no torch."""

from __future__ import annotations

import os


def num_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
