"""Savings: what rounds cost on the wire, against the ring's exchange at every step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...compression.compressed_sum import format_bytes


def by_ring(num_bytes: int, size: int) -> int:
    """What each of `size` workers sends when a ring reduces so many bytes."""
    return 2 * (size - 1) * num_bytes // size


def sentence(strategy: str, rounds: int, steps: int, sent: int, parameters: Iterable[torch.Tensor], size: int) -> str:
    """In words, for one worker; nothing where nothing was sent."""
    whole = by_ring(sum(p.numel() * p.element_size() for p in parameters), size) * steps
    if not sent or not whole:
        return ""
    return (
        f"{strategy}: {rounds} rounds in {steps} steps, {format_bytes(sent)} sent per worker; for the same samples the "
        f"ring sends {format_bytes(whole)}, {whole / sent:.1f} times as much"
    )
