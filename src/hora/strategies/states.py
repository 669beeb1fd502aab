"""Optimizer state by parameter name, as checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..roster import Roster

States = list[dict[str, dict[str, Any]]]  # for each optimizer, by parameter


def collect(roster: Roster) -> States:
    return [
        {roster.names[roster.index[id(parameter)]]: state for parameter, state in optimizer.state.items()}
        for optimizer in roster.optimizers
    ]


def load(roster: Roster, states: States, fitting: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Each optimizer gets its own; `fitting(parameter, state)` is what this worker holds of one."""
    for optimizer, state in zip(roster.optimizers, states, strict=True):
        plain = optimizer.state_dict()
        packed = {}
        for group, numbers in zip(optimizer.param_groups, plain["param_groups"], strict=True):
            for parameter, number in zip(group["params"], numbers["params"], strict=True):
                index = roster.index[id(parameter)]
                if roster.names[index] in state:
                    packed[number] = fitting(index, state[roster.names[index]])
        optimizer.load_state_dict({"state": packed, "param_groups": plain["param_groups"]})
