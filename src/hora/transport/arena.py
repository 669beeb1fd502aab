"""Arena: one sealed memfd, mapped twice: as it lies, and woven, with pieces of it side by side in another order."""

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
MAP_FIXED = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class Arena:
    """One mapping of one memfd, as words for flags and as tensors for data. Unmapped when nothing refers to it."""

    def __init__(self, descriptor: int, num_bytes: int, woven: list[tuple[int, int]] | None = None) -> None:
        """`woven` lists (offset, length) of the pieces, whole pages each, that `whole` shows side by side."""
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < num_bytes:
            raise HoraError("the shared memory offered is too small or not sealed")
        self.map = _weave(descriptor, [(0, num_bytes)])
        self.words = memoryview(self.map).cast("B").cast("Q")
        self.halves = memoryview(self.map).cast("B").cast("I")
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = ctypes.addressof(self.map)
        self._woven = _weave(descriptor, woven) if woven else None

    @staticmethod
    def create(num_bytes: int) -> int:
        """A sealed memfd of that size. OutOfMemory if there is too little, or none is to be had."""
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
        _libc.madvise(self.address, len(self.map), MADV_POPULATE_WRITE)  # refused by older kernels: then one by one

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)

    def whole(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The woven pieces as one contiguous tensor."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        assert self._woven is not None
        return torch.frombuffer(self._woven, dtype=dtype, count=numel)


def _weave(descriptor: int, pieces: list[tuple[int, int]]) -> ctypes.Array[ctypes.c_char]:
    total = sum(length for _, length in pieces)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)  # reserves the addresses
    if base == _FAILED:
        raise OutOfMemory(f"no room for {total >> 20} MiB of addresses")
    at = base
    for offset, length in pieces:
        if length:
            flags = mmap.MAP_SHARED | MAP_FIXED
            if _libc.mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset) == _FAILED:
                problem = os.strerror(ctypes.get_errno())
                _libc.munmap(base, total)
                raise OutOfMemory(f"shared memory could not be mapped: {problem}")
        at += length
    view = (ctypes.c_char * total).from_address(base)
    # Not at exit: a tensor in this memory may be read until the very end, and the kernel unmaps it anyway.
    weakref.finalize(view, _libc.munmap, base, total).atexit = False
    return view
