"""ParameterRegistry: the parameters and buffers of the prepared models, by the same names on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from ..collectives import objects
from ..collectives.group import Group
from ..errors import HoraError, Mismatch

CHUNK_BYTES = 64 << 20  # what is broadcast in one go


class ParameterRegistry:
    """Names and tensors, in the models' own order; a tensor with two names (tied weights) is there once, by the first.

    ValueError for models and optimizers that do not belong together.
    """

    def __init__(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.names: list[str] = []
        self.parameters: list[torch.nn.Parameter] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.index: dict[int, int] = {}
        for prefix, model in self._prefixed():
            for name, parameter in model.named_parameters():
                if id(parameter) not in self.index:
                    self.index[id(parameter)] = len(self.parameters)
                    self.names.append(prefix + name)
                    self.parameters.append(parameter)
        self.refresh_buffers()
        self._check()
        self._shape = self._outline()

    def _prefixed(self) -> Iterable[tuple[str, torch.nn.Module]]:
        if len(self.models) == 1:
            return [("", self.models[0])]
        return [(f"model{number}.", model) for number, model in enumerate(self.models)]

    def refresh_buffers(self) -> None:
        """Looks the buffers up again: code may replace one by another tensor."""
        seen: set[int] = set()
        found: dict[str, torch.Tensor] = {}
        for prefix, model in self._prefixed():
            for name, buffer in model.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        self.buffers = found  # at once: another thread may be looking

    def _check(self) -> None:
        if not self.parameters:
            raise ValueError("the model given to job.prepare() has no parameters: there is nothing to train")
        for parameter, name in zip(self.parameters, self.names, strict=True):
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"{name} has no shape yet (a lazy module): run one batch through the model before job.prepare()"
                )
        for name, buffer in self.buffers.items():
            if 0 in buffer.stride() and buffer.numel() > 1:
                raise ValueError(f"buffer {name} is expanded, several names for one place: clone() it before prepare")
        for number, optimizer in enumerate(self.optimizers):
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self.index]
            if strangers:
                which = type(optimizer).__name__ if len(self.optimizers) == 1 else f"optimizer {number}"
                raise ValueError(
                    f"{which} holds a parameter of shape {list(strangers[0].shape)} that is in none of the models "
                    "given to job.prepare(): give it that model too (a list of models is fine), or make the "
                    "optimizer from model.parameters()"
                )

    # -- changes after prepare -------------------------------------------------------------------------------------

    def _outline(self) -> list[tuple[int, int]]:
        """Module by module what belongs to it, by identity: cheap to compare before every forward."""
        self._modules = [module for model in self.models for module in model.modules()]
        return self._trace()

    def _trace(self) -> list[tuple[int, int]]:
        return [(len(m._modules), hash(tuple(map(id, m._parameters.values())))) for m in self._modules]

    def check_unchanged(self) -> None:
        """HoraError names a parameter that the models got after they were prepared."""
        if self._trace() == self._shape:
            return
        for prefix, model in self._prefixed():
            for name, parameter in model.named_parameters():
                if id(parameter) not in self.index:
                    raise HoraError(
                        f"{prefix}{name} {list(parameter.shape)} is new since job.prepare(), so it would not be "
                        "synchronised: complete the model first, then prepare it"
                    )
        self._shape = self._outline()  # something was removed or moved, which does no harm

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The same for a parameter that only the optimizer has got since."""
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self.index:
                    raise HoraError(
                        f"parameter group {number} of {type(optimizer).__name__} has got a parameter of shape "
                        f"{list(parameter.shape)} since job.prepare() that no prepared model has: complete the model "
                        "first, then prepare it"
                    )

    # -- the same on every rank ------------------------------------------------------------------------------------

    def agree(self, group: Group) -> None:
        """Collective. Mismatch, on every rank, names the first parameter or buffer in which a rank differs from rank 0.

        Afterwards all ranks have rank 0's values.
        """
        all_entries = objects.all_gather_objects(group, self.entries(), "models")
        for rank, theirs in enumerate(all_entries):
            for mine, other in itertools.zip_longest(all_entries[0], theirs):
                if mine != other:
                    there, here = _entry(other, mine), _entry(mine, other)
                    raise Mismatch(
                        f"the models differ: {group.transport.name_of(rank)} has {there} where "
                        f"{group.transport.name_of(0)} has {here}. Every worker must build the same model"
                    )
        self.broadcast([*(p.detach() for p in self.parameters), *self.buffers.values()], group)

    def entries(self) -> list[list[object]]:
        """What must be the same everywhere: name, shape and type of every parameter and buffer."""
        entries: list[list[object]] = [
            [name, list(p.shape), _short(p.dtype), list(p.stride()), "trained" if p.requires_grad else "frozen"]
            for name, p in zip(self.names, self.parameters, strict=True)
        ]
        return entries + [[name, list(b.shape), _short(b.dtype)] for name, b in self.buffers.items()]

    @staticmethod
    def broadcast(tensors: Sequence[torch.Tensor], group: Group) -> None:
        """All ranks get rank 0's values; many small tensors are sent together."""
        for flat, pieces in _packed(tensors):
            if group.rank == 0:
                for piece, place in pieces:
                    place.copy_(piece.view(torch.uint8) if piece.dtype is torch.bool else piece)
            group.broadcast(flat, name="rank 0's values")
            if group.rank != 0:
                for piece, place in pieces:
                    with torch.inference_mode(piece.is_inference()), torch.no_grad():
                        piece.copy_(place.to(torch.bool) if piece.dtype is torch.bool else place)

    def parameter_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in zip(self.names, self.parameters, strict=True)}

    def buffer_dict(self) -> dict[str, torch.Tensor]:
        self.refresh_buffers()
        return dict(self.buffers)

    def load(self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        """Copies these values, by name, into the parameters and buffers."""
        with torch.no_grad():
            for name, parameter in zip(self.names, self.parameters, strict=True):
                parameter.copy_(parameters[name])
            for name, buffer in self.buffers.items():
                buffer.copy_(buffers[name])

    def signature(self) -> list[tuple[int, int]]:
        """Changes whenever a buffer does, or is replaced by another tensor."""
        return [(id(buffer), -1 if buffer.is_inference() else buffer._version) for buffer in self.buffers.values()]


def _packed(
    tensors: Sequence[torch.Tensor],
) -> Iterable[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Flat vectors of one dtype and device each, and which stretch of them stands for which tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            dtype = torch.uint8 if tensor.dtype is torch.bool else tensor.dtype
            kinds.setdefault((dtype, tensor.device), []).append(tensor)
    for (dtype, device), members in kinds.items():
        while members:
            num_taken, numel = 0, 0
            while num_taken < len(members) and (numel == 0 or numel * dtype.itemsize < CHUNK_BYTES):
                numel += members[num_taken].numel()
                num_taken += 1
            taken, members = members[:num_taken], members[num_taken:]
            flat = torch.empty(numel, dtype=dtype, device=device)
            places = flat.split([tensor.numel() for tensor in taken])
            yield flat, [(t, place.view(t.shape)) for t, place in zip(taken, places, strict=True)]


def _entry(entry: list[object] | None, against: list[object] | None) -> str:
    """Name, shape and dtype; what else there is to know of it only if that is the difference."""
    if entry is None:
        return "nothing"
    text = f"{entry[0]} {entry[1]} of {entry[2]}"
    if against is not None and entry[:3] == against[:3] and len(entry) > 4:
        text += f" (strides {entry[3]}, {entry[4]})"
    return text


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
