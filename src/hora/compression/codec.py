"""Codec: a vector of float32 in fewer bytes than it has, and back.

For n elements, with B = ceil(n / 1024) blocks and k = ceil(topk · n):

    fp32    4n          as it is
    fp16    2n + 4B     each block of 1024 is scaled by a power of two so that its largest value fits: nothing becomes
                        infinite, and what is tiny everywhere keeps its 11 bits
    bf16    2n          float32's range, 8 bits
    int8    n + 4B      each block of 1024 in steps of a 127th of its largest value
    topk    8k          the k largest by magnitude: where they are (int32), then what they are (float32)

What is not finite stays not finite in what is decoded, though perhaps for its whole block.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from .names import NAMES, check_name, check_share

__all__ = ["BLOCK", "NAMES", "Codec", "check_name", "check_share", "make_codec"]

BLOCK = 1024  # elements of fp16 and int8 that share a scale

_LOWEST = torch.finfo(torch.float32).tiny
_HIGHEST = torch.finfo(torch.float32).max / 127.0 * (1.0 - 2.0**-20)  # 127 of these are still finite
_BELOW = 2.0**15 - 2.0**4  # the last of float16 below 2**15
_BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


class Codec(Protocol):
    """Stateless: for any thread, and the same bytes for the same vector. Vectors have one dimension, on the CPU."""

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        """The float32 vector in `num_bytes` of uint8, which may share its memory."""

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """The float32 vector of `numel` elements that was encoded; it may share the data's memory. ValueError for data
        that no vector of this length has."""

    def add(self, data: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the vector that was encoded to `total`, in place. ValueError as for `decode`."""

    def num_bytes(self, numel: int) -> int:
        """How many bytes `encode` gives for a vector of `numel` elements."""


def make_codec(name: str, topk: float = 0.01) -> Codec:
    """The codec of this name; `topk` is the share of elements that topk keeps."""
    check_name(name)
    if name == "topk":
        return TopK(topk)
    dense: dict[str, type[Codec]] = {"fp32": Float32, "fp16": Float16, "bf16": BFloat16, "int8": Int8}
    return dense[name]()


class _Dense:
    """What codecs have in common that say something about every element."""

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        raise NotImplementedError  # each of them says how

    def add(self, data: torch.Tensor, total: torch.Tensor) -> None:
        total += self.decode(data, len(total))


class Float32(_Dense):
    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        _check_size(data, self.num_bytes(numel), numel, "fp32")
        return _view(data, torch.float32)

    def num_bytes(self, numel: int) -> int:
        return 4 * numel


class BFloat16(_Dense):
    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        codes = vector.to(torch.bfloat16)
        if len(vector) and max(map(abs, map(float, vector.aminmax()))) > _BFLOAT16_MAX:
            # Rounded up, the largest of all floats would be infinite.
            codes = torch.where(vector.isfinite(), codes.clamp(-_BFLOAT16_MAX, _BFLOAT16_MAX), codes)
        return codes.view(torch.uint8)

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        _check_size(data, self.num_bytes(numel), numel, "bf16")
        return _view(data, torch.bfloat16).float()

    def num_bytes(self, numel: int) -> int:
        return 2 * numel


class Float16(_Dense):
    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        blocks = _blocks(vector)
        largest = blocks.abs().amax(1)
        exponents = torch.frexp(largest).exponent.sub_(15).clamp_(min=-126)  # the largest becomes 2**14 to 2**15
        scales = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponents), torch.nan)
        codes = blocks.div(scales[:, None]).to(torch.float16)
        if bool((exponents == 113).any()):  # rounded up, the largest of all floats would be infinite
            codes = codes.clamp(-_BELOW, _BELOW)
        return torch.cat([scales.view(torch.uint8), codes.view(-1)[: len(vector)].view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        _check_size(data, self.num_bytes(numel), numel, "fp16")
        num_blocks = -(-numel // BLOCK)
        return _scaled(_view(data[4 * num_blocks :], torch.float16).float(), _view(data[: 4 * num_blocks]))

    def num_bytes(self, numel: int) -> int:
        return 2 * numel + 4 * -(-numel // BLOCK)


class Int8(_Dense):
    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        blocks = _blocks(vector)
        largest = blocks.abs().amax(1)
        scales = torch.where(largest.isfinite(), largest.div(127.0).clamp_(_LOWEST, _HIGHEST), torch.nan)
        codes = blocks.div(scales[:, None]).round_().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(-1)[: len(vector)].view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        _check_size(data, self.num_bytes(numel), numel, "int8")
        num_blocks = -(-numel // BLOCK)
        return _scaled(data[4 * num_blocks :].view(torch.int8).float(), _view(data[: 4 * num_blocks]))

    def num_bytes(self, numel: int) -> int:
        return numel + 4 * -(-numel // BLOCK)


class TopK:
    """`share` of the elements, at least one."""

    def __init__(self, share: float) -> None:
        check_share(share)
        self.share = share

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        count = self.num_kept(len(vector))
        indices = vector.abs().topk(count, sorted=False).indices.sort().values
        return torch.cat([indices.to(torch.int32).view(torch.uint8), vector[indices].view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        vector = torch.zeros(numel)
        self.add(data, vector)
        return vector

    def add(self, data: torch.Tensor, total: torch.Tensor) -> None:
        numel = len(total)
        _check_size(data, self.num_bytes(numel), numel, "topk")
        count = self.num_kept(numel)
        indices = _view(data[: 4 * count], torch.int32).long()
        if count and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
            raise ValueError(f"topk data names elements that a vector of {numel} does not have")
        total.index_add_(0, indices, _view(data[4 * count :]))

    def num_bytes(self, numel: int) -> int:
        return 8 * self.num_kept(numel)

    def num_kept(self, numel: int) -> int:
        return min(numel, math.ceil(self.share * numel))


def _blocks(vector: torch.Tensor) -> torch.Tensor:
    """Its rows are the blocks, the last one filled up with zeros."""
    return torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The codes times the scale of their block."""
    whole = len(codes) // BLOCK * BLOCK
    codes[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    if whole < len(codes):
        codes[whole:].mul_(scales[-1])
    return codes


def _view(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The bytes as numbers: a copy where they do not begin at a multiple of a number's size."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data.contiguous()).view(dtype)


def _check_size(data: torch.Tensor, expected: int, numel: int, name: str) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != expected:
        got = f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
        raise ValueError(f"{numel} elements of {name} are uint8 [{expected}], not {got}")
