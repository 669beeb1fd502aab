"""Watching: what a Sync needs to notice the ends of backward passes over the models that it was given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...parameters.buckets import BackwardHooks


class WatchesBackward:
    """A part of a Sync that has a `Backward`."""

    _backward: BackwardHooks

    def after_forward(self, output: Any) -> None:
        """The model's output carries a hook: where it fires, a backward has begun, whose end is then noticed."""
        if not torch.is_grad_enabled():
            return
        for tensor in tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        self._backward.expect_end()


def tensors(output: Any) -> Iterable[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
