"""Optimizer state by parameter name, as checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .registry import ParameterRegistry
from .shards import flatten

OptimizerStates = list[dict[str, dict[str, Any]]]  # for each optimizer, by parameter


def collect(registry: ParameterRegistry) -> OptimizerStates:
    return [
        {registry.names[registry.index[id(parameter)]]: state for parameter, state in optimizer.state.items()}
        for optimizer in registry.optimizers
    ]


def load(
    registry: ParameterRegistry, states: OptimizerStates, fitting: Callable[[int, dict[str, Any]], dict[str, Any]]
) -> None:
    """Each optimizer gets its own; `fitting(parameter, state)` is what this worker holds of one."""
    for optimizer, state in zip(registry.optimizers, states, strict=True):
        plain = optimizer.state_dict()
        packed = {}
        for group, numbers in zip(optimizer.param_groups, plain["param_groups"], strict=True):
            for parameter, number in zip(group["params"], numbers["params"], strict=True):
                index = registry.index[id(parameter)]
                if registry.names[index] in state:
                    packed[number] = fitting(index, state[registry.names[index]])
        optimizer.load_state_dict({"state": packed, "param_groups": plain["param_groups"]})


def cut(state: dict[str, Any], parameter: torch.Tensor, start: int, stop: int) -> dict[str, Any]:
    """The state of elements [start, stop) of a parameter, in the order of its memory, out of the whole one's."""
    if stop - start == parameter.numel():
        return state
    return {
        key: _slice(value, parameter, start, stop)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def put(whole: dict[str, Any], part: dict[str, Any], parameter: torch.Tensor, start: int, stop: int) -> None:
    """The state of elements [start, stop) into its place in the whole one's. What is no slice is the same for all."""
    for key, value in part.items():
        is_slice = isinstance(value, torch.Tensor) and value.numel() == stop - start != parameter.numel()
        if not is_slice or (value.dim() == 0 and stop - start == 1):
            whole.setdefault(key, value)
            continue
        if key not in whole:
            whole[key] = torch.zeros_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False)
        flatten(whole[key])[start:stop] = value.reshape(-1)


def _slice(value: torch.Tensor, parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    laid = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return flatten(laid)[start:stop].clone()
