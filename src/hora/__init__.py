"""Hora: one PyTorch training script, many processes and machines, any data-parallel architecture, chosen by one word.

Importing changes nothing and is cheap: what needs torch is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collectives.group import Group
    from .data import Shard
    from .errors import HoraError, Mismatch, PeerLost, Timeout, Unauthorized
    from .helpers import clip_grad_norm_, scale_lr
    from .job import Job, init
    from .job.calls import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from .job.early_stopping import EarlyStopping
    from .monitor.values import Histogram
    from .server.embedding import ServerEmbedding
    from .strategies import PS, Auto, DiLoCo, Engine, Halving, LocalSGD, Ring, Shared, Star, Tree

__version__ = "0.1.0"

_HOMES = {
    "job": ("Job", "init"),
    "collectives": ("Group",),
    "data": ("Shard",),
    "server.embedding": ("ServerEmbedding",),
    "job.early_stopping": ("EarlyStopping",),
    "helpers": ("clip_grad_norm_", "scale_lr"),
    "job.calls": (
        "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather",
        "new_group", "recv", "reduce", "reduce_scatter", "scatter", "send",
    ),
    "monitor.values": ("Histogram",),
    "errors": ("HoraError", "Mismatch", "PeerLost", "Timeout", "Unauthorized"),
    "strategies": ("PS", "Auto", "DiLoCo", "Engine", "Halving", "LocalSGD", "Ring", "Shared", "Star", "Tree"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PS", "Auto", "DiLoCo", "EarlyStopping", "Engine", "Group", "Halving", "Histogram", "HoraError", "Job",
    "LocalSGD", "Mismatch", "PeerLost", "Ring", "ServerEmbedding", "Shard", "Shared", "Star", "Timeout", "Tree",
    "Unauthorized", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "clip_grad_norm_", "gather",
    "init", "new_group", "recv", "reduce", "reduce_scatter", "scale_lr", "scatter", "send",
]  # fmt: skip


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"hora has no {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
