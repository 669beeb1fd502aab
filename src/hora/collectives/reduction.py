"""Reduction operations: which there are, on which dtypes, and how they combine tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Operation:
    """`pair(a, b, out=c)` makes c from a and b. `mean` divides by the number of ranks at the end."""

    name: str
    pair: Callable[..., torch.Tensor]
    mean: bool = False

    def combine(self, target: torch.Tensor, piece: torch.Tensor) -> None:
        """target becomes target ∘ piece, in place."""
        self.pair(target, piece, out=target)

    def finish(self, target: torch.Tensor, num_parts: int) -> None:
        if self.mean and num_parts > 1:
            target.div_(num_parts)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """out = parts[0] ∘ parts[1] ∘ …, in this order; `out` may be one of the parts.

        Half precision is summed in float32 and rounded once.
        """
        if len(parts) == 1:
            if out is not parts[0]:
                out.copy_(parts[0])
        elif out.dtype in HALVES:
            total = parts[0].float()
            for part in parts[1:]:
                self.pair(total, part.float(), out=total)
            self.finish(total, len(parts))
            out.copy_(total)
        elif len(parts) == 2:
            self.pair(parts[0], parts[1], out=out)
            self.finish(out, 2)
        else:
            total = torch.empty_like(out)  # not `out`, which may still have to be read
            self.pair(parts[0], parts[1], out=total)
            for part in parts[2:-1]:
                self.pair(total, part, out=total)
            self.pair(total, parts[-1], out=out)
            self.finish(out, len(parts))


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("sum", torch.add),
        Operation("mean", torch.add, mean=True),
        Operation("prod", torch.mul),
        Operation("min", torch.minimum),
        Operation("max", torch.maximum),
        Operation("and", torch.bitwise_and),
        Operation("or", torch.bitwise_or),
        Operation("xor", torch.bitwise_xor),
    )
}


def operation_for(name: str, dtype: torch.dtype) -> Operation:
    """The operation, if it is defined for that dtype; ValueError says what to do otherwise."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise ValueError(f"unknown operation {name!r}; there are: {', '.join(OPERATIONS)}")
    check_dtype(dtype)
    if dtype.is_floating_point:
        if name in ("and", "or", "xor"):
            raise ValueError(f"{name!r} works on the bits of integers and bools, not on {_short(dtype)}")
    elif name == "mean":
        raise ValueError(f"the mean of {_short(dtype)} would lose its fraction; convert to a float dtype or use 'sum'")
    elif dtype is torch.bool and name in ("sum", "prod"):
        raise ValueError(f"{name!r} of bools is not a bool; use 'or' / 'and', or convert to an integer dtype")
    return operation


def check_tensor(tensor: object) -> None:
    """ValueError, with what to do, for what cannot be communicated."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a torch tensor, got {type(tensor).__name__}: torch.as_tensor(…) makes one")
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"expected a dense tensor with data, got a {kind} one")
    check_dtype(tensor.dtype)


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"unsupported dtype {_short(dtype)}; supported: {', '.join(map(_short, DTYPES))}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
