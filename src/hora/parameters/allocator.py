"""Memory that comes back every step is kept instead of being returned to the kernel.

Each step frees its gradients and asks for them again. glibc maps blocks above 32 MB anew every time, and the kernel
then fills page after page with zeros: a 20-million-parameter model loses a sixth of its step to that. `keep` raises the
two thresholds, so that freed blocks stay with the process. Its peak does not grow by that; it only stays.
"""

from __future__ import annotations

import ctypes
import os

THRESHOLD_BYTES = 1 << 30  # larger blocks still go back
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ENV = (  # what `keep` does, for a process that does not call it
    ("MALLOC_MMAP_THRESHOLD_", f"{THRESHOLD_BYTES}"),
    ("MALLOC_TRIM_THRESHOLD_", f"{2 * THRESHOLD_BYTES - 1}"),
)
_OWN_WORD = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep() -> bool:
    """Whether freed blocks up to `THRESHOLD_BYTES` stay with this process from now on.

    Not where the user has chosen an allocator or its thresholds by an environment variable, nor without glibc.
    """
    if any(name in os.environ for name in _OWN_WORD):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, 2 * THRESHOLD_BYTES - 1))
