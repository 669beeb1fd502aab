"""Arena: one mapping of a sealed memfd that several processes share."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch

from ..errors import HoraError, OutOfMemory
from . import memory_limit

PAGE = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class Arena:
    """The first `num_bytes` of a memfd, as 64-bit `words` and 32-bit `halves` for flags, and as tensors for data.

    HoraError unless the memfd is that large and sealed against shrinking: then no access can fault. The descriptor
    stays the caller's. Unmapped when nothing refers to it.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < num_bytes:
            raise HoraError("the shared memory offered is too small or not sealed")
        # Not the mmap module, whose mappings keep a descriptor open.
        self.address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if self.address == ctypes.c_void_p(-1).value:
            raise OutOfMemory(f"could not map {num_bytes >> 20} MiB: {os.strerror(ctypes.get_errno())}")
        self._map = (ctypes.c_char * num_bytes).from_address(self.address)
        # Not at exit: a tensor in this memory may be read until the very end, and the kernel unmaps it anyway.
        weakref.finalize(self._map, _libc.munmap, self.address, num_bytes).atexit = False
        self.words = memoryview(self._map).cast("B").cast("Q")
        self.halves = memoryview(self._map).cast("B").cast("I")
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @staticmethod
    def create(num_bytes: int) -> int:
        """A sealed memfd of that size. OutOfMemory if there is too little memory, or the kernel refuses it."""
        short = memory_limit.shortage(num_bytes)
        if short:
            raise OutOfMemory(short)
        try:
            descriptor = os.memfd_create("hora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as problem:
            raise OutOfMemory(f"the kernel refused shared memory: {problem}") from None
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as problem:
            os.close(descriptor)
            raise OutOfMemory(f"the kernel refused {num_bytes >> 20} MiB of shared memory: {problem}") from None
        return descriptor

    def populate(self) -> None:
        """Takes the pages now: a first touch costs six times a copy."""
        _libc.madvise(self.address, len(self._map), MADV_POPULATE_WRITE)  # older kernels refuse: then page by page

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)
