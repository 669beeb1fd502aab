"""Safetensors files: named tensors to bytes, piece by piece, so that no model is held twice, and back.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, [begin, end) in the data; padded with spaces to a multiple of 8 bytes
    data      the tensors without gaps, the widest dtype first, so that each is aligned

The safetensors library reads it. It does not write it: it rejects tensors that share memory, needs all of them on the
CPU at once, and reports a full disk only as text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

import safetensors.torch
import torch
from torch import Tensor

from ..errors import HoraError

PIECE_BYTES = 4 << 20
HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """The file `name` with these tensors. ValueError for tensors that the format cannot hold; nothing is copied yet."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        for key, tensor in tensors.items():
            self._check(key, tensor)
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
        self._header = self._make_header()

    def check_finite(self, exempt: Collection[str] = ()) -> None:
        """HoraError, with file, tensor and count, if a tensor that is not `exempt` has values that are not finite."""
        for key, tensor in self._tensors.items():
            if not tensor.is_floating_point() or key in exempt:
                continue
            values = tensor.detach()
            if values.itemsize == 1:
                values = values.float()  # torch.isfinite does not support float8
            num_bad = values.numel() - int(torch.isfinite(values).sum())
            if num_bad:
                raise HoraError(
                    f"no checkpoint was written: {num_bad} of {values.numel()} values of {key!r} in {self.name} are "
                    "not finite; older checkpoints are untouched"
                )

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, in order. A piece is valid until the next one is requested."""
        yield memoryview(self._header)
        memory = bytearray(PIECE_BYTES)
        view, buffer = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
        for tensor in self._tensors.values():
            raw = tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for piece in raw.split(PIECE_BYTES) if raw.numel() else ():
                buffer[: piece.numel()].copy_(piece)
                yield view[: piece.numel()]

    def _check(self, key: str, tensor: Tensor) -> None:
        where = f"{key!r} in {self.name}"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where} has type {type(tensor).__name__}, expected a tensor; encode() separates them")
        if key == "__metadata__":
            raise ValueError(f"{self.name}: the tensor name {key!r} is reserved by safetensors")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{where} has dtype {tensor.dtype}, which safetensors does not support")
        if tensor.layout is not torch.strided or tensor.is_meta:
            what = "is on the meta device" if tensor.is_meta else f"has layout {tensor.layout}"
            raise ValueError(f"{where} {what}; a checkpoint holds dense tensors only")

    def _make_header(self) -> bytes:
        entries, begin = {}, 0
        for key, tensor in self._tensors.items():
            end = begin + tensor.numel() * tensor.itemsize
            entries[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > HEADER_LIMIT_BYTES:
            raise ValueError(f"{self.name}: the header has {len(text)} bytes; the limit is {HEADER_LIMIT_BYTES}")
        return len(text).to_bytes(8, "little") + text


def parse(data: bytes, what: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU, without shared memory. HoraError, naming `what`, if it is invalid.

    This `load` is the safetensors library's, not pickle's: it reads names, dtypes, shapes and raw bytes, and nothing
    in them is executed.
    """
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # the library raises its own class, KeyError or AssertionError
        raise HoraError(f"{what} is not a safetensors file ({error})") from error
