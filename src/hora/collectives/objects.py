"""Letters: plain values between ranks, as bytes in tensors; for words that are rare and small, or files."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import torch

from .group import Group


def pack(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def unpack(letter: torch.Tensor) -> bytes:
    return ctypes.string_at(letter.data_ptr(), letter.numel()) if letter.numel() else b""


def broadcast(group: Group, data: bytes, name: str) -> bytes:
    """Collective: everybody gets rank 0's bytes."""
    length = torch.tensor([len(data)])
    group.broadcast(length, name=f"length of {name}")
    letter = pack(data) if group.rank == 0 else torch.empty(int(length.item()), dtype=torch.uint8)
    group.broadcast(letter, name=name)
    return data if group.rank == 0 else unpack(letter)


def broadcast_object(group: Group, tree: Any, name: str) -> Any:
    """Collective: everybody gets rank 0's plain value (numbers, texts, lists, dicts)."""
    return msgspec.msgpack.decode(broadcast(group, msgspec.msgpack.encode(tree if group.rank == 0 else None), name))


def all_gather_objects(group: Group, tree: Any, name: str) -> list[Any]:
    """Collective: everybody's plain values, in order of rank."""
    letters = group.all_gather(pack(msgspec.msgpack.encode(tree)), name=name)
    return [msgspec.msgpack.decode(unpack(letter)) for letter in letters]
