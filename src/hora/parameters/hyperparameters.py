"""Hyper-parameters of optimizers as plain values that can be sent: numbers, pairs of numbers, strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Hyper = list[list[dict[str, Any]]]  # by optimizer and group


def read(optimizers: Sequence[torch.optim.Optimizer]) -> Hyper:
    return [
        [{key: _plain(value) for key, value in group.items() if _is_plain(value)} for group in each.param_groups]
        for each in optimizers
    ]


def apply(optimizers: Sequence[torch.optim.Optimizer], hyper: Hyper) -> None:
    """The optimizers work with these from now on."""
    for optimizer, theirs in zip(optimizers, hyper, strict=True):
        for group, values in zip(optimizer.param_groups, theirs, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(part, bool | int | float) for part in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | str | type(None))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
