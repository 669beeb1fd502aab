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
    course, loader = EpochProgress(), Loader(4)
    assert course.progress(3, None) is None
    course.begin(2)
    shares = []
    for course.epoch in range(2):
        for number in range(4):
            course.note(loader, batch(number), 2)  # type: ignore[arg-type]
            shares.append(course.progress(0, None))
    assert shares == [(1 + k) / 8 for k in range(8)]
    course.epoch = None
    assert course.progress(8, None) is None
    course.finish()
    assert course.progress(8, None) == 1.0


def test_the_nearer_end_counts() -> None:
    course = EpochProgress()
    assert course.progress(5, 10) == 0.5
    course.begin(10)
    course.epoch = 0
    course.note(Loader(10), batch(0), 1)  # type: ignore[arg-type]
    assert course.progress(5, 10) == 0.5 and course.progress(0, 1000) == 0.01 and course.progress(20, 10) == 1.0


def test_of_streams_and_of_two_loaders_in_one_epoch_nobody_knows() -> None:
    course = EpochProgress()
    course.begin(2)
    course.epoch = 0
    first: Any
    for first in (Loader(None), Loader(3)):
        course.note(first, batch(0), 1)
    assert course.progress(0, None) is None
    course.epoch = 1
    course.note(first, batch(0), 1)
    assert course.progress(0, None) == (1 + 1 / 3) / 2
