"""Savings: what rounds cost on the wire, against the ring's exchange at every step."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def by_ring(num_bytes: int, size: int) -> int:
    """What each of `size` workers sends when a ring reduces so many bytes."""
    return 2 * (size - 1) * num_bytes // size


def sentence(strategy: str, rounds: int, steps: int, sent: int, parameters: Iterable[torch.Tensor], size: int) -> str:
    """In words, for one worker; nothing where nothing was sent."""
    whole = by_ring(sum(p.numel() * p.element_size() for p in parameters), size) * steps
    if not sent or not whole:
        return ""
    return (
        f"{strategy}: {rounds} rounds in {steps} steps, {_text(sent)} sent per worker; for the same samples the ring "
        f"sends {_text(whole)}, {whole / sent:.1f} times as much"
    )


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
