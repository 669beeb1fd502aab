"""Tree: a nest of state (what state_dict() returns, and more) as plain data and named tensors, and back.

Plain data is what JSON keeps exactly: None, bool, int, finite float, str, list, and dict with keys of str. Everything
else becomes {"$": tag, "value": ...}; a tensor becomes its name, which is its place in the tree: `state[0].exp_avg`.
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

MAX_DEPTH = 100  # JSON's readers give up somewhere above; what was written must be readable

_TAG, _VALUE = "$", "value"
_SCALARS = (str, int, float, bytes, type(None))  # and bool, which is an int: what keys and elements of sets may be
_MAPPINGS: dict[str, type[dict]] = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NONFINITE = ("nan", "inf", "-inf")
_RESERVED = "__metadata__"  # a name that safetensors keeps for itself


def encode(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Plain data and named tensors, of which `decode` makes the tree again.

    Holds dict, list, tuple, set of scalars, str, int, float, bool, None, bytes, Tensor, torch.Size, torch.dtype,
    Counter and OrderedDict exactly; a defaultdict comes back as a dict, a Parameter as a tensor, an enum of str or int
    as its value. Keys are scalars. Anything else is a ValueError that names its place and type. Tensors are not copied:
    save them before they change.
    """
    encoder = _Encoder()
    return encoder.plain(tree, "", 0), encoder.tensors


def decode(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `encode` took apart. `plain` may be hostile: what `encode` does not write is a HoraError."""
    return _Decoder(tensors).tree(plain, 0)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def plain(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"a tree of more than {MAX_DEPTH} levels, or one that contains itself, fits no checkpoint")
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
            return _tagged("tensor", self._keep(value, path))
        if kind is bytes:
            return _tagged("bytes", base64.b64encode(value).decode())
        if kind is torch.dtype:
            return _tagged("dtype", str(value))
        if kind is torch.Size:
            return _tagged("Size", list(value))
        if kind is set:
            # Sorted, so that equal sets give equal bytes: their own order changes from process to process.
            return _tagged("set", [self._scalar(each, path + "{}", depth) for each in sorted(value, key=repr)])
        if kind is list or kind is tuple:
            items = [self.plain(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(value)]
            return items if kind is list else _tagged("tuple", items)
        if kind in _MAPPINGS.values() or kind is collections.defaultdict:
            return self._mapping(value, path, depth)
        raise ValueError(f"{_place(path)} is {_a(kind)}, which a checkpoint cannot hold")

    def _mapping(self, value: dict, path: str, depth: int) -> Any:
        kind = "dict" if type(value) is collections.defaultdict else type(value).__name__
        if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
            return {key: self.plain(each, _below(path, key), depth + 1) for key, each in value.items()}
        pairs = []
        for key, each in value.items():
            if not isinstance(key, _SCALARS):
                raise ValueError(f"{_place(path)} has {_a(type(key))} as a key, which a checkpoint cannot hold")
            pairs.append([self._scalar(key, path, depth), self.plain(each, _below(path, key), depth + 1)])
        return _tagged(kind, pairs)

    def _scalar(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, _SCALARS):
            raise ValueError(f"{_place(path)} is {_a(type(value))}, which a checkpoint cannot hold")
        return self.plain(value, path, depth)

    def _keep(self, tensor: Tensor, path: str) -> str:
        name, number = path or "tensor", 1
        while name in self.tensors or name == _RESERVED:  # keys may hold dots, so two places may read alike
            number += 1
            name = f"{path}~{number}"
        self.tensors[name] = tensor.detach()
        return name


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tree(self, plain: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise HoraError(f"a checkpoint's record is nested deeper than {MAX_DEPTH} levels")
        if plain is None or isinstance(plain, bool | int | float | str):
            return plain
        if isinstance(plain, list):
            return [self.tree(each, depth + 1) for each in plain]
        if not isinstance(plain, dict):
            raise _unknown(plain)
        if _TAG not in plain:
            return {key: self.tree(each, depth + 1) for key, each in plain.items()}
        if plain.keys() != {_TAG, _VALUE} or not isinstance(plain[_TAG], str):
            raise _unknown(plain)
        return self._tagged(plain[_TAG], plain[_VALUE], depth)

    def _tagged(self, tag: str, value: Any, depth: int) -> Any:
        if isinstance(value, str):
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
        if isinstance(value, list):
            if tag == "tuple":
                return tuple(self.tree(each, depth + 1) for each in value)
            if tag == "set":
                return {self._scalar(each, depth) for each in value}
            if tag == "Size" and all(type(each) is int and 0 <= each < 1 << 63 for each in value):
                return torch.Size(value)
            if tag in _MAPPINGS and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
                pairs = {self._scalar(key, depth): self.tree(each, depth + 1) for key, each in value}
                return pairs if tag == "dict" else _MAPPINGS[tag](pairs)
        raise _unknown({tag: value})

    def _scalar(self, plain: Any, depth: int) -> Any:
        value = self.tree(plain, depth)
        if not isinstance(value, _SCALARS):
            raise _unknown(plain)
        return value


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, _VALUE: value}


def _unknown(what: Any) -> HoraError:
    return HoraError(f"a checkpoint's record holds {repr(what)[:80]}, which Hora does not write")


def _below(path: str, key: Any) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _place(path: str) -> str:
    return path or "the tree"


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"
