"""ShardedSync: each worker reduces and updates only its shard of the parameters and keeps optimizer state for it alone
(ZeRO stage 1, with gradients reduced to their owners).

The user's own optimizer does the update: during `step()` its parameter groups hold this worker's shards, tensors of
their own in the parameters' memory, with their part of the gradient. A shard is a parameter or a slice of one, never of
two: torch's optimizers count steps and skip missing gradients per parameter. Only elementwise optimizers get slices;
any other gets whole parameters.

    backward        gradients are reduced to their owners: `p.grad` holds the mean on this worker's shard alone
    _open_step      all have arrived, so no worker reads parameters; the groups hold the shards
    step()          writes this worker's shard
    _after_step     all have written; the groups hold the parameters again

On one host the parameters lie in memory that all workers map. Elsewhere the shards are gathered after the step. Which
worker owns which shard depends on the models and the number of workers alone.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import safetensors.torch
import torch
from torch.autograd.graph import increment_version

from ... import checkpoint
from ...collectives import objects
from ...collectives.group import Group
from ...errors import HoraError, OutOfMemory
from ...monitor import spans
from ...parameters.buckets import Bucket, plan
from ...parameters.optimizer_state import cut, put
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import CUT_BYTES, ELEMENTWISE, ParameterShard, even_shards, flat_view, flatten, is_dense
from ...transport.task_thread import TaskHandle
from ..common.hooks import TrainingHooks
from ..common.sync import Snapshot
from .bucket_plans import Shards
from .guard import Guard
from .replicated import ReplicatedSync

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)

ALIGN_BYTES = 128


class ShardedSync(ReplicatedSync):
    keep = False
    together = True

    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: AllReduce) -> None:
        super().__init__(registry, hooks, strategy)
        self._shards_of: list[list[ParameterShard]] = []
        self._local: dict[int, torch.Tensor] = {}  # by parameter: this worker's shard, which the optimizer sees instead
        self._storages: list[tuple[torch.Tensor, list[torch.nn.Parameter]]] = []  # shared memory, and whose it is
        self._fitted: dict[tuple[int, int], dict[str, Any]] = {}  # state of shards, by optimizer and parameter
        self._shared = False  # the parameters lie in memory that all workers map
        self._gathers: dict[tuple[int, ...], list[Bucket]] = {}  # buckets of the all-gather, by parameters
        self._swapped: list[list[torch.Tensor]] = []
        self._guard = Guard(registry, self._backward)

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        for optimizer in self.registry.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS needs all parameters at once: use update=replicated")
        super().bind(group)
        if self.group is None:
            return
        self._guard.name = self._group.transport.name_of(self._group.rank)
        self._shards_of = self._assign_owners()
        self._gathers.clear()
        self._move()
        for index, shards in enumerate(self._shards_of):
            shard = self._own_shard(index)
            if shard is not None:
                parameter = self.registry.parameters[index]
                whole = parameter.detach() if not self._shared else self._alias(parameter)
                self._local[index] = whole if len(shards) == 1 else flatten(whole)[shard.start : shard.stop]
        for number, optimizer in enumerate(self.registry.optimizers):
            for held in [*optimizer.state]:
                self._fit(number, optimizer, held)  # Adagrad has some from the start, and so has a restored one
        self._guard.remember()

    def _fit(self, number: int, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """Cuts the state of a whole parameter, which the optimizer was made or loaded with, to this worker's shard."""
        index = self.registry.index[id(parameter)]
        if self._own_shard(index) is None:
            optimizer.state.pop(parameter, None)
        elif parameter in optimizer.state and self._fitted.get((number, index)) is not optimizer.state[parameter]:
            optimizer.state[parameter] = self._fitting(index, optimizer.state[parameter])

    def _assign_owners(self) -> list[list[ParameterShard]]:
        """Which rank owns what: the same on every rank, whatever the order of gradients will be."""
        size, parameters = self._group.size, self.registry.parameters
        sliced: set[int] = set()
        for optimizer in self.registry.optimizers:
            if type(optimizer) in ELEMENTWISE:
                sliced |= {self.registry.index[id(p)] for g in optimizer.param_groups for p in g["params"]}
            elif self._group.rank == 0:
                log.info("%s is not known to be elementwise: it gets whole parameters", type(optimizer).__name__)
        tied: dict[int, list[int]] = {}
        for index, parameter in enumerate(parameters):
            tied.setdefault(parameter.untyped_storage().data_ptr(), []).append(index)
        together = {index: members[0] for members in tied.values() if len(members) > 1 for index in members}
        shards: list[list[ParameterShard]] = [[] for _ in parameters]
        loads = [0] * size
        for index, parameter in enumerate(parameters):
            num_bytes = parameter.numel() * parameter.element_size()
            if index in sliced and index not in together and num_bytes >= CUT_BYTES and is_dense(parameter):
                shards[index] = even_shards(parameter.numel(), size)
                continue
            first = together.get(index, index)
            owner = shards[first][0].owner if first < index else loads.index(min(loads))
            loads[owner] += num_bytes
            shards[index] = [ParameterShard(0, parameter.numel(), owner)]
        return shards

    def _shards(self) -> Shards:
        return self._shards_of.__getitem__

    def _own_shard(self, index: int) -> ParameterShard | None:
        rank = self._group.rank
        return next(
            (shard for shard in self._shards_of[index] if shard.owner == rank and shard.stop > shard.start), None
        )

    def _move(self) -> None:
        """Moves the parameters into shared memory. Strides are kept, and parameters that shared a storage still do."""
        group, parameters = self._group, self.registry.parameters
        if not group.transport.shares_memory or not all(p.is_cpu for p in parameters):
            return
        storages: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            storages.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        sizes = [
            -(-members[0].untyped_storage().nbytes() // ALIGN_BYTES) * ALIGN_BYTES for members in storages.values()
        ]
        try:
            memory = group.buffer("parameters", -(-sum(sizes) // group.size), torch.uint8)
        except OutOfMemory as problem:
            if group.rank == 0:
                log.warning(
                    "too little shared memory for the parameters: shards are gathered after each step: %s", problem
                )
            return
        at = 0
        for members, size in zip(storages.values(), sizes, strict=True):
            if size:
                # A storage of its own for each, so that saving one tensor does not save them all.
                room = torch.from_dlpack(memory.storage[at : at + size])
                storage = members[0].untyped_storage()
                if group.rank == 0:
                    room[: storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
                self._storages.append((room, members))
                _move_to(room, members)
                at += size
        self._shared = True
        group.barrier("parameters moved")

    @staticmethod
    def _alias(parameter: torch.nn.Parameter) -> torch.Tensor:
        """The same memory with a version counter of its own, so that a user's write is told from the optimizer's."""
        return torch.empty(0, dtype=parameter.dtype).set_(
            parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride()
        )

    def unbind(self) -> None:
        if self._shared:
            self._shared = False
            for room, members in self._storages:
                _move_to(room.clone(), members)
            self._storages.clear()
        self._local.clear()
        super().unbind()

    # -- the step ----------------------------------------------------------------------------------------------------

    def _check_gradients(self) -> None:
        self._guard.begin()

    def _grad(self, index: int) -> torch.Tensor:
        if index in self._plans.sparse:
            raise HoraError(f"{self.registry.names[index]} has a sparse gradient: use update=replicated")
        return super()._grad(index)

    def _reduce_sparse(self, index: int) -> None:
        raise ValueError(
            f"{self.registry.names[index]} has a sparse gradient, which cannot be cut: use update=replicated"
        )

    def _settle(self, indices: Iterable[int]) -> None:
        self._guard.settle(indices)

    def unscaled(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        self._guard.settle()  # the scaler's own write is not the script's

    def _before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._swapped:
            with self._group.part_of_call():
                raise HoraError(
                    f"{self._group.transport.name_of(self._group.rank)}: the last step() broke off inside the "
                    "optimizer, so this worker's shard was not updated while others' were: restore a checkpoint, or "
                    "start again"
                )
        return super()._before_step(optimizer)

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.group is None:
            return
        stepping = {self.registry.index[id(p)] for group in optimizer.param_groups for p in group["params"]}
        with self.group.part_of_call():
            if self._shared:
                self._guard.check_parameters()
            self._guard.check_gradients(stepping)
            self._guard.check_mixed(stepping)
        begin = time.perf_counter()
        self.group.barrier("before the step")
        self.traffic.spend(begin)
        if spans.on:
            spans.add(spans.TRAINING, "waiting", spans.since(begin), what="before the step")
        self._swapped = []
        number = self.registry.optimizers.index(optimizer)
        for group in optimizer.param_groups:
            self._swapped.append(group["params"])
            group["params"] = []
            for parameter in self._swapped[-1]:
                index = self.registry.index[id(parameter)]
                self._fit(number, optimizer, parameter)
                local = self._local.get(index)
                if local is None:
                    continue
                shard, grad = self._own_shard(index), parameter.grad
                assert shard is not None
                if grad is None or local.shape == parameter.shape:
                    local.grad = None if grad is None else grad.detach()
                else:
                    local.grad = flatten(grad.detach())[shard.start : shard.stop]
                group["params"].append(local)
                if parameter in optimizer.state:
                    optimizer.state[local] = optimizer.state.pop(parameter)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._after_step(optimizer)
        if self.group is None or not self._swapped:
            return
        number = self.registry.optimizers.index(optimizer)
        for group, parameters in zip(optimizer.param_groups, self._swapped, strict=True):
            group["params"] = parameters
            for parameter in parameters:
                index = self.registry.index[id(parameter)]
                local = self._local.get(index)
                if local is not None and local in optimizer.state:
                    optimizer.state[parameter] = self._fitted[number, index] = optimizer.state.pop(local)
                if local is not None:
                    local.grad = None
        indices = sorted({self.registry.index[id(p)] for parameters in self._swapped for p in parameters})
        self._swapped = []
        begin, sent = time.perf_counter(), sum(self.group.sent_bytes)
        if self._shared:
            self.group.barrier("after the step")
            for index in indices:
                increment_version(self.registry.parameters[index])
        else:
            self._gather(indices)
            self.traffic.sent_bytes += sum(self.group.sent_bytes) - sent
        self.traffic.spend(begin)
        if spans.on:
            name = "waiting" if self._shared else "exchange"
            spans.add(spans.TRAINING, name, spans.since(begin), what="after the step")
        self._guard.remember()

    def _gather(self, indices: list[int]) -> None:
        """All-gather of the updated shards of these parameters, a bucket at a time."""
        key = tuple(indices)
        if key not in self._gathers:
            parameters, limit = self.registry.parameters, self.strategy.bucket_bytes
            self._gathers[key] = plan(indices, parameters, self._shards(), limit, self._group.size)
        me = self._group.rank
        under_way: collections.deque[tuple[Bucket, TaskHandle]] = collections.deque()
        try:
            for bucket in self._gathers[key]:
                pieces = [flat_view(self.registry.parameters[s.index])[s.start : s.stop]
                          for s in bucket.segments if s.owner == me]  # fmt: skip
                mine = torch.cat(pieces) if pieces else torch.empty(0, dtype=bucket.dtype, device=bucket.device)
                under_way.append((bucket, self._group.all_gather(mine, name="updated shards", wait=False)))
                if len(under_way) > 1:
                    self._scatter(*under_way.popleft())
            while under_way:
                self._scatter(*under_way.popleft())
        except BaseException:
            for _, parts in under_way:  # the first error is raised, once
                with contextlib.suppress(BaseException):
                    parts.wait()
            raise

    def _scatter(self, bucket: Bucket, parts: TaskHandle) -> None:
        """Copies the other workers' shards into the parameters."""
        found = parts.wait()
        for segment in bucket.segments:
            if segment.owner == self._group.rank:
                continue
            at = segment.offset - segment.owner * bucket.stride
            part = found[segment.owner][at : at + segment.stop - segment.start]
            whole = self.registry.parameters[segment.index].detach()
            flat = flat_view(whole)
            flat[segment.start : segment.stop].copy_(part)
            if not is_dense(whole):
                whole.copy_(flat.view(whole.shape))

    def _correct(self, factor: float) -> None:
        for index in self._counted:
            parameter, shard = self.registry.parameters[index], self._own_shard(index)
            if shard is not None and parameter.grad is not None:
                flatten(parameter.grad.detach())[shard.start : shard.stop].mul_(factor)

    def _share_gradients(self) -> None:
        """Nothing to do: each worker has what it applies, and all workers take part in clipping."""

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        if self.group is None:
            return super().clip(parameters, max_norm, norm_type)
        indices = [self.registry.index[id(p)] for p in parameters if id(p) in self.registry.index]
        with self.group.part_of_call():
            self._guard.check_gradients(set(indices))
        shards = []
        for index in indices:
            grad, shard = self.registry.parameters[index].grad, self._own_shard(index)
            if grad is not None and shard is not None:
                shards.append(flatten(grad.detach())[shard.start : shard.stop])
        norms = [torch.linalg.vector_norm(part, norm_type, dtype=_wide(part.dtype)).double() for part in shards]
        most = norm_type == float("inf")
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        total = (mine.max() if most else (mine**norm_type).sum()).cpu().view(1)
        self.group.all_reduce(total, "max" if most else "sum", name="norm of the gradients")
        norm = total[0] if most else total[0] ** (1.0 / norm_type)
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        if factor < 1.0:
            torch._foreach_mul_(shards, factor)
        self._settle(indices)
        return norm.float()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """Rank 0 gathers the optimizer state of all shards; the other snapshots hold that of their own shard."""
        if self.group is None:
            return super().snapshot(complete)
        found = super().snapshot(complete)
        plain, tensors = checkpoint.encode(found.states)
        data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        parts = self.home.gather(objects.pack(msgspec.msgpack.encode([plain, data])), name="optimizer state")
        if parts is not None:
            found.states = self._assemble([msgspec.msgpack.decode(objects.unpack(part)) for part in parts])
        return found

    def _assemble(self, parts: list[Any]) -> list[dict[str, dict[str, Any]]]:
        """Whole states out of the shards of all ranks."""
        states: list[dict[str, dict[str, Any]]] = [{} for _ in self.registry.optimizers]
        numbers = {name: index for index, name in enumerate(self.registry.names)}
        for rank, (plain, data) in enumerate(parts):
            theirs = checkpoint.decode(plain, checkpoint.parse(data, f"the optimizer state of rank {rank}"))
            for whole, shards in zip(states, theirs, strict=True):
                for name, state in shards.items():
                    self._put(whole.setdefault(name, {}), state, numbers[name], rank)
        return states

    def _put(self, whole: dict[str, Any], part: dict[str, Any], index: int, rank: int) -> None:
        """Puts rank `rank`'s part of one parameter's state into its place."""
        parameter = self.registry.parameters[index]
        shard = next((shard for shard in self._shards_of[index] if shard.owner == rank), None)
        start, stop = (shard.start, shard.stop) if shard is not None else (0, parameter.numel())
        put(whole, part, parameter, start, stop)

    def _fitting(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        if self.group is None:
            return state
        shard, parameter = self._own_shard(index), self.registry.parameters[index]
        if shard is None:
            return {}
        return cut(state, parameter, shard.start, shard.stop)

    def restore(self, snapshot: Snapshot) -> None:
        if self.group is None:
            return super().restore(snapshot)
        if self._shared:
            self.home.barrier("before the parameters are restored")
        super().restore(snapshot)
        self.home.barrier("parameters restored")
        self._guard.remember()
        for optimizer in self.registry.optimizers:  # no state for the shards of other workers
            for parameter in [p for p, state in optimizer.state.items() if not state]:
                del optimizer.state[parameter]
        return None


def _move_to(room: torch.Tensor, members: Iterable[torch.nn.Parameter]) -> None:
    """These parameters, which share a storage, move to this memory: each to its place in it, with its strides."""
    for parameter in members:
        size = parameter.element_size()
        typed = room[: room.numel() // size * size].view(parameter.dtype)
        parameter.data = typed.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
