"""Sleeping on a word of shared memory, and ordering memory, from Python.

A waiter marks itself as sleeping, looks once more, and sleeps only if the word still has the value it saw. A waker
stores, then looks for sleepers. Between a store and the look that follows it both call `fence`, because x86-64 lets a
load overtake an earlier store; all its other orders are kept by the processor, so plain stores and loads are enough.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

SYS_FUTEX = 202  # x86-64
WAIT, WAKE = 0, 1  # without the private flag: the word is shared between processes

AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_syscall = ctypes.CDLL(None, use_errno=True).syscall  # CDLL: the GIL is free while we sleep
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]
lock = threading.Lock()


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleeps until `wake(address)`, unless the word there no longer holds `seen`; at most `timeout_s` < 1."""
    limit = _Timespec(0, int(timeout_s * 1e9))
    _syscall(SYS_FUTEX, address, WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wakes all threads and processes that sleep on the word at `address`."""
    _syscall(SYS_FUTEX, address, WAKE, 0x7FFFFFFF, None, None, 0)


def fence() -> None:
    """Everything stored before is visible before anything is loaded after: taking a lock is a locked instruction."""
    with lock:  # and not acquire(), release(): a signal handler that raises in between would leave it locked
        pass


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global lock
    lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
