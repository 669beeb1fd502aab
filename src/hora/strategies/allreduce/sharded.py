"""Sharded: each worker reduces and updates only its share of the parameters, and keeps optimizer state only for that.

The user's own optimizer does it: for the length of `step()` its parameter groups hold this worker's shares, tensors of
their own that lie in the parameters' memory, with their part of the gradient. A share is a parameter or a slice of one,
never of two: torch's optimizers count steps and skip missing gradients per parameter. Slices are only for optimizers
that treat every element by itself; any other gets whole parameters.

    backward      gradients are reduced to their owners: `p.grad` holds the mean on this worker's share alone
    open_step     all have arrived, so nobody reads parameters; the groups hold the shares
    step()        writes this worker's share
    after_step    all have written; the groups hold the parameters again

On one host the parameters lie in memory that all workers see, so what one writes is there for all. Elsewhere the shares
are gathered after the step. Which share is whose depends on the models and the number of workers alone.
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
from ..common.sync import Snapshot
from .guard import Guard
from .replicated import ReplicatedSync

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)

ALIGN_BYTES = 128


class ShardedSync(ReplicatedSync):
    keep = False
    together = True

    def __init__(self, roster: ParameterRegistry, strategy: AllReduce) -> None:
        super().__init__(roster, strategy)
        self._lanes_of: list[list[ParameterShard]] = []
        self._shares: dict[int, torch.Tensor] = {}  # by parameter: what the optimizer sees instead
        self._rooms: list[tuple[torch.Tensor, list[torch.nn.Parameter]]] = []  # where storages lie, and whose they are
        self._fitted: dict[tuple[int, int], dict[str, Any]] = {}  # optimizer state, by optimizer and parameter, as cut
        self._shared = False  # whether the parameters lie in memory that all see
        self._rounds: dict[tuple[int, ...], list[Bucket]] = {}  # how these parameters are gathered
        self._swapped: list[list[torch.Tensor]] = []
        self._guard = Guard(roster, self._backward)

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        for optimizer in self.roster.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS needs all parameters at once: use update=replicated")
        super().bind(group)
        if self.group is None:
            return
        self._guard.who = self._group.transport.name_of(self._group.rank)
        self._lanes_of = self._deal()
        self._rounds.clear()
        self._move()
        for index, lanes in enumerate(self._lanes_of):
            lane = self._mine(index)
            if lane is not None:
                parameter = self.roster.parameters[index]
                whole = parameter.detach() if not self._shared else self._outside(parameter)
                self._shares[index] = whole if len(lanes) == 1 else flatten(whole)[lane.start : lane.stop]
        for number, optimizer in enumerate(self.roster.optimizers):
            for held in [*optimizer.state]:
                self._fit(number, optimizer, held)  # Adagrad has some from the start, and so has a restored one
        self._guard.remember()

    def _fit(self, number: int, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """State of a whole parameter, which the optimizer was made or loaded with, is cut to this worker's share."""
        index = self.roster.index[id(parameter)]
        if self._mine(index) is None:
            optimizer.state.pop(parameter, None)
        elif parameter in optimizer.state and self._fitted.get((number, index)) is not optimizer.state[parameter]:
            optimizer.state[parameter] = self._fitting(index, optimizer.state[parameter])

    def _deal(self) -> list[list[ParameterShard]]:
        """Whose share is what: the same on every rank, whatever the order of gradients will be."""
        size, parameters = self._group.size, self.roster.parameters
        sliced: set[int] = set()
        for optimizer in self.roster.optimizers:
            if type(optimizer) in ELEMENTWISE:
                sliced |= {self.roster.index[id(p)] for g in optimizer.param_groups for p in g["params"]}
            elif self._group.rank == 0:
                log.info(
                    "%s is not known to treat elements one by one: it gets whole parameters", type(optimizer).__name__
                )
        tied: dict[int, list[int]] = {}
        for index, parameter in enumerate(parameters):
            tied.setdefault(parameter.untyped_storage().data_ptr(), []).append(index)
        together = {index: members[0] for members in tied.values() if len(members) > 1 for index in members}
        lanes: list[list[ParameterShard]] = [[] for _ in parameters]
        loads = [0] * size
        for index, parameter in enumerate(parameters):
            num_bytes = parameter.numel() * parameter.element_size()
            if index in sliced and index not in together and num_bytes >= CUT_BYTES and is_dense(parameter):
                lanes[index] = even_shards(parameter.numel(), size)
                continue
            first = together.get(index, index)
            owner = lanes[first][0].owner if first < index else loads.index(min(loads))
            loads[owner] += num_bytes
            lanes[index] = [ParameterShard(0, parameter.numel(), owner)]
        return lanes

    def _lanes(self) -> Any:
        return self._lanes_of.__getitem__

    def _mine(self, index: int) -> ParameterShard | None:
        rank = self._group.rank
        return next((lane for lane in self._lanes_of[index] if lane.owner == rank and lane.stop > lane.start), None)

    def _move(self) -> None:
        """Parameters move into memory that all workers see; strides stay, and what shared a storage still does."""
        group, parameters = self._group, self.roster.parameters
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
                    "too little shared memory for the parameters: shares are gathered after each step: %s", problem
                )
            return
        at = 0
        for members, size in zip(storages.values(), sizes, strict=True):
            if size:
                # A storage of its own for each: whoever saves one tensor must not save them all.
                room = torch.from_dlpack(memory.span[at : at + size])
                storage = members[0].untyped_storage()
                if group.rank == 0:
                    room[: storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
                self._rooms.append((room, members))
                _lay(room, members)
                at += size
        self._shared = True
        group.barrier("parameters moved")

    @staticmethod
    def _outside(parameter: torch.nn.Parameter) -> torch.Tensor:
        """The same memory under another version count, so that a user's own write can be told from the optimizer's."""
        return torch.empty(0, dtype=parameter.dtype).set_(
            parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride()
        )

    def unbind(self) -> None:
        if self._shared:
            self._shared = False
            for room, members in self._rooms:
                _lay(room.clone(), members)
            self._rooms.clear()
        self._shares.clear()
        super().unbind()

    # -- the step ----------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._guard.begin()

    def _flat(self, index: int) -> torch.Tensor:
        if index in self._sparse:
            raise HoraError(f"{self.roster.names[index]} has a sparse gradient: use update=replicated")
        return super()._flat(index)

    def _exchange_sparse(self, index: int) -> None:
        raise ValueError(
            f"{self.roster.names[index]} has a sparse gradient, which cannot be cut: use update=replicated"
        )

    def _settle(self, indices: Iterable[int]) -> None:
        self._guard.settle(indices)

    def rescaled(self) -> None:
        self._guard.settle()

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._swapped:
            with self._group.part_of_call():
                raise HoraError(
                    f"{self._group.transport.name_of(self._group.rank)}: the last step() broke off inside the "
                    "optimizer, so this worker's share was not updated while others' were: restore a checkpoint, or "
                    "start again"
                )
        return super().before_step(optimizer)

    def open_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.group is None:
            return
        stepping = {self.roster.index[id(p)] for group in optimizer.param_groups for p in group["params"]}
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
        number = self.roster.optimizers.index(optimizer)
        for group in optimizer.param_groups:
            self._swapped.append(group["params"])
            group["params"] = []
            for parameter in self._swapped[-1]:
                index = self.roster.index[id(parameter)]
                self._fit(number, optimizer, parameter)
                share = self._shares.get(index)
                if share is None:
                    continue
                lane, grad = self._mine(index), parameter.grad
                assert lane is not None
                if grad is None or share.shape == parameter.shape:
                    share.grad = None if grad is None else grad.detach()
                else:
                    share.grad = flatten(grad.detach())[lane.start : lane.stop]
                group["params"].append(share)
                if parameter in optimizer.state:
                    optimizer.state[share] = optimizer.state.pop(parameter)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().after_step(optimizer)
        if self.group is None or not self._swapped:
            return
        number = self.roster.optimizers.index(optimizer)
        for group, parameters in zip(optimizer.param_groups, self._swapped, strict=True):
            group["params"] = parameters
            for parameter in parameters:
                index = self.roster.index[id(parameter)]
                share = self._shares.get(index)
                if share is not None and share in optimizer.state:
                    optimizer.state[parameter] = self._fitted[number, index] = optimizer.state.pop(share)
                if share is not None:
                    share.grad = None
        indices = sorted({self.roster.index[id(p)] for parameters in self._swapped for p in parameters})
        self._swapped = []
        begin, sent = time.perf_counter(), sum(self.group.sent_bytes)
        if self._shared:
            self.group.barrier("after the step")
            for index in indices:
                increment_version(self.roster.parameters[index])
        else:
            self._gather(indices)
            self.traffic.sent_bytes += sum(self.group.sent_bytes) - sent
        self.traffic.spend(begin)
        if spans.on:
            name = "waiting" if self._shared else "exchange"
            spans.add(spans.TRAINING, name, spans.since(begin), what="after the step")
        self._guard.remember()

    def _gather(self, indices: list[int]) -> None:
        """Everybody gets everybody's shares of these parameters, a bucket at a time."""
        key = tuple(indices)
        if key not in self._rounds:
            parameters, limit = self.roster.parameters, self.strategy.bucket_bytes
            self._rounds[key] = plan(indices, parameters, self._lanes(), limit, self._group.size)
        me = self._group.rank
        under_way: collections.deque[tuple[Bucket, TaskHandle]] = collections.deque()
        try:
            for bucket in self._rounds[key]:
                pieces = [flat_view(self.roster.parameters[s.index])[s.start : s.stop]
                          for s in bucket.segments if s.owner == me]  # fmt: skip
                mine = torch.cat(pieces) if pieces else torch.empty(0, dtype=bucket.dtype, device=bucket.device)
                under_way.append((bucket, self._group.all_gather(mine, name="updated shares", wait=False)))
                if len(under_way) > 1:
                    self._spread(*under_way.popleft())
            while under_way:
                self._spread(*under_way.popleft())
        except BaseException:
            for _, parts in under_way:  # what went wrong is told once
                with contextlib.suppress(BaseException):
                    parts.wait()
            raise

    def _spread(self, bucket: Bucket, parts: TaskHandle) -> None:
        """What came of the others' shares goes into the parameters."""
        found = parts.wait()
        for segment in bucket.segments:
            if segment.owner == self._group.rank:
                continue
            at = segment.offset - segment.owner * bucket.stride
            part = found[segment.owner][at : at + segment.stop - segment.start]
            whole = self.roster.parameters[segment.index].detach()
            flat = flat_view(whole)
            flat[segment.start : segment.stop].copy_(part)
            if not is_dense(whole):
                whole.copy_(flat.view(whole.shape))

    def _correct(self, factor: float) -> None:
        for index in self._counted:
            parameter, lane = self.roster.parameters[index], self._mine(index)
            if lane is not None and parameter.grad is not None:
                flatten(parameter.grad.detach())[lane.start : lane.stop].mul_(factor)

    def share_gradients(self) -> None:
        """Nothing to do: each worker has what it applies, and clipping is a call that all make."""

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        if self.group is None:
            return super().clip(parameters, max_norm, norm_type)
        indices = [self.roster.index[id(p)] for p in parameters if id(p) in self.roster.index]
        with self.group.part_of_call():
            self._guard.check_gradients(set(indices))
        shares = []
        for index in indices:
            grad, lane = self.roster.parameters[index].grad, self._mine(index)
            if grad is not None and lane is not None:
                shares.append(flatten(grad.detach())[lane.start : lane.stop])
        norms = [torch.linalg.vector_norm(share, norm_type, dtype=_wide(share.dtype)).double() for share in shares]
        most = norm_type == float("inf")
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        total = (mine.max() if most else (mine**norm_type).sum()).cpu().view(1)
        self.group.all_reduce(total, "max" if most else "sum", name="norm of the gradients")
        norm = total[0] if most else total[0] ** (1.0 / norm_type)
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        if factor < 1.0:
            torch._foreach_mul_(shares, factor)
        self._settle(indices)
        return norm.float()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """Optimizer state of all shares comes together on rank 0; the others' snapshots hold their own share's."""
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
        """Whole states out of everybody's shares."""
        states: list[dict[str, dict[str, Any]]] = [{} for _ in self.roster.optimizers]
        numbers = {name: index for index, name in enumerate(self.roster.names)}
        for rank, (plain, data) in enumerate(parts):
            theirs = checkpoint.decode(plain, checkpoint.parse(data, f"the optimizer state of rank {rank}"))
            for whole, shares in zip(states, theirs, strict=True):
                for name, share in shares.items():
                    self._put(whole.setdefault(name, {}), share, numbers[name], rank)
        return states

    def _put(self, whole: dict[str, Any], share: dict[str, Any], index: int, rank: int) -> None:
        """Rank `rank`'s share of one parameter's state into its place."""
        parameter = self.roster.parameters[index]
        lane = next((lane for lane in self._lanes_of[index] if lane.owner == rank), None)
        start, stop = (lane.start, lane.stop) if lane is not None else (0, parameter.numel())
        put(whole, share, parameter, start, stop)

    def _fitting(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        if self.group is None:
            return state
        lane, parameter = self._mine(index), self.roster.parameters[index]
        if lane is None:
            return {}
        return cut(state, parameter, lane.start, lane.stop)

    def load_states(self, states: list[dict[str, dict[str, Any]]]) -> None:
        super().load_states(states)
        if self.group is not None:
            for optimizer in self.roster.optimizers:  # no state for what is not ours
                for parameter in [p for p, state in optimizer.state.items() if not state]:
                    del optimizer.state[parameter]

    def reload(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], extra: dict[str, torch.Tensor]
    ) -> None:
        if self.group is not None and self._shared:
            self.home.barrier("before the parameters are restored")
        super().reload(parameters, buffers, extra)
        if self.group is not None:
            self.home.barrier("parameters restored")
            self._guard.remember()


def _lay(room: torch.Tensor, members: Iterable[torch.nn.Parameter]) -> None:
    """These parameters, which share a storage, move to this memory: each to its place in it, with its strides."""
    for parameter in members:
        size = parameter.element_size()
        typed = room[: room.numel() // size * size].view(parameter.dtype)
        parameter.data = typed.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
