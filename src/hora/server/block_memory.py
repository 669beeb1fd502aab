"""BlockMemory: the bytes of a server's blocks, with one seqlock counter per block.

A block's counter is odd while the server writes the block and even otherwise. It grows by two with every update, so
half of it is the block's version. A reader compares the counter before and after its copy: the same even number proves
that the block was not written in between. On one host the memory is a sealed memfd: the server shares its parameters
with the workers, and each worker its gradients with the server. Otherwise it is private memory.

Readers that are not workers (predictors) use two more fields. `origins[n]`, subtracted from block n's version, gives
the number of updates since the job's step 0. `step_seqlock` is [counter, step], for steps that all blocks take
together: its counter is even, and the same on every server, while all blocks belong to that one step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..transport import futex
from ..transport.arena import PAGE, Arena, round_up
from .layout import Chunk, ServerPart

UINT64_MASK = (1 << 64) - 1


class BlockMemory:
    """`counters[n]` is block n's seqlock counter, `data` the bytes; `descriptor` lets others map it, or is None."""

    def __init__(self, num_blocks: int, num_bytes: int, descriptor: int | None = None) -> None:
        """Maps what `descriptor` holds; without one, memory of this process alone."""
        offset = header_bytes(num_blocks)
        total = offset + round_up(max(1, num_bytes), PAGE)
        self.descriptor = descriptor
        if descriptor is None:
            buffer = bytearray(total)
            header = memoryview(buffer)[:offset].cast("Q")
            self.data = torch.frombuffer(buffer, dtype=torch.uint8)[offset:]
        else:
            self._arena = Arena(descriptor, total)
            header = self._arena.words
            self.data = self._arena.bytes[offset:]
        self.counters = header[:num_blocks]
        self.origins = header[num_blocks : 2 * num_blocks]
        self.step_seqlock = header[2 * num_blocks : 2 * num_blocks + 2]

    @classmethod
    def shared(cls, num_blocks: int, num_bytes: int) -> BlockMemory:
        """New memory that others can map; private where the platform is not Linux. OutOfMemory if there is too
        little."""
        if not futex.AVAILABLE:
            return cls(num_blocks, num_bytes)
        memory = cls(num_blocks, num_bytes, Arena.create(header_bytes(num_blocks) + round_up(max(1, num_bytes), PAGE)))
        memory._arena.populate()
        return memory

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.data[offset : offset + numel * dtype.itemsize].view(dtype)

    def block_views(self, part: ServerPart, dtypes: Sequence[torch.dtype]) -> list[list[torch.Tensor]]:
        """By chunk, each of its blocks as a vector; `dtypes` are the parameters'."""
        return [[self.tensor(b.offset, b.numel, dtypes[b.index]) for b in chunk.blocks] for chunk in part.chunks]

    def chunk_bytes(self, chunk: Chunk, num_bytes: int | None = None) -> torch.Tensor:
        """A chunk's memory, or its first `num_bytes`."""
        return self.data[chunk.offset : chunk.offset + (chunk.num_bytes if num_bytes is None else num_bytes)]

    def close(self) -> None:
        """Closes the descriptor; mapped memory stays while something refers to it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def header_bytes(num_blocks: int) -> int:
    """The size of what precedes the data."""
    return round_up((2 * num_blocks + 2) * 8, PAGE)
