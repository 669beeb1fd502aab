"""Batch: what is done with rows. Requests are joined, the model is called once, and its outputs are cut up again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..http.errors import HttpError, first_line, quoted
from .signature import named
from .tensor_codec import NAMES, Value

Predict = Callable[[Any, Any], Any]

# What a model or `predict` raises over an input that it does not like; anything else is their own fault.
COMPLAINTS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


def rows_of(inputs: Mapping[str, Value], texts: bool) -> int:
    """How many rows the inputs have. Refused: none, different numbers of them, numbers that are not finite, and
    texts unless they are welcome."""
    counts = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 or value.numel() == 0:
                raise HttpError(f"input {name!r} has shape {list(value.shape)}, expected at least one row")
            if value.dtype not in NAMES:
                raise HttpError(f"input {name!r} has dtype {value.dtype}, expected one of {quoted([*NAMES.values()])}")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise HttpError(f"input {name!r} holds NaN or infinity")
        elif not value:
            raise HttpError(f"input {name!r} has no rows")
        elif not texts:
            raise HttpError(f"input {name!r} holds texts: job.prepare(…, predict=fn) can turn them into tensors")
        counts[name] = len(value)
    if len(set(counts.values())) != 1:
        raise HttpError(
            f"the inputs need the same number of rows, but have {counts}" if counts else "there are no inputs"
        )
    return next(iter(counts.values()))


def kind_of(inputs: Mapping[str, Value]) -> tuple[Any, ...]:
    """Inputs of equal kind can be joined: they agree in names, dtypes and trailing shapes."""
    return tuple(
        (name, value.dtype, value.shape[1:]) if isinstance(value, torch.Tensor) else (name,)
        for name, value in sorted(inputs.items())
    )


def joined(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The rows of several inputs of one kind, one below the other."""
    if len(parts) == 1:
        return dict(parts[0])
    return {
        name: torch.cat([part[name] for part in parts])  # type: ignore[misc]
        if isinstance(value, torch.Tensor)
        else [row for part in parts for row in part[name]]
        for name, value in parts[0].items()
    }


def cut(outputs: Mapping[str, Value], start: int, stop: int) -> dict[str, Value]:
    """Some of the rows."""
    return {name: value[start:stop] for name, value in outputs.items()}


def call(models: Sequence[nn.Module], predict: Predict | None, inputs: Mapping[str, Value]) -> dict[str, Value]:
    """One forward in eval mode: tensors on the CPU and lists, by name. A Refusal if the model or `predict` raises."""
    device = next((parameter.device for parameter in models[0].parameters()), torch.device("cpu"))
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    for model in models:
        model.eval()
    try:
        with torch.no_grad():  # inference's own tensors, as a buffer that forward puts anew, could not be loaded into
            if predict is not None:
                asked = moved if len(moved) > 1 else next(iter(moved.values()))
                output = predict(models[0] if len(models) == 1 else [*models], asked)
            else:
                output = models[0](**moved) if len(moved) > 1 else models[0](*moved.values())
            given = {"output": output} if predict is not None and isinstance(output, list) else named(output)
            return {name: _plain(name, value) for name, value in given.items()}
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise HttpError(f"not enough memory for this many rows: {first_line(error)}", 503) from error
    except COMPLAINTS as error:
        raise HttpError(f"{_who(predict)} raised {type(error).__name__}: {first_line(error)}") from error


def check_rows(outputs: Mapping[str, Value], rows: int, predict: Predict | None) -> None:
    """The first dimension of every output has to be the rows, or nobody could say which answer is whose."""
    if not outputs:
        raise HttpError(f"{_who(predict)} gave no outputs", 500)
    for name, value in outputs.items():
        shape = list(value.shape) if isinstance(value, torch.Tensor) else [len(value)]
        if not shape or shape[0] != rows:
            remedy = "it has" if predict else "job.prepare(…, predict=fn) has"
            raise HttpError(
                f"{_who(predict)} gave output {name!r} of shape {shape} for {rows} rows, expected [{rows}, …]: "
                f"{remedy} to give one answer for each row, whatever their number", 500
            )  # fmt: skip


def magnitude(value: Any) -> float:
    """The largest absolute number among the inputs; 0 where there are none."""
    if isinstance(value, torch.Tensor):
        return float(value.double().abs().max()) if value.numel() and not value.is_complex() else 0.0
    return 0.0


def is_finite(value: Any) -> bool:
    """Whether there is no NaN and no infinity within."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, list):
        return all(map(is_finite, value))
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def _who(predict: Predict | None) -> str:
    return "the model" if predict is None else "predict"


def _plain(name: str, value: Any) -> Value:
    """An output as a tensor of a known datatype on the CPU, or as a list of what JSON can hold."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in NAMES:
            raise HttpError(
                f"output {name!r} has dtype {value.dtype}, expected one of {quoted([*NAMES.values()])}", 500
            )
        return value.detach().cpu().clone()  # it may be a view of a parameter, which changes with the next refresh
    rows = _element(name, value)
    if not isinstance(rows, list):
        raise HttpError(f"output {name!r} is a {type(value).__name__}, expected a tensor or a list", 500)
    return rows


def _element(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_element(name, element) for element in value]
    if isinstance(value, dict):
        return {str(key): _element(name, element) for key, element in value.items()}
    if hasattr(value, "tolist"):  # tensors within lists, and numpy's arrays and numbers, without asking for numpy
        return _element(name, value.tolist())
    raise HttpError(f"output {name!r} holds a {type(value).__name__}, expected numbers, texts, lists or dicts", 500)
