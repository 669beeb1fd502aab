"""TensorFile: named tensors as the bytes of a safetensors file, piece by piece, so that no model is held twice.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, [begin, end) in the data; padded with spaces to a multiple of 8 bytes
    data      the tensors without gaps, the widest dtype first, so that each is aligned

The safetensors library reads it. It is not asked to write it: it refuses tensors that share memory, wants all of them
on the CPU at once, and tells of a full disk only in words.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

import safetensors.torch
import torch
from torch import Tensor

from ..errors import HoraError

PIECE_BYTES = 4 << 20
HEADER_LIMIT_BYTES = 100_000_000  # the library reads no longer one

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """What is to be written as `name`. ValueError for tensors that the format cannot hold; nothing is copied yet."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        for key, tensor in tensors.items():
            self._check(key, tensor)
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
        self._header = self._make_header()

    def check_finite(self, but: Collection[str] = ()) -> None:
        """HoraError names file, tensor and how many values, if one that is not in `but` is infinite or not a number."""
        for key, tensor in self._tensors.items():
            if not tensor.is_floating_point() or key in but:
                continue
            values = tensor.detach()
            if values.itemsize == 1:
                values = values.float()  # torch does not ask float8 whether it is finite
            num_all, num_finite = values.numel(), int(torch.isfinite(values).sum())
            if num_finite != num_all:
                raise HoraError(
                    f"no checkpoint was written: {num_all - num_finite} of {num_all} values of {key!r} in {self.name} "
                    "are not finite; older checkpoints are untouched"
                )

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, in order. A piece is valid until the next one is asked for."""
        yield memoryview(self._header)
        staging = bytearray(PIECE_BYTES)
        window, landing = memoryview(staging), torch.frombuffer(staging, dtype=torch.uint8)
        for tensor in self._tensors.values():
            raw = tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for piece in raw.split(PIECE_BYTES) if raw.numel() else ():
                landing[: piece.numel()].copy_(piece)
                yield window[: piece.numel()]

    def _check(self, key: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{key!r} in {self.name} is a {type(tensor).__name__}, not a tensor; encode() takes those apart"
            )
        if key == "__metadata__":
            raise ValueError(f"{self.name}: no tensor may be called {key!r}, which safetensors keeps for itself")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{key!r} in {self.name} is of {tensor.dtype}, which safetensors cannot hold")
        if tensor.layout is not torch.strided or tensor.is_meta:
            what = "has no values" if tensor.is_meta else f"is {tensor.layout}"
            raise ValueError(f"{key!r} in {self.name} {what}; a checkpoint holds dense tensors only")

    def _make_header(self) -> bytes:
        described, begin = {}, 0
        for key, tensor in self._tensors.items():
            end = begin + tensor.numel() * tensor.itemsize
            described[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > HEADER_LIMIT_BYTES:
            raise ValueError(
                f"{self.name}: names and shapes take {len(text)} bytes, the format allows {HEADER_LIMIT_BYTES}"
            )
        return len(text).to_bytes(8, "little") + text


def parse(data: bytes, what: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU, each in memory of its own. HoraError if `what` is none.

    This `load` is the safetensors library's, not pickle's: it reads names, dtypes, shapes and raw bytes, and nothing
    in them is executed.
    """
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # the library's own class, KeyError, AssertionError: all mean the same
        raise HoraError(f"{what} is no safetensors file ({error})") from error
