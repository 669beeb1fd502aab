"""What compression between hosts needs to know of gradients: which of them are matrices."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...collectives.group import Group
from ...compression.powersgd import Matrix
from ...parameters.buckets import Bucket
from ...parameters.shards import is_dense

log = logging.getLogger(__name__)


def warn_of_one_host(wire: str, group: Group) -> None:
    """Rank 0 warns if all workers share one host."""
    if wire != "fp32" and group.num_hosts == 1 and group.rank == 0:
        log.warning("wire=%s has no effect: all workers share one host, so nothing crosses a wire", wire)


def matrices(bucket: Bucket, parameters: Sequence[torch.Tensor]) -> list[Matrix]:
    """The gradients in a bucket that have rows and columns. Of one that is spread over several buckets: whole rows."""
    found = []
    for segment in sorted(bucket.segments, key=lambda segment: segment.offset):
        columns = _columns(parameters[segment.index])
        if columns:
            first, last = -(-segment.start // columns), segment.stop // columns
            if first < last:
                found.append(Matrix(segment.offset + first * columns - segment.start, last - first, columns))
    return found


def _columns(parameter: torch.Tensor) -> int:
    """How long the rows are of the parameter as it lies in memory; 0 for one that has none."""
    if parameter.dim() < 2 or not parameter.numel():
        return 0
    outer = max(range(parameter.dim()), key=lambda d: (parameter.stride(d), parameter.shape[d]))
    rows = parameter.shape[outer] if is_dense(parameter) else parameter.shape[0]
    return parameter.numel() // rows
