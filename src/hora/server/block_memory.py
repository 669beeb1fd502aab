"""Memory: the bytes in which blocks lie, and one word per block by which a reader knows that it read a whole one.

A block's word is even while it rests and odd while its server writes; it grows by two with every update, so half of it
is the block's version. Who reads looks at the word before and after: the same even number proves that nothing was
written in between. On one host this is a sealed memfd, which the server shows to its workers, and each worker, for its
gradients, to the server; elsewhere plain memory.

Who reads without being a worker, as a predictor does, finds two things more. A block's origin is what to take off its
version to get the number of updates since the job's step 0. The moment is for steps that all blocks take together: an
even number, the same on every server, while all blocks are of one step, odd while they are not; beside it that step.
"""

from __future__ import annotations

import os

import torch

from ..transport import futex
from ..transport.arena import PAGE, Arena, round_up


class BlockMemory:
    """`words[n]` is block n's word, `origins[n]` its origin, `moment` the moment and its step, `data` the bytes.
    `descriptor` is what others need to map it, or None."""

    def __init__(self, num_blocks: int, num_bytes: int, descriptor: int | None = None) -> None:
        """Maps what `descriptor` holds; without one, memory of this process alone."""
        self._offset = words_bytes(num_blocks)
        total = self._offset + round_up(max(1, num_bytes), PAGE)
        self.descriptor = descriptor
        if descriptor is None:
            room = bytearray(total)
            words = memoryview(room)[: self._offset].cast("Q")
            self.data = torch.frombuffer(room, dtype=torch.uint8)[self._offset :]
        else:
            self._arena = Arena(descriptor, total)
            words = self._arena.words
            self.data = self._arena.bytes[self._offset :]
        self.words = words[:num_blocks]
        self.origins = words[num_blocks : 2 * num_blocks]
        self.moment = words[2 * num_blocks : 2 * num_blocks + 2]

    @classmethod
    def shared(cls, num_blocks: int, num_bytes: int) -> BlockMemory:
        """A new one that others can map; OutOfMemory if there is too little. Elsewhere than on Linux: not shared."""
        if not futex.AVAILABLE:
            return cls(num_blocks, num_bytes)
        total = words_bytes(num_blocks) + round_up(max(1, num_bytes), PAGE)
        memory = cls(num_blocks, num_bytes, Arena.create(total))
        memory._arena.populate()
        return memory

    def tensor(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.data[at : at + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Gives the descriptor back; what is mapped stays as long as somebody refers to it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def words_bytes(num_blocks: int) -> int:
    """What lies before the data."""
    return round_up((2 * num_blocks + 2) * 8, PAGE)
