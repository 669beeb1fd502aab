"""State codec: nested state (what state_dict() returns, and more) to plain data and named tensors, and back.

Plain data is what JSON keeps exactly: None, bool, int, finite float, str, list, and dict with str keys. All else is
{"$": tag, "value": ...}; a tensor becomes its name, which is its path in the tree: `state[0].exp_avg`.
"""

from __future__ import annotations

import base64
import binascii
import collections
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import HoraError

MAX_DEPTH = 100  # below the nesting limits of JSON parsers

_TAG, _VALUE = "$", "value"
_SCALARS = (str, int, float, bytes, type(None))  # allowed as keys and in sets; bool is an int
_MAPPINGS: dict[str, type[dict]] = {
    "dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict,
}  # fmt: skip
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NONFINITE = ("nan", "inf", "-inf")
_RESERVED = "__metadata__"  # by safetensors


def encode(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Plain data and named tensors, which `decode` turns back into the tree.

    Exact for dict, list, tuple, set of scalars, str, int, float, bool, None, bytes, Tensor, torch.Size, torch.dtype,
    Counter and OrderedDict; a defaultdict comes back as a dict, a Parameter as a tensor, an enum of str or int as its
    value. Keys are scalars. ValueError, with path and type, for anything else. Tensors are not copied: save them before
    they change.
    """
    encoder = _Encoder()
    return encoder.encode(tree, "", 0), encoder.tensors


def decode(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that was encoded. `plain` is not trusted: HoraError for anything that `encode` does not write."""
    return _Decoder(tensors).decode(plain, 0)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"the tree has more than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else _tagged("float", repr(float(value)))
        if isinstance(value, Tensor):
            return _tagged("tensor", self._add(value, path))
        if kind is bytes:
            return _tagged("bytes", base64.b64encode(value).decode())
        if kind is torch.dtype:
            return _tagged("dtype", str(value))
        if kind is torch.Size:
            return _tagged("Size", list(value))
        if kind is set:
            # Sorted, so that equal sets give equal bytes: their own order differs between processes.
            return _tagged("set", [self._encode_scalar(each, path + "{}", depth) for each in sorted(value, key=repr)])
        if kind is list or kind is tuple:
            items = [self.encode(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(value)]
            return items if kind is list else _tagged("tuple", items)
        if kind in _MAPPINGS.values() or kind is collections.defaultdict:
            return self._encode_mapping(value, path, depth)
        raise ValueError(f"{path or 'the tree'} has type {kind.__name__}, which a checkpoint cannot hold")

    def _encode_mapping(self, value: dict, path: str, depth: int) -> Any:
        kind = "dict" if type(value) is collections.defaultdict else type(value).__name__
        if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(each, _join(path, key), depth + 1) for key, each in value.items()}
        pairs = []
        for key, each in value.items():
            plain_key = self._encode_scalar(key, f"a key of {path or 'the tree'}", depth)
            pairs.append([plain_key, self.encode(each, _join(path, key), depth + 1)])
        return _tagged(kind, pairs)

    def _encode_scalar(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, _SCALARS):
            raise ValueError(f"{path} has type {type(value).__name__}, which a checkpoint cannot hold")
        return self.encode(value, path, depth)

    def _add(self, tensor: Tensor, path: str) -> str:
        name, number = path or "tensor", 1
        while name in self.tensors or name == _RESERVED:  # keys may contain dots, so two paths may be equal
            number += 1
            name = f"{path}~{number}"
        self.tensors[name] = tensor.detach()
        return name


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def decode(self, plain: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise HoraError(f"a checkpoint's record is nested deeper than {MAX_DEPTH} levels")
        if plain is None or isinstance(plain, bool | int | float | str):
            return plain
        if isinstance(plain, list):
            return [self.decode(each, depth + 1) for each in plain]
        if isinstance(plain, dict) and _TAG not in plain:
            return {key: self.decode(each, depth + 1) for key, each in plain.items()}
        if isinstance(plain, dict) and plain.keys() == {_TAG, _VALUE}:
            tag, value = plain[_TAG], plain[_VALUE]
            if isinstance(tag, str) and isinstance(value, str):
                return self._decode_text(tag, value)
            if isinstance(tag, str) and isinstance(value, list):
                return self._decode_items(tag, value, depth)
        raise _unknown(plain)

    def _decode_text(self, tag: str, value: str) -> Any:
        if tag == "float" and value in _NONFINITE:
            return float(value)
        if tag == "tensor" and value in self._tensors:
            return self._tensors[value]
        if tag == "dtype" and value in _DTYPES:
            return _DTYPES[value]
        if tag == "bytes":
            try:
                return base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise _unknown({tag: value}) from None
        raise _unknown({tag: value})

    def _decode_items(self, tag: str, value: list[Any], depth: int) -> Any:
        if tag == "tuple":
            return tuple(self.decode(each, depth + 1) for each in value)
        if tag == "set":
            return {self._decode_scalar(each, depth) for each in value}
        if tag == "Size" and all(type(each) is int and 0 <= each < 1 << 63 for each in value):
            return torch.Size(value)
        if tag in _MAPPINGS and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            pairs = {self._decode_scalar(key, depth): self.decode(each, depth + 1) for key, each in value}
            return pairs if tag == "dict" else _MAPPINGS[tag](pairs)
        raise _unknown({tag: value})

    def _decode_scalar(self, plain: Any, depth: int) -> Any:
        value = self.decode(plain, depth)
        if not isinstance(value, _SCALARS):
            raise _unknown(plain)
        return value


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, _VALUE: value}


def _unknown(what: Any) -> HoraError:
    return HoraError(f"a checkpoint's record contains {repr(what)[:80]}, which Hora does not write")


def _join(path: str, key: Any) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key
