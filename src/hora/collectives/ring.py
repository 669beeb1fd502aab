"""Ring all-reduce (Patarasuk and Yuan 2009; Baidu 2017): every link is busy in every step, all ranks send equally much.

        ┌─▶ 0 ──▶ 1 ──▶ 2 ──▶ 3 ─┐
        └────────────────────────┘

The vector is cut into n chunks; all indices are mod n, i counts from 0 to n − 2 in each phase:

- *scatter-reduce*, step i: rank j sends chunk j − i to j + 1 and reduces chunk j − i − 1 from j − 1. After it rank j
  owns chunk j + 1, complete.
- *all-gather*, step i: rank j sends chunk j + 1 − i and receives chunk j − i.

What a rank receives in one step it sends in the next. Large chunks travel in segments, each sent on as soon as it has
been reduced, while the rest of its chunk still arrives: so no link is idle between two steps.

Steps: 2(n−1). Sent per rank: 2(n−1)/n of the data, only to j + 1. Half precision is rounded at every hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..transport import Transfer
from .reduction import Operation
from .schedule import bounds

if TYPE_CHECKING:
    from .group import Group

SEGMENT_BYTES = 1 << 20

SegmentHook = Callable[[torch.Tensor], None]


def all_reduce(
    group: Group,
    flat: torch.Tensor,
    operation: Operation,
    num_parts: int | None = None,
    first: SegmentHook | None = None,
    final: SegmentHook | None = None,
) -> None:
    """A mean divides by `num_parts`, where ranks stand for more than themselves. `first(segment)` is called before a
    segment is read or written for the first time, `final(segment)` when it is complete and may be read; what was
    sent before is in flight meanwhile."""
    n, j = group.size, group.rank
    if n == 1:
        return
    right, left = (j + 1) % n, (j - 1) % n
    chunks = cut(flat, n)
    sending: list[Transfer] = []
    for segment in chunks[j]:
        if first:
            first(segment)
        sending.append(group.send_chunk(right, segment))
    last = 2 * n - 3
    for step in range(last + 1):  # scatter-reduce up to n − 2, then all-gather
        reducing, complete = step < n - 1, step >= n - 2
        for segment in chunks[(j - step - 1) % n]:
            if first and reducing:
                first(segment)
            group.recv_chunk(left, segment, operation.combine if reducing else None).wait()
            if step == n - 2:
                operation.finish(segment, num_parts or n)
            if step < last:
                sending.append(group.send_chunk(right, segment))
            if final and complete:
                final(segment)
    for transfer in sending:
        transfer.wait()


def follow(flat: torch.Tensor, n: int, j: int, first: SegmentHook, final: SegmentHook) -> None:
    """Calls `first` and `final` in the order in which rank j of n does in `all_reduce`."""
    chunks = cut(flat, n)
    for segment in chunks[j]:
        first(segment)
    for step in range(2 * n - 2):
        for segment in chunks[(j - step - 1) % n]:
            if step < n - 1:
                first(segment)
            if step >= n - 2:
                final(segment)


def cut(flat: torch.Tensor, n: int) -> list[Sequence[torch.Tensor]]:
    """The segments of each chunk, one at least."""
    length = SEGMENT_BYTES // flat.element_size()
    return [flat[start:stop].split(length) for start, stop in bounds(flat.numel(), n)]


def scatter_reduce(group: Group, chunks: list[torch.Tensor], operation: Operation) -> None:
    """After it rank j has chunk j complete; the other chunks are partial sums."""
    _rotate(group, chunks, group.rank - 1, operation.combine)


def all_gather(group: Group, chunks: list[torch.Tensor]) -> None:
    """Before it rank j has chunk j; after it every rank has all."""
    _rotate(group, chunks, group.rank, None)


def _rotate(
    group: Group, chunks: list[torch.Tensor], j: int, combine: Callable[[torch.Tensor, torch.Tensor], None] | None
) -> None:
    n = group.size
    for i in range(n - 1):
        sending = group.send_chunk((group.rank + 1) % n, chunks[(j - i) % n])
        group.recv_chunk((group.rank - 1) % n, chunks[(j - i - 1) % n], combine).wait()
        sending.wait()
