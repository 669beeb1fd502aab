"""PushCodec: gradients of a chunk in fewer bytes, as they cross a network.

    worker      gradient + residual of earlier encodings  ->  encoded  ->  over TCP
    server      into the chunk's memory, which is larger  ->  decoded there, before the push counts

A chunk is encoded as one float32 vector, whatever the parameters' dtype: float64 loses what float32 does not hold, half
precision loses nothing. A chunk that would not get smaller is sent as it is, and so are rows. Parameters are never
encoded: an error in them would stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..compression.codec import Codec
from ..errors import HoraError
from .layout import Chunk, ParameterBlock, ServerPart


class PushCodec:
    """One server and its workers use the same `codec` of this name, or None to send plain bytes. On a worker it also
    keeps the residuals: error feedback, what encoding has lost so far."""

    def __init__(self, name: str, codec: Codec | None, part: ServerPart, dtypes: Sequence[torch.dtype]) -> None:
        self.name = name
        self.residuals: dict[int, torch.Tensor] = {}  # by chunk
        self._previous: dict[int, torch.Tensor | None] = {}  # the same before pushes that have not been settled
        self._codec = codec
        self._dtypes = [dtypes[chunk.blocks[0].index] for chunk in part.chunks]
        self._num_bytes = [self._measure(chunk) for chunk in part.chunks]

    def _measure(self, chunk: Chunk) -> int | None:
        dtype = self._dtypes[chunk.number]
        if self._codec is None or not chunk.dense or not dtype.is_floating_point:
            return None
        num_bytes = self._codec.num_bytes(chunk.num_bytes // dtype.itemsize)
        return num_bytes if num_bytes < chunk.num_bytes else None

    def num_bytes(self, chunk: Chunk, name: str) -> int | None:
        """The size of a chunk that the codec of this name has encoded; None if chunks are not encoded so."""
        return self._num_bytes[chunk.number] if name == self.name else None

    def decode(self, chunk: Chunk, data: torch.Tensor, memory: torch.Tensor) -> None:
        """Decodes `data` into `memory`, the chunk's; they must not overlap. HoraError if it cannot be decoded."""
        assert self._codec is not None
        vector = memory.view(self._dtypes[chunk.number])
        try:
            vector.copy_(self._codec.decode(data, len(vector)))
        except ValueError as problem:
            raise HoraError(f"push of chunk {chunk.number} cannot be decoded: {problem}") from None

    def encode(self, chunk: Chunk, memory: torch.Tensor, blocks: Sequence[ParameterBlock]) -> torch.Tensor:
        """The gradients in `memory` plus the chunk's residual, in bytes. `blocks` have a gradient; nothing is sent or
        kept of the others. Gradients that are not finite leave the residual as it was."""
        assert self._codec is not None
        dtype = self._dtypes[chunk.number]
        vector = memory.view(dtype).float()
        starts = [(block.offset - chunk.offset) // dtype.itemsize for block in blocks]
        spans = [slice(start, start + block.numel) for start, block in zip(starts, blocks, strict=True)]
        previous = self._previous[chunk.number] = self.residuals.get(chunk.number)
        residual = torch.zeros_like(vector) if previous is None else previous.clone()
        for span in spans:
            vector[span] += residual[span]
        data = self._codec.encode(vector)
        lost = vector - self._codec.decode(data, len(vector))
        if bool(lost.isfinite().all()):
            for span in spans:
                residual[span] = lost[span]
        self.residuals[chunk.number] = residual
        return data

    def settle(self, chunk: int, applied: bool) -> None:
        """A push was applied, or it was dropped: then the residual before it holds again."""
        if chunk in self._previous:
            previous = self._previous.pop(chunk)
            if not applied and previous is None:
                del self.residuals[chunk]
            elif not applied and previous is not None:
                self.residuals[chunk] = previous

    def drop_unanswered(self) -> None:
        """No push that is not settled yet was applied."""
        for chunk in list(self._previous):
            self.settle(chunk, applied=False)

    def reset(self) -> None:
        """Discards all residuals."""
        self.residuals.clear()
        self._previous.clear()
