"""Tensor codec: tensors and text to and from JSON and bytes, with the datatypes of the Open Inference Protocol.

Conversions are exact or an HttpError: an integer may stand for a floating-point number but not the other way round, and
nothing overflows. Text (BYTES) is lists of `str`, nested as the shape says. Sizes are checked before anything is
allocated, and nesting is limited to MAX_RANK.
"""

from __future__ import annotations

import math
import struct
import types
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ..http.errors import HttpError, first_line
from ..net.tensor_bytes import tensor_bytes

DTYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32,
    "INT64": torch.int64, "FP16": torch.float16, "BF16": torch.bfloat16, "FP32": torch.float32, "FP64": torch.float64,
}  # fmt: skip
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
TEXT = "BYTES"
MAX_RANK = 8

Value = torch.Tensor | list[Any]

_LENGTH = struct.Struct("<I")
_CONVERSION_ERRORS = (ValueError, TypeError, RuntimeError, OverflowError)


def datatype_of(value: Value) -> str:
    return DATATYPES[value.dtype] if isinstance(value, torch.Tensor) else TEXT


def decode_json(data: bytes | msgspec.Raw, kind: Any, where: str) -> Any:
    """HttpError, beginning with `where`, for anything that is not of the type `kind`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise HttpError(f"{where} is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(f"{where}: {first_line(error)}") from None


def from_rows(raw: msgspec.Raw, expected: str | None, where: str) -> Value:
    """A JSON list of rows; numbers get the datatype `expected` where the conversion is exact."""
    rank, first = _opening(raw)
    if not 1 <= rank <= MAX_RANK:
        raise HttpError(f"{where} is nested {rank} deep, expected a list of rows with at most {MAX_RANK} dimensions")
    if first == b'"':
        return _decode_list(raw, rank, str, where)
    if first in (b"t", b"f"):
        return _tensor(_decode_list(raw, rank, bool, where), torch.bool, where)
    rows = _decode_list(raw, rank, int | float, where)
    dtype = DTYPES.get(expected or "")
    if dtype is None or dtype is torch.bool or dtype.is_floating_point:
        return _tensor(rows, None if dtype is torch.bool else dtype, where)
    if _tensor(rows, None, where).is_floating_point():
        raise HttpError(f"{where} has floating-point numbers, expected {expected}")
    return _tensor(rows, dtype, where)


def from_json(raw: msgspec.Raw, datatype: str, shape: Sequence[int], where: str) -> Value:
    """One tensor in row-major order, as a flat JSON list or nested as `shape` says."""
    rank, _ = _opening(raw)
    if rank not in (1, len(shape)):
        raise HttpError(f"{where} has data nested {rank} deep, expected a flat list or one nested {len(shape)} deep")
    if datatype == TEXT:
        texts = _decode_list(raw, rank, str, where)
        for _ in range(rank - 1):
            texts = [text for row in texts for text in row]
        return _nested(texts, shape, where)
    dtype = DTYPES[datatype]
    rows = _decode_list(raw, rank, float if dtype.is_floating_point else bool if dtype is torch.bool else int, where)
    if rank == 1:
        _check_count(rows, shape, where)
    tensor = _tensor(rows, dtype, where)
    if rank > 1 and list(tensor.shape) != list(shape):
        raise HttpError(f"{where} has data of shape {list(tensor.shape)}, but its shape field is {list(shape)}")
    return tensor.reshape(list(shape))


def from_bytes(data: memoryview, datatype: str, shape: Sequence[int], where: str) -> Value:
    """One tensor, little-endian, in row-major order; a text is its length in 4 bytes, then UTF-8."""
    if datatype == TEXT:
        return _nested(_texts(data, where), shape, where)
    dtype = DTYPES[datatype]
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise HttpError(f"{where} has {len(data)} bytes, expected {needed} for {datatype} of shape {list(shape)}")
    stored = torch.uint8 if dtype is torch.bool else dtype
    tensor = torch.frombuffer(bytearray(data), dtype=stored).reshape(list(shape))
    return tensor != 0 if dtype is torch.bool else tensor


def to_bytes(value: Value) -> bytes:
    """The inverse of `from_bytes`; text is one flat list."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous()  # it must outlive the view of its bytes
        return bytes(tensor_bytes(value))
    return b"".join(_LENGTH.pack(len(text)) + text for text in (str(text).encode() for text in value))


def to_uniform(value: Value) -> Value:
    """A list from `predict` as a tensor if it is one of numbers; otherwise as a list with one text per row, where other
    rows than texts are written as JSON."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        tensor = torch.tensor(value)
        return torch.tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor
    except _CONVERSION_ERRORS:
        return [row if isinstance(row, str) else msgspec.json.encode(row).decode() for row in value]


def _tensor(rows: list[Any], dtype: torch.dtype | None, where: str) -> torch.Tensor:
    """A tensor of nested lists of numbers; dtype None: float32 if one of them is floating-point, else int64."""
    integral = dtype is not None and not dtype.is_floating_point and dtype is not torch.bool
    try:
        tensor = torch.tensor(rows, dtype=torch.int64 if integral else dtype)
    except _CONVERSION_ERRORS as error:
        raise HttpError(f"{where}: {first_line(error)}") from None
    if dtype is None:
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    if integral and tensor.numel():
        limits = torch.iinfo(dtype)
        low, high = (int(value) for value in tensor.aminmax())
        if low < limits.min or high > limits.max:
            raise HttpError(f"{where} has {low if low < limits.min else high}, which {DATATYPES[dtype]} cannot hold")
    return tensor.to(dtype)


def _opening(raw: msgspec.Raw) -> tuple[int, bytes]:
    """How many lists the JSON opens with, and the first byte of their first element."""
    data = bytes(raw)
    rest = data.lstrip(b" \t\r\n[")
    return data[: len(data) - len(rest)].count(b"["), rest[:1]


def _decode_list(raw: msgspec.Raw, rank: int, leaf: Any, where: str) -> list[Any]:
    nested: Any = leaf
    for _ in range(rank):
        nested = types.GenericAlias(list, (nested,))
    rows: list[Any] = decode_json(raw, nested, where)
    return rows


def _texts(data: memoryview, where: str) -> list[str]:
    texts, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise HttpError(f"{where} ends within the length of a text")
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4 + length
        if at > len(data):
            raise HttpError(f"{where} has a text of {length} bytes that ends {at - len(data)} bytes beyond its data")
        try:
            texts.append(str(data[at - length : at], "utf-8"))
        except UnicodeDecodeError:
            raise HttpError(f"{where} has a text that is not UTF-8; send bytes as base64") from None
    return texts


def _check_count(elements: list[Any], shape: Sequence[int], where: str) -> None:
    if len(elements) != math.prod(shape):
        raise HttpError(f"{where} has {len(elements)} elements, expected {math.prod(shape)} for shape {list(shape)}")


def _nested(flat: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    _check_count(flat, shape, where)
    for size in reversed(shape[1:]):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]
    return flat
