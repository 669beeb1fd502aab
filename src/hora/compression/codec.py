"""Codecs: a float32 vector in fewer bytes, and back.

For n elements, with B = ceil(n / 1024) blocks and k = ceil(topk · n):

    fp32    4n          unchanged
    fp16    2n + 4B     each block of 1024 is scaled by a power of two so that its largest value fits: nothing
                        overflows, and a block of tiny values keeps 11 bits
    bf16    2n          float32's range, 8 bits
    int8    n + 4B      each block of 1024 in steps of a 127th of its largest value
    topk    8k          the k largest by magnitude: their indices (int32), then their values (float32)

A value that is not finite decodes to one that is not finite, though perhaps with its whole block.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from .names import check_name, check_share

BLOCK = 1024  # elements of fp16 and int8 that share a scale

_LOWEST = torch.finfo(torch.float32).tiny
_HIGHEST = torch.finfo(torch.float32).max / 127.0 * (1.0 - 2.0**-20)  # 127 of these are still finite
_BELOW = 2.0**15 - 2.0**4  # the last of float16 below 2**15
_BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


class Codec(Protocol):
    """Stateless and thread-safe; the same bytes for the same vector. Vectors are one-dimensional, on the CPU."""

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        """The float32 vector in `num_bytes` of uint8, which may share its memory."""

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """The float32 vector of `numel` elements that was encoded, which may share the data's memory. ValueError for
        data that no vector of this length has."""

    def add(self, data: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the vector that was encoded to `total`, in place. ValueError as for `decode`."""

    def num_bytes(self, numel: int) -> int:
        """The size of an encoded vector of `numel` elements."""


def make_codec(name: str, topk: float = 0.01) -> Codec:
    """`topk` is the share of elements that topk keeps."""
    check_name(name)
    if name == "topk":
        return TopK(topk)
    dense: dict[str, type[Codec]] = {"fp32": Float32, "fp16": Float16, "bf16": BFloat16, "int8": Int8}
    return dense[name]()


class _Dense:
    """A codec that encodes every element, in `dtype`."""

    name = ""
    dtype = torch.float32

    def num_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        _check_size(data, self.num_bytes(numel), numel, self.name)
        return _view(data, self.dtype).float()

    def add(self, data: torch.Tensor, total: torch.Tensor) -> None:
        total += self.decode(data, len(total))


class Float32(_Dense):
    name = "fp32"

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.contiguous().view(torch.uint8)


class BFloat16(_Dense):
    name, dtype = "bf16", torch.bfloat16

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        codes = vector.to(torch.bfloat16)
        if len(vector) and max(map(abs, map(float, vector.aminmax()))) > _BFLOAT16_MAX:
            # Rounded up, the largest of all floats would be infinite.
            codes = torch.where(vector.isfinite(), codes.clamp(-_BFLOAT16_MAX, _BFLOAT16_MAX), codes)
        return codes.view(torch.uint8)


class _BlockScaled(_Dense):
    """Scales of all blocks as float32, then the codes."""

    def _quantize(self, blocks: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and the codes of each block, of which `largest` is the largest magnitude."""
        raise NotImplementedError

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        blocks = torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
        scales, codes = self._quantize(blocks, blocks.abs().amax(1))
        return torch.cat([scales.view(torch.uint8), codes.view(-1)[: len(vector)].view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        _check_size(data, self.num_bytes(numel), numel, self.name)
        scale_bytes = 4 * -(-numel // BLOCK)
        vector, scales = _view(data[scale_bytes:], self.dtype).float(), _view(data[:scale_bytes])
        whole = numel // BLOCK * BLOCK
        vector[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
        if whole < numel:
            vector[whole:].mul_(scales[-1])
        return vector

    def num_bytes(self, numel: int) -> int:
        return super().num_bytes(numel) + 4 * -(-numel // BLOCK)


class Float16(_BlockScaled):
    name, dtype = "fp16", torch.float16

    def _quantize(self, blocks: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.frexp(largest).exponent.sub_(15).clamp_(min=-126)  # the largest becomes 2**14 to 2**15
        scales = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponents), torch.nan)
        codes = blocks.div(scales[:, None]).to(torch.float16)
        if bool((exponents == 113).any()):  # rounded up, the largest of all floats would be infinite
            codes = codes.clamp(-_BELOW, _BELOW)
        return scales, codes


class Int8(_BlockScaled):
    name, dtype = "int8", torch.int8

    def _quantize(self, blocks: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.where(largest.isfinite(), largest.div(127.0).clamp_(_LOWEST, _HIGHEST), torch.nan)
        return scales, blocks.div(scales[:, None]).round_().to(torch.int8)


class TopK:
    """`share` of the elements, at least one."""

    def __init__(self, share: float) -> None:
        check_share(share)
        self.share = share

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        count = self._num_kept(len(vector))
        indices = vector.abs().topk(count, sorted=False).indices.sort().values
        return torch.cat([indices.to(torch.int32).view(torch.uint8), vector[indices].view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        vector = torch.zeros(numel)
        self.add(data, vector)
        return vector

    def add(self, data: torch.Tensor, total: torch.Tensor) -> None:
        numel = len(total)
        _check_size(data, self.num_bytes(numel), numel, "topk")
        count = self._num_kept(numel)
        indices = _view(data[: 4 * count], torch.int32).long()
        if count and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
            raise ValueError(f"topk data has indices outside of a vector of {numel} elements")
        total.index_add_(0, indices, _view(data[4 * count :]))

    def num_bytes(self, numel: int) -> int:
        return 8 * self._num_kept(numel)

    def _num_kept(self, numel: int) -> int:
        return min(numel, math.ceil(self.share * numel))


def _view(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The bytes as numbers: a copy where they are not aligned."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data.contiguous()).view(dtype)


def _check_size(data: torch.Tensor, expected: int, numel: int, name: str) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != expected:
        got = f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
        raise ValueError(f"{numel} elements of {name} are uint8 [{expected}], not {got}")
