"""This machine as a process sees it: its cores, kernel namespaces, and a line that describes it. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
import sys
from importlib.metadata import version


def num_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_text() -> str:
    """Processor, cores and versions, in one line."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as cpuinfo:
            found = re.search(r"model name\s*:\s*(.*\S)", cpuinfo.read())
        model = found[1] if found else model
    return f"{model}, {num_cores()} cores, Python {platform.python_version()}, torch {version('torch')}"


def namespace_id(kind: str) -> str:
    """Identifies this boot of the machine and the "pid" or "net" namespace of this process; empty outside of Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
    return ""
