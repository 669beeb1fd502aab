"""Elements: tensors and texts to and from JSON and bytes, under the datatypes of the Open Inference Protocol.

A tensor's elements are what its datatype says, or the request is refused: an integer may stand for a floating number,
never the other way, and nothing wraps around. Texts (BYTES) are lists of `str`, nested as their shape says. Sizes are
compared before anything is made of them, and nothing here is deeper than MAX_RANK.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
import types
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ..http.errors import HttpError, first_line

DTYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32,
    "INT64": torch.int64, "FP16": torch.float16, "BF16": torch.bfloat16, "FP32": torch.float32, "FP64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TEXT = "BYTES"
MAX_RANK = 8

Value = torch.Tensor | list[Any]

_OPENING = re.compile(rb"[\s\[]*")
_LENGTH = struct.Struct("<I")


def datatype_of(value: Value) -> str:
    """The protocol's name for the elements of `value`."""
    return NAMES[value.dtype] if isinstance(value, torch.Tensor) else TEXT


def decoded(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any], where: str) -> Any:
    """What the JSON says, if it is of the decoder's type; `where` begins the sentence otherwise."""
    try:
        return decoder.decode(data)
    except RecursionError:
        raise HttpError(f"{where} is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(f"{where}: {first_line(error)}") from None


def tensor_of(rows: list[Any], dtype: torch.dtype | None, where: str) -> torch.Tensor:
    """Nested lists of numbers as a tensor; None: float32 if one of them is floating, else int64."""
    whole = dtype is not None and not dtype.is_floating_point and dtype is not torch.bool
    try:
        tensor = torch.tensor(rows, dtype=torch.int64 if whole else dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise HttpError(f"{where}: {first_line(error)}") from None
    if dtype is None:
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    if whole and tensor.numel():
        span = torch.iinfo(dtype)
        low, high = (int(value) for value in tensor.aminmax())
        if low < span.min or high > span.max:
            raise HttpError(f"{where} holds {low if low < span.min else high}, which {NAMES[dtype]} cannot hold")
    return tensor.to(dtype)


def from_rows(raw: msgspec.Raw, expected: str | None, where: str) -> Value:
    """A JSON list of rows; numbers become `expected` where nothing is lost by it."""
    rank, first = _opening(raw)
    if not 1 <= rank <= MAX_RANK:
        raise HttpError(f"{where} is nested {rank} deep, expected a list of rows with at most {MAX_RANK} dimensions")
    if first == b'"':
        return _list(raw, rank, str, where)
    if first in (b"t", b"f"):
        return tensor_of(_list(raw, rank, bool, where), torch.bool, where)
    rows = _list(raw, rank, int | float, where)
    dtype = DTYPES.get(expected or "")
    if dtype is None or dtype is torch.bool or dtype.is_floating_point:
        return tensor_of(rows, None if dtype is torch.bool else dtype, where)
    if tensor_of(rows, None, where).is_floating_point():
        raise HttpError(f"{where} holds floating numbers, expected {expected}")
    return tensor_of(rows, dtype, where)


def from_json(raw: msgspec.Raw, datatype: str, shape: Sequence[int], where: str) -> Value:
    """The elements of one tensor, row by row: as one flat JSON list, or nested as `shape` says."""
    rank, _ = _opening(raw)
    if rank not in (1, len(shape)):
        raise HttpError(f"{where} has data nested {rank} deep, expected a flat list or one nested {len(shape)} deep")
    if datatype == TEXT:
        texts = _list(raw, rank, str, where)
        for _ in range(rank - 1):
            texts = [text for row in texts for text in row]
        return _nested(_counted(texts, shape, where), shape)
    dtype = DTYPES[datatype]
    rows = _list(raw, rank, float if dtype.is_floating_point else bool if dtype is torch.bool else int, where)
    if rank == 1:
        _counted(rows, shape, where)
    tensor = tensor_of(rows, dtype, where)
    if rank > 1 and list(tensor.shape) != list(shape):
        raise HttpError(f"{where} has data of shape {list(tensor.shape)}, but says {list(shape)}")
    return tensor.reshape(list(shape))


def from_bytes(data: memoryview, datatype: str, shape: Sequence[int], where: str) -> Value:
    """The elements of one tensor, little-endian, row by row; a text is its length in 4 bytes, then UTF-8."""
    if datatype == TEXT:
        return _nested(_counted(_texts(data, where), shape, where), shape)
    dtype = DTYPES[datatype]
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise HttpError(f"{where} has {len(data)} bytes, expected {needed} for {datatype} of shape {list(shape)}")
    stored = torch.uint8 if dtype is torch.bool else dtype
    tensor = torch.frombuffer(bytearray(data), dtype=stored).reshape(list(shape))
    return tensor != 0 if dtype is torch.bool else tensor


def to_bytes(value: Value) -> bytes:
    """`from_bytes` backwards; texts come as one flat list."""
    if not isinstance(value, torch.Tensor):
        return b"".join(_LENGTH.pack(len(text)) + text for text in (str(text).encode() for text in value))
    value = value.contiguous()
    return ctypes.string_at(value.data_ptr(), value.nbytes) if value.numel() else b""


def uniform(value: Value) -> Value:
    """A list that `predict` answered, as a tensor if it is one of numbers; else a flat list of texts, one for each
    row: a row that is no text is written as JSON."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        tensor = torch.tensor(value)
        return torch.tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return [row if isinstance(row, str) else msgspec.json.encode(row).decode() for row in value]


def _opening(raw: msgspec.Raw) -> tuple[int, bytes]:
    """How many lists the JSON opens with, and the first byte of their first element."""
    data = bytes(raw)
    match = _OPENING.match(data)
    assert match is not None
    return match.group().count(b"["), data[match.end() : match.end() + 1]


@functools.cache
def _decoder(rank: int, leaf: Any) -> msgspec.json.Decoder[Any]:
    kind: Any = leaf
    for _ in range(rank):
        kind = types.GenericAlias(list, (kind,))
    return msgspec.json.Decoder(kind)


def _list(raw: msgspec.Raw, rank: int, leaf: Any, where: str) -> list[Any]:
    rows: list[Any] = decoded(raw, _decoder(rank, leaf), where)
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
            raise HttpError(f"{where} has a text that is not UTF-8; bytes can be sent as base64") from None
    return texts


def _counted(elements: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    if len(elements) != math.prod(shape):
        raise HttpError(f"{where} has {len(elements)} elements, expected {math.prod(shape)} for shape {list(shape)}")
    return elements


def _nested(flat: list[Any], shape: Sequence[int]) -> list[Any]:
    for size in reversed(shape[1:]):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]
    return flat
