"""How far a training has come, as far as anybody can know."""

from __future__ import annotations

from typing import Any

from hora.data import BatchSlice
from hora.training.epoch_progress import EpochProgress


class Loader:
    def __init__(self, length: int | None) -> None:
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a stream has no length")
        return self._length


def batch(number: int) -> BatchSlice:
    return BatchSlice.deal(number, 0, 8, 0, 2)


def test_epochs_and_batches_make_a_share_and_the_end_is_one() -> None:
    progress, loader = EpochProgress(), Loader(4)
    assert progress.progress(3, None) is None
    progress.begin(2)
    shares = []
    for progress.epoch in range(2):
        for number in range(4):
            progress.note(loader, batch(number), 2)  # type: ignore[arg-type]
            shares.append(progress.progress(0, None))
    assert shares == [(1 + k) / 8 for k in range(8)]
    progress.epoch = None
    assert progress.progress(8, None) is None
    progress.finish()
    assert progress.progress(8, None) == 1.0


def test_the_nearer_end_counts() -> None:
    progress = EpochProgress()
    assert progress.progress(5, 10) == 0.5
    progress.begin(10)
    progress.epoch = 0
    progress.note(Loader(10), batch(0), 1)  # type: ignore[arg-type]
    assert progress.progress(5, 10) == 0.5 and progress.progress(0, 1000) == 0.01 and progress.progress(20, 10) == 1.0


def test_of_streams_and_of_two_loaders_in_one_epoch_nobody_knows() -> None:
    progress = EpochProgress()
    progress.begin(2)
    progress.epoch = 0
    first: Any
    for first in (Loader(None), Loader(3)):
        progress.note(first, batch(0), 1)
    assert progress.progress(0, None) is None
    progress.epoch = 1
    progress.note(first, batch(0), 1)
    assert progress.progress(0, None) == (1 + 1 / 3) / 2
