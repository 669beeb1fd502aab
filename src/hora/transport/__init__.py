"""Transports: memory (ranks as threads), shared memory, TCP, and the engines' own links."""

from .base import GroupSpec, RegisteredBuffer, Transfer, Transport, WaitObserver
from .in_process import InProcessHub, InProcessTransport

__all__ = [
    "GroupSpec",
    "InProcessHub",
    "InProcessTransport",
    "RegisteredBuffer",
    "Transfer",
    "Transport",
    "WaitObserver",
]
