"""The few calls of the CUDA driver that torch does not offer: device memory that other processes map, and flags in host
memory that streams write and wait for. They go through ctypes, so nothing is compiled.

Device memory here is plain cuMemAlloc, which CUDA IPC can export; torch's allocator may use expandable segments, which
it cannot. All calls act on the device that is current on the calling thread.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NoReturn

import torch

from ..errors import HoraError, OutOfMemory

HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_PORTABLE_AND_MAPPED = 1 | 2
_AT_LEAST = 0  # of cuStreamWaitValue32: waits until the word has reached the value, by a cyclic comparison


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):  # often called: plain numbers are converted
        getattr(driver, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return driver


def _call(name: str, *arguments: Any) -> None:
    if code := getattr(_driver(), name)(*arguments):
        _refused(name, code)


def _refused(name: str, code: int) -> NoReturn:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    said = (text.value or b"unknown error").decode()
    raise (OutOfMemory if code == _OUT_OF_MEMORY else HoraError)(f"{name}: {said} ({code})")


class DeviceMemory:
    """`num_bytes` of device memory, released once neither this object nor a tensor of it is left."""

    def __init__(self, address: int, num_bytes: int, release: str) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None,
        }  # fmt: skip
        self._release = release

    @staticmethod
    def allocate(num_bytes: int) -> DeviceMemory:
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return DeviceMemory(address.value, num_bytes, "cuMemFree_v2")

    @staticmethod
    def open(handle: bytes, num_bytes: int) -> DeviceMemory:
        """Memory of another process, from its `handle`."""
        address, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return DeviceMemory(address.value, num_bytes, "cuIpcCloseMemHandle")

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Its bytes. The tensor keeps the memory."""
        return torch.as_tensor(self, device=device)

    def handle(self) -> bytes:
        """What another process opens it with."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the driver releases what a process leaves
            getattr(_driver(), self._release)(ctypes.c_uint64(self.address))


def register_host(address: int, num_bytes: int) -> int:
    """Pins host memory, shared memory too, so that streams reach it. Returns its address on the device."""
    mapped = ctypes.c_uint64()
    _call(
        "cuMemHostRegister_v2",
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        ctypes.c_uint(_PORTABLE_AND_MAPPED),
    )
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), ctypes.c_void_p(address), ctypes.c_uint(0))
    return mapped.value


def unregister_host(address: int) -> None:
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


def stream_write(stream: int, address: int, value: int) -> None:
    """In the order of the stream: writes a 32-bit word, after all that came before is visible."""
    if code := _driver().cuStreamWriteValue32_v2(stream, address, value, 0):
        _refused("cuStreamWriteValue32", code)


def stream_wait(stream: int, address: int, value: int) -> None:
    """In the order of the stream: what follows starts once the 32-bit word has reached the value."""
    if code := _driver().cuStreamWaitValue32_v2(stream, address, value, _AT_LEAST):
        _refused("cuStreamWaitValue32", code)


def copy_to_device(stream: int, target: int, source: int, num_bytes: int) -> None:
    """In the order of the stream, from pinned host memory, which is read when the stream comes to it."""
    size = ctypes.c_size_t(num_bytes)
    _call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_void_p(source), size, ctypes.c_void_p(stream))
