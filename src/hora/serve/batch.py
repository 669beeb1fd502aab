"""A batch of rows: requests are concatenated, the model is called once, and its outputs are split again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..http.errors import HttpError, first_line, quoted
from .signature import named_outputs
from .tensor_codec import DATATYPES, Value

Predict = Callable[[Any, Any], Any]

# What a model or `predict` raises for inputs that it cannot take; any other exception is a failure of its own.
INPUT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


def kind_of(values: Mapping[str, Value]) -> tuple[Any, ...]:
    """Names, dtypes and trailing shapes: values of equal kind can be concatenated."""
    return tuple(
        (name, value.dtype, value.shape[1:]) if isinstance(value, torch.Tensor) else (name,)
        for name, value in sorted(values.items())
    )


def concatenate(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The rows of several values of one kind."""
    if len(parts) == 1:
        return dict(parts[0])
    return {
        name: torch.cat([part[name] for part in parts])  # type: ignore[misc]
        if isinstance(value, torch.Tensor)
        else [row for part in parts for row in part[name]]
        for name, value in parts[0].items()
    }


def slice_rows(values: Mapping[str, Value], start: int, stop: int) -> dict[str, Value]:
    return {name: value[start:stop] for name, value in values.items()}


def run_model(
    models: Sequence[nn.Module], predict: Predict | None, inputs: Mapping[str, Value], rows: int
) -> dict[str, Value]:
    """One forward in eval mode: outputs by name, as CPU tensors and lists with one element per row. HttpError if the
    model or `predict` raises, or gives another number of rows."""
    device = next((parameter.device for parameter in models[0].parameters()), torch.device("cpu"))
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    callee = "the model" if predict is None else "predict"
    for model in models:
        model.eval()
    try:
        with torch.no_grad():  # not inference_mode: a buffer that forward replaces must stay loadable
            if predict is not None:
                argument = moved if len(moved) > 1 else next(iter(moved.values()))
                output = predict(models[0] if len(models) == 1 else [*models], argument)
            else:
                output = models[0](**moved) if len(moved) > 1 else models[0](*moved.values())
            given = {"output": output} if predict is not None and isinstance(output, list) else named_outputs(output)
            outputs = {name: _to_value(name, value) for name, value in given.items()}
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise HttpError(f"not enough memory for this many rows: {first_line(error)}", 503) from error
    except INPUT_ERRORS as error:
        raise HttpError(f"{callee} raised {type(error).__name__}: {first_line(error)}") from error
    if not outputs:
        raise HttpError(f"{callee} returned no outputs", 500)
    for name, value in outputs.items():
        shape = list(value.shape) if isinstance(value, torch.Tensor) else [len(value)]
        if not shape or shape[0] != rows:
            remedy = "it" if predict else "job.prepare(…, predict=fn)"
            raise HttpError(
                f"{callee} returned output {name!r} of shape {shape} for {rows} rows, expected [{rows}, …]: "
                f"{remedy} must return one answer per row", 500
            )  # fmt: skip
    return outputs


def largest_magnitude(values: Mapping[str, Value]) -> float:
    """The largest absolute value in the tensors; 0 without any."""
    numbers = [value.double().abs().max() for value in values.values() if isinstance(value, torch.Tensor)]
    return max(map(float, numbers), default=0.0)


def is_finite(value: Any) -> bool:
    """Whether a tensor, or nested lists and dicts, have neither NaN nor infinity."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, list | dict):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _to_value(name: str, value: Any) -> Value:
    """An output as a CPU tensor with a datatype of the protocol, or as a list of JSON values."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in DATATYPES:
            expected = quoted([*DATATYPES.values()])
            raise HttpError(f"output {name!r} has dtype {value.dtype}, expected one of {expected}", 500)
        return value.detach().cpu().clone()  # it may be a view of a parameter, which the next refresh changes
    rows = _to_json(name, value)
    if not isinstance(rows, list):
        raise HttpError(f"output {name!r} is a {type(value).__name__}, expected a tensor or a list", 500)
    return rows


def _to_json(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(name, element) for element in value]
    if isinstance(value, dict):
        return {str(key): _to_json(name, element) for key, element in value.items()}
    if hasattr(value, "tolist"):  # tensors in lists, and NumPy arrays and scalars, without an import of NumPy
        return _to_json(name, value.tolist())
    raise HttpError(f"output {name!r} has a {type(value).__name__}, expected numbers, text, lists or dicts", 500)
