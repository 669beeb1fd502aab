"""Signature: what a model takes and gives, under the names and datatypes of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..http.errors import HttpError, quoted
from .tensor_codec import NAMES, Value, datatype_of


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output. -1 in `shape` is any size; the first dimension is the rows."""

    name: str
    datatype: str
    shape: list[int]


class Signature(msgspec.Struct, frozen=True):
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


def named(output: Any) -> dict[str, Any]:
    """What a model gave, by name: a lone value is 'output', those of a tuple or a list 'output_0', 'output_1', …"""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple | list):
        return {f"output_{number}": value for number, value in enumerate(output)}
    return {"output": output}


def signature_of(names: Sequence[str], args: Sequence[Any], output: Any) -> Signature | None:
    """The signature of a model that was called with `args` under `names` and gave `output`. None if something is no
    tensor with rows, or of a datatype that the protocol has no name for."""
    if len(names) != len(args):
        return None
    inputs = [_spec(name, value) for name, value in zip(names, args, strict=True)]
    outputs = [_spec(name, value) for name, value in named(output).items()]
    known = [spec for spec in (*inputs, *outputs) if spec is not None]
    if not inputs or not outputs or len(known) < len(inputs) + len(outputs):
        return None
    return Signature(known[: len(inputs)], known[len(inputs) :])


def check(signature: Signature, inputs: Mapping[str, Value]) -> None:
    """Refuse what the model does not take: other names, datatypes or shapes, said as what came and what is expected.

    The trailing dimensions of integers may differ from what the training has shown: lengths of sequences do, and the
    model is the judge of that. Those of floating numbers may not."""
    specs = {spec.name: spec for spec in signature.inputs}
    if set(specs) != set(inputs):
        raise HttpError(f"the inputs are named {quoted(inputs)}, expected {quoted(specs)}")
    for name, value in inputs.items():
        spec = specs[name]
        if datatype_of(value) != spec.datatype:
            raise HttpError(f"input {name!r} has datatype {datatype_of(value)}, expected {spec.datatype}")
        if isinstance(value, torch.Tensor) and not _agrees(list(value.shape), spec):
            hint = "; one row is a list that holds it" if value.dim() == len(spec.shape) - 1 else ""
            raise HttpError(f"input {name!r} has shape {list(value.shape)}, expected {spec.shape}{hint}")


def _agrees(shape: list[int], spec: TensorSpec) -> bool:
    if len(shape) != len(spec.shape):
        return False
    return "INT" in spec.datatype or all(want in (-1, got) for got, want in zip(shape, spec.shape, strict=True))


def _spec(name: str, value: Any) -> TensorSpec | None:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.dtype not in NAMES:
        return None
    return TensorSpec(str(name), NAMES[value.dtype], [-1, *value.shape[1:]])
