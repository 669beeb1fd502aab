"""What a Group returns besides tensors: the handle of a point-to-point transfer, and the group one is not in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..transport import Transfer


class TransferHandle:
    """A point-to-point transfer under way; `wait()` returns the tensor."""

    def __init__(self, handle: Transfer, tensor: torch.Tensor, finish: Callable[[], None] | None) -> None:
        self._handle = handle
        self._tensor = tensor
        self._finish = finish

    @property
    def done(self) -> bool:
        return self._handle.done

    def wait(self) -> torch.Tensor:
        self._handle.wait()
        if self._finish:
            self._finish()
            self._finish = None
        return self._tensor


class NonMember:
    """What `new_group` gives a rank that it left out: false in a condition, and every call on it says why not."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank = None
        self.size = len(ranks)
        self._text = f"rank {rank} is not in this group of ranks {ranks}: make the call under `if group:`"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._text)


def received(tensor: torch.Tensor, finish: Callable[[], None] | None) -> Callable[[], None]:
    def done() -> None:
        if finish:
            finish()
        else:
            changed(tensor)

    return done


def changed(tensor: torch.Tensor) -> None:
    """Bytes that arrive go past torch, and autograd must know that values changed."""
    if not tensor.is_inference():
        increment_version(tensor)
