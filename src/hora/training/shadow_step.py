"""Shadow steps: how workers without samples in a batch take part in it.

Which workers have samples in a batch is known to all. In a batch where one has none, rank 0, which then has some,
broadcasts what it does before it does it (an exchange, a clipping, a step, leaving the loop, the end of the batch), and
the workers without samples follow from inside their loader: weight 0, rank 0's gradients and hyper-parameters, its
schedulers and scaler.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checkpoint
from ..collectives import objects
from ..parameters import hyperparameters
from ..parameters.registry import ParameterRegistry
from ..strategies.common.sync import Sync

Action = dict[str, Any]

EXCHANGE: Action = {"kind": "exchange"}
LEAVE: Action = {"kind": "leave"}


class ShadowSteps:
    """The actions of rank 0 as plain values, and what a worker without samples does for each."""

    def __init__(self, registry: ParameterRegistry, schedulers: list[Any], scaler: Any) -> None:
        self._registry = registry
        self._optimizers = registry.optimizers
        self._schedulers = schedulers
        self._scaler = scaler

    def step(self, optimizer: torch.optim.Optimizer) -> Action:
        number = self._optimizers.index(optimizer)
        return {"kind": "step", "optimizer": number, "groups": hyperparameters.read(self._optimizers)}

    def end(self) -> Action:
        """The end of a batch, with the state of this worker's loop."""
        return {
            "kind": "end",
            "groups": hyperparameters.read(self._optimizers),
            "schedulers": [_plain(scheduler.state_dict()) for scheduler in self._schedulers],
            "scaler": self._scaler.state_dict() if is_enabled(self._scaler) else {},
            "modes": [model.training for model in self._registry.models],
            "cleared": all(_is_clear(parameter.grad) for parameter in self._registry.parameters),
        }

    def broadcast(self, sync: Sync, action: Action | None) -> Action:
        """Collective: rank 0's action."""
        assert sync.group is not None
        return dict(objects.broadcast_object(sync.group, action, "order"))

    def follow(self, sync: Sync, action: Action) -> bool:
        """Does what rank 0 does; False if the batch is over."""
        if action["kind"] == "exchange":
            sync.after_backward(shadow=True)
        elif action["kind"] == "clip":
            parameters = [self._registry.parameters[index] for index in action["indices"]]
            sync.clip(parameters, action["max_norm"], action["norm_type"])
        elif action["kind"] == "step":
            hyperparameters.apply(self._optimizers, action["groups"])
            optimizer = self._optimizers[action["optimizer"]]
            optimizer.step()
            optimizer.zero_grad()
        else:
            if action["kind"] == "end":
                self.load(action)
            return False
        return True

    def load(self, end: Action) -> None:
        """Hyper-parameters, schedulers, scaler and modes become those of another worker's `end`."""
        hyperparameters.apply(self._optimizers, end["groups"])
        for scheduler, (plain, tensors) in zip(self._schedulers, end["schedulers"], strict=True):
            named = {name: torch.tensor(values) for name, values in tensors.items()}
            scheduler.load_state_dict(checkpoint.decode(plain, named))
        if end["scaler"] and is_enabled(self._scaler):
            self._scaler.load_state_dict(end["scaler"])
        for model, mode in zip(self._registry.models, end["modes"], strict=True):
            if model.training != mode:
                model.train(mode)
        if end["cleared"]:
            for parameter in self._registry.parameters:
                parameter.grad = None


def is_enabled(scaler: Any) -> bool:
    return scaler is not None and scaler.is_enabled()


def _plain(state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A scheduler's state as plain values, and its tensors by name."""
    plain, tensors = checkpoint.encode(state)
    return plain, {name: tensor.tolist() for name, tensor in tensors.items()}


def _is_clear(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    return grad._nnz() == 0 if grad.layout is torch.sparse_coo else not bool(grad.any())
