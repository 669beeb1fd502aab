"""Transports: memory (ranks as threads), shared memory, TCP, and the engines' own links."""

from .base import Circle, Handle, Registered, Transport, Watcher
from .memory import Lounge, MemoryTransport

__all__ = ["Circle", "Handle", "Lounge", "MemoryTransport", "Registered", "Transport", "Watcher"]
