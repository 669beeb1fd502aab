"""Orders: how workers without samples in a batch take part in it.

Who has samples in a batch is known to all. In a batch where somebody has none, rank 0, which then has some, says aloud
what it does before it does it (an exchange, a clipping, a step, leaving the loop, the end of the batch), and the absent
follow from inside their loader: weight 0, rank 0's gradients and hyper-parameters, its schedulers and scaler.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checkpoint
from ..collectives import objects
from ..parameters import hyperparameters
from ..strategies.common.sync import Sync

Optimizer = torch.optim.Optimizer


class ShadowSteps:
    """One worker's side: `give` on those that have samples, `hear` and `follow` on those that have none."""

    def __init__(
        self, sync: Sync, models: list[torch.nn.Module], optimizers: list[Optimizer], schedulers: list[Any], scaler: Any
    ) -> None:
        self._sync = sync
        self._models = models
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._scaler = scaler

    def exchange(self) -> dict[str, Any]:
        return {"kind": "exchange"}

    def clip(self, indices: list[int], max_norm: float, norm_type: float) -> dict[str, Any]:
        return {"kind": "clip", "indices": indices, "max_norm": max_norm, "norm_type": norm_type}

    def step(self, optimizer: Optimizer) -> dict[str, Any]:
        return {
            "kind": "step",
            "optimizer": self._optimizers.index(optimizer),
            "groups": hyperparameters.read(self._optimizers),
        }

    def leave(self) -> dict[str, Any]:
        return {"kind": "leave"}

    def end(self) -> dict[str, Any]:
        """With what the batch has left behind on this worker."""
        return {
            "kind": "end",
            "groups": hyperparameters.read(self._optimizers),
            "schedulers": [_spelled(scheduler.state_dict()) for scheduler in self._schedulers],
            "scaler": self._scaler.state_dict() if is_enabled(self._scaler) else {},
            "modes": [model.training for model in self._models],
            "cleared": all(_is_clear(parameter.grad) for parameter in self._sync.roster.parameters),
        }

    def say(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """Collective: rank 0's order, whatever the others would say."""
        assert self._sync.group is not None
        return dict(objects.broadcast_object(self._sync.group, order, "order"))

    def follow(self, order: dict[str, Any]) -> bool:
        """Does what rank 0 said; False if the batch is over by that."""
        if order["kind"] == "exchange":
            self._sync.absent_step()
        elif order["kind"] == "clip":
            parameters = [self._sync.roster.parameters[index] for index in order["indices"]]
            self._sync.clip(parameters, order["max_norm"], order["norm_type"])
        elif order["kind"] == "step":
            hyperparameters.apply(self._optimizers, order["groups"])
            optimizer = self._optimizers[order["optimizer"]]
            optimizer.step()
            optimizer.zero_grad()
        else:
            if order["kind"] == "end":
                self.stand_as(order)
            return False
        return True

    def stand_as(self, order: dict[str, Any]) -> None:
        """Hyper-parameters, schedulers, scaler and modes become what rank 0's were at the end of a batch."""
        hyperparameters.apply(self._optimizers, order["groups"])
        for scheduler, (plain, tensors) in zip(self._schedulers, order["schedulers"], strict=True):
            named = {name: torch.tensor(values) for name, values in tensors.items()}
            scheduler.load_state_dict(checkpoint.decode(plain, named))
        if order["scaler"] and is_enabled(self._scaler):
            self._scaler.load_state_dict(order["scaler"])
        for model, mode in zip(self._models, order["modes"], strict=True):
            if model.training != mode:
                model.train(mode)
        if order["cleared"]:
            for parameter in self._sync.roster.parameters:
                parameter.grad = None


def is_enabled(scaler: Any) -> bool:
    return scaler is not None and scaler.is_enabled()


def _spelled(state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A scheduler's state as plain values, and its tensors by name."""
    plain, tensors = checkpoint.encode(state)
    return plain, {name: tensor.tolist() for name, tensor in tensors.items()}


def _is_clear(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    return grad._nnz() == 0 if grad.layout is torch.sparse_coo else not bool(grad.any())
