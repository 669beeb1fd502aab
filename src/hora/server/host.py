"""Host: makes a server out of a script's model and optimizers, in a process of its own or beside a worker."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Sequence

import torch

from ..errors import HoraError
from ..net.interface import is_loopback
from ..parameters.registry import ParameterRegistry
from ..parameters.shards import is_dense
from ..rendezvous.context import RunContext
from .embedding import tables_of
from .embedding_table import OPTIMIZERS, TableSpec
from .layout import FAR_PIECES, PIECES, BlockLayout, cut
from .loop import ServerLoop
from .state import Rules
from .summary import summary

log = logging.getLogger(__name__)


def layout_of(roster: ParameterRegistry, access: RunContext, block_bytes: int) -> BlockLayout:
    """How this model is cut: the same on every worker and server. ValueError if it cannot be.

    On several hosts nobody's address is loopback, and on one everybody's is."""
    for optimizer in roster.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS needs all parameters at once, and servers have blocks of them: use ring or auto")
    _check_apart(roster)
    _check_tables(roster)
    tables = _specs(roster, access.num_servers)
    pieces = PIECES if is_loopback(access.bind) else FAR_PIECES
    servers, sparse = access.num_servers, sparse_ones(roster)
    return cut(roster.parameters, roster.optimizers, servers, block_bytes, sparse, tables, pieces)


def _check_apart(roster: ParameterRegistry) -> None:
    """No two parameters lie over each other: what two servers update must be two things."""
    places: dict[int, list[tuple[int, int, str]]] = {}
    for parameter, name in zip(roster.parameters, roster.names, strict=True):
        start = int(parameter.storage_offset())
        stop = start + (parameter.numel() if is_dense(parameter) else 1)  # of one with gaps only the first is looked at
        others = places.setdefault(parameter.untyped_storage().data_ptr(), [])
        for theirs, end, other in others if parameter.numel() else ():
            if start < end and theirs < stop:
                raise ValueError(
                    f"{name} and {other} are two parameters in one memory, which two servers cannot both update: let "
                    "both modules have one nn.Parameter"
                )
        others.append((start, stop, name))


def _check_tables(roster: ParameterRegistry) -> None:
    served = {id(p) for optimizer in roster.optimizers for group in optimizer.param_groups for p in group["params"]}
    for prefix, model in roster._prefixed():
        for place, module in model.named_modules():
            if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or id(module.weight) not in served:
                continue
            name = f"{prefix}{place}{'.' if place else ''}weight"
            if module.max_norm is not None:
                raise ValueError(
                    f"{name} has max_norm={module.max_norm:g}, so that every forward writes into it, and the servers, "
                    "whose table it is, would not know: leave max_norm out under ps"
                )
            if module.sparse and not module.weight.is_contiguous():
                raise ValueError(f"{name} is sparse and its rows lie apart: make it contiguous() before job.prepare()")


def _specs(roster: ParameterRegistry, num_servers: int) -> dict[int, TableSpec]:
    """The tables that only servers have, by the parameter that stands in for each."""
    having = {
        id(p): type(optimizer) for optimizer in roster.optimizers for g in optimizer.param_groups for p in g["params"]
    }
    found = {}
    for table in tables_of(roster.models):
        index = roster.index[id(table.rows)]
        if id(table.rows) not in having:
            raise ValueError(f"{roster.names[index]}, of a ServerEmbedding, is in no optimizer: its rows need one")
        if having[id(table.rows)] not in OPTIMIZERS:
            names = ", ".join(each.__name__ for each in OPTIMIZERS)
            raise ValueError(
                f"{roster.names[index]}, of a ServerEmbedding, is {having[id(table.rows)].__name__}'s, which is not "
                f"known to update rows by themselves; there are: {names}"
            )
        found[index] = table.spec(index, num_servers)
    return found


def sparse_ones(roster: ParameterRegistry) -> frozenset[int]:
    """The tables whose gradients are rows, as their modules say."""
    tables = [
        module.weight
        for model in roster.models
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    ]
    return frozenset(roster.index[id(weight)] for weight in tables if id(weight) in roster.index)


def _loop(
    access: RunContext,
    roster: ParameterRegistry,
    rules: Rules,
    block_bytes: int,
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[torch.Tensor],
) -> ServerLoop:
    layout = layout_of(roster, access, block_bytes)
    return ServerLoop(access, layout, parameters, roster.names, roster.entries(), optimizers, rules)


def serve(access: RunContext, roster: ParameterRegistry, rules: Rules, block_bytes: int) -> None:
    """A server process's whole life: returns when all workers have left."""
    loop = _loop(access, roster, rules, block_bytes, roster.optimizers, roster.parameters)
    for parameter in roster.parameters:  # its own blocks are all that a server keeps
        parameter.data = parameter.data.new_empty(0)
    loop.serve()
    log.warning("%s", summary(loop.stats()))


class Colocated:
    """A server on a thread of a worker's process. It outlives the training here: others may still need its blocks."""

    def __init__(self, access: RunContext, roster: ParameterRegistry, rules: Rules, block_bytes: int) -> None:
        stand_ins = [torch.empty_like(p, device="meta") for p in roster.parameters]
        which = {id(parameter): stand_in for parameter, stand_in in zip(roster.parameters, stand_ins, strict=True)}
        optimizers = [_twin(optimizer, which) for optimizer in roster.optimizers]
        self._loop = _loop(access, roster, rules, block_bytes, optimizers, stand_ins)
        self._rank = access.rank
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="hora-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                self._loop.serve()
        except Exception as problem:
            self._problem = problem
            log.exception("the server in this worker's process cannot go on")

    def check(self) -> None:
        if self._problem is not None:
            raise HoraError(f"the server in this worker's process cannot go on: {self._problem}")

    def close(self, timeout_s: float) -> None:
        """This worker has left: serves on until the last one has, at most `timeout_s`."""
        self._loop.excuse(self._rank)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._loop.abandon("the worker that hosts it has ended")
            self._thread.join(5.0)
        log.warning("%s", summary(self._loop.stats()))


def _twin(optimizer: torch.optim.Optimizer, which: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer like this one, over stand-ins for its parameters, with its state but without the user's hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    for key in vars(twin):
        if key.endswith("_hooks"):
            setattr(twin, key, collections.OrderedDict())
    twin.param_groups = [
        {**group, "params": [which[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    state = {which[id(parameter)]: dict(kept) for parameter, kept in optimizer.state.items()}
    twin.state = collections.defaultdict(dict, state)
    return twin
