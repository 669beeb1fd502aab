"""Stages: spans of the training thread (data, forward, backward, step) for the trace.

Forward and evaluation are noticed by hooks on the models. A backward begins with the gradient of a model's output, so
that of the loss itself lies before it, and ends with the outermost pass, after the strategy's work there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..monitor import spans
from ..monitor.spans import TRAINING


class Stages:
    """Of one training thread. Its hooks are plain functions, to be registered through Hook."""

    def __init__(self) -> None:
        self._forwards: list[tuple[int, int]] = []  # models that are being called, and since when
        self._backward = 0
        self._data = 0
        self._step = 0

    def before_forward(self, model: torch.nn.Module, *_: Any) -> None:
        if not spans.on:
            return
        if torch._C._current_graph_task_id() == -1:
            self._backward = 0  # one that has not ended was broken off
        self._forwards.append((id(model), spans.clock()))

    def after_forward(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        while self._forwards:
            which, begin = self._forwards.pop()  # those before it were left by an exception
            if which == id(model):
                spans.add(TRAINING, "forward" if torch.is_grad_enabled() else "evaluation", begin)
                break
        if spans.on and torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if spans.on and not self._backward:
            self._backward = spans.clock()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        spans.add(TRAINING, "backward", self._backward)
        self._backward = 0

    def fetch(self) -> None:
        """A loader is asked for the next batch."""
        self._data = spans.clock() if spans.on else 0

    def fetched(self) -> None:
        """It has it, or this worker has no samples in it."""
        spans.add(TRAINING, "data", self._data)
        self._data = 0

    def before_step(self) -> None:
        self._step = spans.clock() if spans.on else 0

    def after_step(self, step: int, optimizer: int) -> None:
        """`step` steps of the first optimizer are done; this was that of number `optimizer`."""
        spans.add(TRAINING, "step", self._step, step=step, optimizer=optimizer)
        self._step = 0


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)
