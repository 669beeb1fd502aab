"""Object collectives: plain values (numbers, strings, lists, dicts) and bytes between ranks, as msgpack in tensors.

For what is rare and small, or for files. Each is a collective call and blocks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import torch

from .group import Group


def pack(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def unpack(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


def broadcast(group: Group, data: bytes, name: str) -> bytes:
    """Rank 0's bytes."""
    length = torch.tensor([len(data)])
    group.broadcast(length, name=f"length of {name}")
    tensor = pack(data) if group.rank == 0 else torch.empty(int(length.item()), dtype=torch.uint8)
    group.broadcast(tensor, name=name)
    return data if group.rank == 0 else unpack(tensor)


def broadcast_object(group: Group, value: Any, name: str) -> Any:
    """Rank 0's value."""
    return msgspec.msgpack.decode(broadcast(group, msgspec.msgpack.encode(value if group.rank == 0 else None), name))


def all_gather_objects(group: Group, value: Any, name: str) -> list[Any]:
    """All ranks' values, in order of rank."""
    tensors = group.all_gather(pack(msgspec.msgpack.encode(value)), name=name)
    return [msgspec.msgpack.decode(unpack(tensor)) for tensor in tensors]
