"""Model signature: names, datatypes and shapes of a model's inputs and outputs, and the check of a request's inputs.

Names and datatypes are those of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..http.errors import HttpError, quoted
from .tensor_codec import DATATYPES, Value, datatype_of


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output. -1 in `shape` is any size; the first dimension is the rows."""

    name: str
    datatype: str
    shape: list[int]


class Signature(msgspec.Struct, frozen=True):
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


def named_outputs(output: Any) -> dict[str, Any]:
    """A model's output by name: one value is 'output', the elements of a tuple or list are 'output_0', 'output_1', …"""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple | list):
        return {f"output_{number}": value for number, value in enumerate(output)}
    return {"output": output}


def signature_of(names: Sequence[str], args: Sequence[Any], output: Any) -> Signature | None:
    """The signature of a model that was called with `args` under `names`. None if a value is not a tensor with rows, or
    has a dtype without a name in the protocol."""
    outputs = named_outputs(output)
    if len(names) != len(args) or not names or not outputs:
        return None
    specs = []
    for name, value in (*zip(names, args, strict=True), *outputs.items()):
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.dtype not in DATATYPES:
            return None
        specs.append(TensorSpec(str(name), DATATYPES[value.dtype], [-1, *value.shape[1:]]))
    return Signature(specs[: len(names)], specs[len(names) :])


def count_rows(inputs: Mapping[str, Value], allow_text: bool) -> int:
    """The rows that all inputs have. HttpError for no rows, different numbers of rows, values that are not finite, and
    text unless it is allowed."""
    if not inputs:
        raise HttpError("the request has no inputs")
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            if not value:
                raise HttpError(f"input {name!r} has no rows")
            if not allow_text:
                raise HttpError(f"input {name!r} is text; job.prepare(…, predict=fn) can turn text into tensors")
            continue
        if value.dim() == 0 or value.numel() == 0:
            raise HttpError(f"input {name!r} has shape {list(value.shape)}, expected at least one row")
        if value.dtype not in DATATYPES:
            raise HttpError(f"input {name!r} has dtype {value.dtype}, expected one of {quoted([*DATATYPES.values()])}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise HttpError(f"input {name!r} has NaN or infinite values")
    counts = {name: len(value) for name, value in inputs.items()}
    if len(set(counts.values())) != 1:
        raise HttpError(f"all inputs need the same number of rows, got {counts}")
    return next(iter(counts.values()))


def check_inputs(signature: Signature, inputs: Mapping[str, Value]) -> None:
    """HttpError for other names, datatypes or shapes than those of the signature.

    Trailing dimensions of integers may differ: they are often sequence lengths, and the model decides."""
    specs = {spec.name: spec for spec in signature.inputs}
    if set(specs) != set(inputs):
        raise HttpError(f"the inputs are named {quoted(inputs)}, expected {quoted(specs)}")
    for name, value in inputs.items():
        spec = specs[name]
        if datatype_of(value) != spec.datatype:
            raise HttpError(f"input {name!r} has datatype {datatype_of(value)}, expected {spec.datatype}")
        if not isinstance(value, torch.Tensor):
            continue
        same_rank = value.dim() == len(spec.shape)
        if not same_rank or not (
            "INT" in spec.datatype or all(want in (-1, got) for got, want in zip(value.shape, spec.shape, strict=True))
        ):
            hint = "; put a single row into a list" if value.dim() == len(spec.shape) - 1 else ""
            raise HttpError(f"input {name!r} has shape {list(value.shape)}, expected {spec.shape}{hint}")
