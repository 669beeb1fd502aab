"""DeviceComm: the ranks of a group reduce vectors in device memory. Work is ordered by the current stream.

    allocate(sizes)            collective, may block: vectors that the calls below take
    begin()                    a new exchange
    reduce(vector, mean)       the vector becomes the mean, or the sum, of all ranks' vectors
    reduce_scatter(vector)     this rank's shard of it does; the rest is lost
    all_gather(vector)         every rank's shard comes to all ranks
    broadcast(vector)          the vector becomes rank 0's
    verdict() -> tensor        0.0 on the device if what was reduced since `begin` is good, as far as this rank knows
    end()                      ends the exchange
    release(vectors)           collective: they are not used any more
    abort(cause)               thread-safe, may be called at any time
    close()

All but `allocate`, `release` and `close` return at once. All ranks make the same calls in the same order, on one stream
of their own. The verdict is 1.0 if a value was NaN or infinite in what this rank has seen, or if the exchange was
aborted: a stream that an abort has released goes on with whatever lies in the vectors. A last reduction shares the
verdicts. Once it has ended on any rank, all ranks had theirs, so an abort that follows changes none.
"""

from __future__ import annotations

import abc
import ctypes
import itertools
from collections.abc import Sequence

import torch

from ...errors import HoraError
from ...transport import cuda_driver
from ..group import Group

ALIGN_BYTES = 512


class DeviceVector:
    """`mine` is this rank's vector. Shard r, which rank r reduces, is elements edges[r] to edges[r + 1]."""

    def __init__(self, mine: torch.Tensor, edges: Sequence[int], peers: Sequence[torch.Tensor] = ()) -> None:
        self.mine = mine
        self.wholes = peers  # by rank: that rank's vector, where memory is shared
        self.shards = [mine[start:stop] for start, stop in itertools.pairwise(edges)]
        self.peers = [  # by rank: that rank's memory of all shards
            [peer[start:stop] for start, stop in itertools.pairwise(edges)] for peer in peers
        ]

    def forget_peers(self) -> None:
        """Unmaps their memory."""
        self.wholes, self.peers = (), []


class VectorSpec:
    """A vector to be allocated: `edges` has one more element than there are ranks."""

    def __init__(self, dtype: torch.dtype, edges: Sequence[int]) -> None:
        self.dtype = dtype
        self.edges = tuple(edges)

    @property
    def num_bytes(self) -> int:
        return -(-self.edges[-1] * self.dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


class DeviceComm(abc.ABC):
    name: str
    bucket_bytes: int  # of gradients that are reduced together

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.cause: HoraError | None = None
        self._closed = False
        self._aborted = torch.zeros(1, dtype=torch.int32, device=device)
        self._finished = torch.cuda.Event()  # of the last exchange
        group.transport.on_abort.append(self.abort)
        group.on_close.append(self.close)

    @abc.abstractmethod
    def allocate(self, specs: Sequence[VectorSpec]) -> list[DeviceVector]: ...

    @abc.abstractmethod
    def begin(self) -> None: ...

    @abc.abstractmethod
    def reduce(self, vector: DeviceVector, mean: bool = True) -> None: ...

    @abc.abstractmethod
    def reduce_scatter(self, vector: DeviceVector) -> None: ...

    @abc.abstractmethod
    def all_gather(self, vector: DeviceVector) -> None: ...

    @abc.abstractmethod
    def broadcast(self, vector: DeviceVector) -> None: ...

    @abc.abstractmethod
    def release(self, vectors: Sequence[DeviceVector]) -> None: ...

    @property
    @abc.abstractmethod
    def _abort_address(self) -> int:
        """Of a 32-bit word in pinned host memory that is 1 after an abort."""

    def abort(self, cause: HoraError) -> None:
        if self.cause is None:
            self.cause = cause
            ctypes.c_uint32.from_address(self._abort_address).value = 1
            self._release_streams()

    @abc.abstractmethod
    def _release_streams(self) -> None:
        """No stream waits for a peer any more. Called on any thread; must not block."""

    @abc.abstractmethod
    def _bad(self) -> torch.Tensor:
        """1.0 if a value was not finite."""

    def verdict(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.device)
        cuda_driver.copy_to_device(stream.cuda_stream, self._aborted.data_ptr(), self._abort_address, 4)
        return torch.maximum(self._bad(), self._aborted.float().view(()))

    def end(self) -> None:
        self._finished.record(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Called again it does nothing. A process cannot end while a stream of it waits."""
        if self._closed:
            return
        self._closed = True
        if not self._finished.query():
            self.abort(HoraError("the rank has left the run"))
            self._finished.synchronize()
        if self.abort in self.group.transport.on_abort:
            self.group.transport.on_abort.remove(self.abort)
