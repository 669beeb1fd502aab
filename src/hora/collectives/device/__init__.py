"""Collectives of CUDA tensors in the order of a stream: their calls return at once and never block the host."""

from .base import DeviceComm, DeviceVector
from .choice import open_comm

__all__ = ["DeviceComm", "DeviceVector", "open_comm"]
