"""IpcComm: ranks of one host read each other's device memory (CUDA IPC), whether they share a GPU or their GPUs reach
each other. Streams wait for each other by flags in host memory that all ranks share; no kernel is compiled.

A reduction of S bytes, cut into one shard per rank:

    meet      my flag: my vector is there; the stream waits for all flags
    reduce    my shard = the mean of all ranks' shards, read out of their memory, mine first and then in order of rank
    meet      my shard is reduced
    gather    copy the other ranks' shards out of their memory

Each rank reads (n−1)/n S of its peers' memory twice and writes no memory but its own. One rank computes an element, in
a fixed order, so the bits are the same on every rank and in every run. Half precision is added in float32 and rounded
once.

A flag counts the meetings that a rank has come to. An abort raises all flags, from any thread: no stream waits for
ever, and the abort word, which is written first, tells every rank's verdict. Flags lie in host memory, so a dead rank
takes none along.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import torch

from ...errors import HoraError
from ...transport import cuda_driver
from ...transport.arena import PAGE
from ...transport.cuda_driver import DeviceMemory
from ..group import Group
from ..reduction import HALVES
from .base import ALIGN_BYTES, DeviceComm, DeviceVector, VectorSpec

LINE_BYTES = 128
RELEASED = 1 << 30  # beyond every count of meetings


class IpcComm(DeviceComm):
    name = "ipc"
    bucket_bytes = 100 << 20  # memory is so fast that little is left to hide, and each bucket costs the host calls

    def __init__(self, group: Group, device: torch.device) -> None:
        """Collective. HoraError, on this rank alone, if CUDA refuses."""
        self._memory = group.buffer("device flags", PAGE, torch.uint8)
        storage = self._memory.storage
        self._host = storage.data_ptr() // PAGE * PAGE
        end = -(-(storage.data_ptr() + len(storage)) // PAGE) * PAGE
        self._mapped = cuda_driver.register_host(self._host, end - self._host)
        part = [peer.data_ptr() for peer in self._memory.peers]
        self._flags = [address - self._host + self._mapped for address in part]  # as streams see them
        self._host_flags = part
        self._word = part[0] + LINE_BYTES
        super().__init__(group, device)
        self._others = group.others
        self._count = 0  # of meetings
        self._one = torch.ones(1, device=device)
        self._inverse = torch.full((1,), 1.0 / group.size, device=device)
        self._released: list[DeviceVector] = []  # that peers may have mapped still
        self._found = torch.zeros(1, device=device)  # 1 if a value was not finite

    @staticmethod
    def check(device: torch.device) -> None:
        """HoraError if CUDA refuses here what ranks need of each other."""
        DeviceMemory.allocate(ALIGN_BYTES).handle()
        page = mmap.mmap(-1, PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        cuda_driver.register_host(address, PAGE)
        cuda_driver.unregister_host(address)

    # -- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, specs: Sequence[VectorSpec]) -> list[DeviceVector]:
        num_bytes = max(ALIGN_BYTES, sum(spec.num_bytes for spec in specs))
        mine = DeviceMemory.allocate(num_bytes)
        mine.tensor(self.device).zero_()
        torch.cuda.current_stream(self.device).synchronize()
        handle = torch.frombuffer(bytearray(mine.handle()), dtype=torch.uint8)
        handles = self.group.all_gather(handle, name="device memory")
        self._released.clear()  # all ranks have released theirs
        memories = [
            mine if rank == self.group.rank else DeviceMemory.open(bytes(handle.tolist()), num_bytes)
            for rank, handle in enumerate(handles)
        ]
        wholes = [memory.tensor(self.device) for memory in memories]
        vectors, at = [], 0
        for spec in specs:
            stop = at + spec.edges[-1] * spec.dtype.itemsize
            parts = [whole[at:stop].view(spec.dtype) for whole in wholes]
            vectors.append(DeviceVector(parts[self.group.rank], spec.edges, parts))
            at += spec.num_bytes
        return vectors

    def release(self, vectors: Sequence[DeviceVector]) -> None:
        torch.cuda.synchronize(self.device)
        for vector in vectors:
            if self.cause is None:
                vector.forget_peers()
            self._released.append(vector)

    # -- the exchange ------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        self._count += 1
        stream = torch.cuda.current_stream(self.device).cuda_stream
        cuda_driver.stream_write(stream, self._flags[self.group.rank], self._count)
        for peer in self._others:
            cuda_driver.stream_wait(stream, self._flags[peer], self._count)

    def begin(self) -> None:
        self._found.zero_()

    def reduce(self, vector: DeviceVector, mean: bool = True) -> None:
        self._reduce_shard(vector, self._inverse if mean else self._one)
        self.all_gather(vector)

    def reduce_scatter(self, vector: DeviceVector) -> None:
        self._reduce_shard(vector, self._inverse)

    def _reduce_shard(self, vector: DeviceVector, factor: torch.Tensor) -> None:
        self._meet()
        me = self.group.rank
        shard = vector.shards[me]
        if not shard.numel():
            return
        total = shard.float() if shard.dtype in HALVES else shard
        for peer in self._others:
            total.add_(vector.peers[peer][me])
        torch._amp_foreach_non_finite_check_and_unscale_([total], self._found, factor)
        if total is not shard:
            shard.copy_(total)

    def all_gather(self, vector: DeviceVector) -> None:
        self._meet()
        for peer in self._others:
            vector.shards[peer].copy_(vector.peers[peer][peer])

    def broadcast(self, vector: DeviceVector) -> None:
        self._meet()
        if self.group.rank != 0:
            vector.mine.copy_(vector.wholes[0])

    def _bad(self) -> torch.Tensor:
        return self._found.view(())

    def end(self) -> None:
        """After this meeting every rank has read all that it reads of its peers' memory."""
        self._meet()
        super().end()

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def _abort_address(self) -> int:
        return self._word

    def _release_streams(self) -> None:
        for address in self._host_flags:
            ctypes.c_uint32.from_address(address).value = RELEASED

    def close(self) -> None:
        super().close()
        with contextlib.suppress(HoraError):
            cuda_driver.unregister_host(self._host)
