"""No read of half a block: a real writer in one thread, a reader with a mapping of its own in another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from hora.server.block_memory import BlockMemory
from hora.server.layout import PIECES, ParameterBlock, cut
from hora.server.store import ParameterStore
from hora.transport import futex

NUMEL = 1 << 18
SECONDS = 1.0

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="memory is shared on Linux only")


class Busy:
    """A server's store of blocks whose values are all alike within a block, updated without a pause."""

    def __init__(self) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(PIECES)]
        optimizers = [torch.optim.SGD(parameters, lr=1.0)]
        self.part = cut(parameters, optimizers, 1, NUMEL * 4).parts[0]
        assert len(self.part.blocks) == PIECES
        self.memory = BlockMemory.shared(PIECES, self.part.num_bytes)
        assert self.memory.descriptor is not None
        self.store = ParameterStore(self.part, self.memory, parameters, optimizers)
        self.mapped = BlockMemory(PIECES, self.part.num_bytes, self.memory.descriptor)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        gradient = torch.full((NUMEL,), -1.0)
        while not self.stop.is_set():
            for chunk in self.part.chunks:
                self.store.apply(chunk, [gradient] * len(chunk.blocks), None)

    def read(self, block: ParameterBlock, room: torch.Tensor) -> int | None:
        """As memory.py says; the version read, or None if it was being written."""
        before = self.mapped.counters[block.number]
        if before & 1:
            return None
        self.peek(block, room)
        return before // 2 if self.mapped.counters[block.number] == before else None

    def peek(self, block: ParameterBlock, room: torch.Tensor) -> None:
        room.copy_(self.mapped.tensor(block.offset, block.numel, torch.float32))


@pytest.fixture
def busy() -> Iterator[Busy]:
    each = Busy()
    each.thread.start()
    yield each
    each.stop.set()
    each.thread.join()
    each.memory.close()


def test_a_reader_that_looks_at_the_words_never_accepts_a_mixture_and_accepts_often(busy: Busy) -> None:
    room, accepted, versions = torch.empty(NUMEL), 0, set()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for block in busy.part.blocks:
            version = busy.read(block, room)
            if version is not None:
                assert bool((room == version).all()), "a mixture was accepted, or the values of another version"
                accepted += 1
                versions.add(version)
    assert accepted >= 20 and len(versions) >= 5, f"{accepted} readings of {len(versions)} versions were accepted"


def test_a_reader_that_does_not_look_sees_mixtures(busy: Busy) -> None:
    """So the test above can fail."""
    room = torch.empty(NUMEL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for block in busy.part.blocks:
            busy.peek(block, room)
            if not bool((room == room[0]).all()):
                return
    pytest.fail("every reading was whole")


def test_a_second_mapping_sees_values_and_versions() -> None:
    memory = BlockMemory.shared(2, 1024)
    other = BlockMemory(2, 1024, memory.descriptor)
    memory.tensor(128, 3, torch.float64).copy_(torch.tensor([1.0, 2.0, 3.0]))
    memory.counters[1] += 2
    assert other.tensor(128, 3, torch.float64).tolist() == [1.0, 2.0, 3.0]
    assert list(other.counters) == [0, 2]
    memory.close()
    assert memory.descriptor is None and memory.counters[1] == 2
