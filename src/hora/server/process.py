"""A parameter server's life: in a process of its own (`serve`), or on a thread of a worker (`ColocatedServer`)."""

from __future__ import annotations

import collections
import logging
import threading

import torch

from ..errors import HoraError
from ..parameters.registry import ParameterRegistry
from ..rendezvous.context import RunContext
from .layout import make_layout
from .loop import ServerLoop
from .state import Rules
from .stats import summary

log = logging.getLogger(__name__)


def serve(context: RunContext, registry: ParameterRegistry, rules: Rules, block_bytes: int) -> None:
    """Runs this process's server. Returns when all workers have left."""
    layout = make_layout(registry, context, block_bytes)
    loop = ServerLoop(context, layout, registry, registry.parameters, registry.optimizers, rules)
    for parameter in registry.parameters:  # a server holds its own blocks only
        parameter.data = parameter.data.new_empty(0)
    loop.serve()
    log.warning("%s", summary(loop.stats()))


class ColocatedServer:
    """A server on a thread of a worker's process. It outlives the worker's training while others need its blocks."""

    def __init__(self, context: RunContext, registry: ParameterRegistry, rules: Rules, block_bytes: int) -> None:
        placeholders = [torch.empty_like(p, device="meta") for p in registry.parameters]
        by_id = {id(parameter): other for parameter, other in zip(registry.parameters, placeholders, strict=True)}
        optimizers = [_copy_optimizer(optimizer, by_id) for optimizer in registry.optimizers]
        layout = make_layout(registry, context, block_bytes)
        self._loop = ServerLoop(context, layout, registry, placeholders, optimizers, rules)
        self._rank = context.rank
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="hora-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                self._loop.serve()
        except Exception as problem:
            self._error = problem
            log.exception("the server in this worker's process failed")

    def check(self) -> None:
        """HoraError if the server has failed."""
        if self._error is not None:
            raise HoraError(f"the server in this worker's process failed: {self._error}")

    def close(self, timeout_s: float) -> None:
        """This worker has left: blocks until the last worker has, at most `timeout_s`."""
        self._loop.worker_left(self._rank)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._loop.stop()
            self._thread.join(5.0)
        log.warning("%s", summary(self._loop.stats()))


def _copy_optimizer(optimizer: torch.optim.Optimizer, by_id: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """The same optimizer and state over other parameters, without the user's hooks."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    for key in vars(copy):
        if key.endswith("_hooks"):
            setattr(copy, key, collections.OrderedDict())
    copy.param_groups = [
        {**group, "params": [by_id[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    state = {by_id[id(parameter)]: dict(kept) for parameter, kept in optimizer.state.items()}
    copy.state = collections.defaultdict(dict, state)
    return copy
