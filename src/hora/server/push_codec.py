"""Wire: the gradients of a parcel in fewer bytes than they have, as they cross a network.

    worker      gradient + what rounding took from those before it  ->  encoded  ->  over TCP
    server      into the place of the parcel, which is larger  ->  decoded there, before the push counts

All numbers of a parcel are encoded together as one vector of float32, whatever the parameters' type: float64 loses
what float32 does not hold, half precision nothing. A parcel that would not get smaller travels as it is, and so do
rows of sparse tables. Parameters always come back as they are: an error in them would stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..compression.codec import Codec
from ..errors import HoraError
from .layout import Chunk, ServerPart


class PushCodec:
    """What one server and its workers agree on: `name` of the codec and the codec itself, None for none."""

    def __init__(self, name: str, codec: Codec | None, part: ServerPart, dtypes: Sequence[torch.dtype]) -> None:
        self.name = name
        self._codec = codec
        self._dtypes = [dtypes[parcel.blocks[0].index] for parcel in part.parcels]
        self._num_bytes = [self._measure(parcel) for parcel in part.parcels]

    def _measure(self, parcel: Chunk) -> int | None:
        dtype = self._dtypes[parcel.number]
        if self._codec is None or not parcel.whole or not dtype.is_floating_point:
            return None
        num_bytes = self._codec.num_bytes(parcel.num_bytes // dtype.itemsize)
        return num_bytes if num_bytes < parcel.num_bytes else None

    def num_bytes(self, parcel: Chunk, name: str) -> int | None:
        """How many a parcel's gradients have when they are encoded by the codec of this name; None: they never are."""
        return self._num_bytes[parcel.number] if name == self.name else None

    def decode(self, parcel: Chunk, data: torch.Tensor, place: torch.Tensor) -> None:
        """`place` is the parcel's memory, of which `data` must not be part. HoraError for what cannot be decoded."""
        assert self._codec is not None
        vector = place.view(self._dtypes[parcel.number])
        try:
            vector.copy_(self._codec.decode(data, len(vector)))
        except ValueError as problem:
            raise HoraError(f"a gradient of parcel {parcel.number} that cannot be decoded: {problem}") from None

    def encode(
        self, parcel: Chunk, place: torch.Tensor, blocks: Sequence[slice], errors: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """The gradients in `place`, with what was left of them the last time, in bytes; `errors` keeps what is left
        this time, by parcel, in a tensor of its own: whoever has the last one can go back to it. `blocks` are the
        elements that have a gradient: of the others nothing is sent or kept.

        What is not finite is sent as it is and leaves no error behind: no step is taken with it."""
        assert self._codec is not None
        given = place.view(self._dtypes[parcel.number]).float()
        known = errors.get(parcel.number)
        error = errors[parcel.number] = torch.zeros_like(given) if known is None else known.clone()
        for each in blocks:
            given[each] += error[each]
        data = self._codec.encode(given)
        left = given - self._codec.decode(data, len(given))
        if bool(left.isfinite().all()):
            for each in blocks:
                error[each] = left[each]
        return data
