"""The parameter server: servers hold the parameters and update them; workers push gradients and pull the result."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

from ...compression.names import check
from ..base import Strategy

if TYPE_CHECKING:
    from ...parameters.registry import ParameterRegistry
    from ...server.state import Rules
    from ..common.hooks import TrainingHooks
    from ..common.sync import Sync

MODES = ("sync", "async", "ssp")
CORRECTIONS = ("none", "scale", "dc")
BLOCK_BYTES = 4 << 20
STALENESS = 3
TOPK = 0.01
DC_LAMBDA = 20.0  # for gradients of a mean loss; the smaller these are, the larger it may be (docs/PS.md)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PS(Strategy):
    """When the servers update, and what a worker waits for.

    `mode`: sync (once every worker's gradient is in), async (each gradient as it comes) or ssp (as async, but a worker
    waits when it is more than `staleness` steps ahead of the slowest). With `backup=b` a sync step leaves out the b
    slowest; with `sync_every=k` an async worker waits for all others after every k-th step. `correct` lessens what a
    gradient does that comes late: scale (by 1 / (1 + lag)) or dc (delay compensation, `dc_lambda`). `prefetch`: a step
    does not wait for its own result; the next forward works with parameters that are one step older. `clip_norm`: the
    servers clip the gradient that they apply. `block_bytes`: the largest piece of a parameter that travels on its own.

    Over a network: in sync without backups the workers of one host send one gradient for all of them, and get the
    parameters once; otherwise each sends its own. `wire` says in what form gradients travel (fp32: as they are, fp16,
    bf16, int8 or topk: the share `topk` of a chunk that is largest); what rounding takes from one is added to the
    next. Parameters always come back as they are, rows of sparse tables travel as they are, and to a server on the same
    host nothing travels.
    """

    name: ClassVar[str] = "ps"
    may_use_servers: ClassVar[bool] = True

    mode: str = "sync"
    staleness: int | None = None
    sync_every: int | None = None
    backup: int = 0
    correct: str = "none"
    dc_lambda: float | None = None
    prefetch: bool = False
    clip_norm: float | None = None
    block_bytes: int = BLOCK_BYTES
    wire: str = "fp32"
    topk: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; there are: {', '.join(MODES)}")
        if self.correct not in CORRECTIONS:
            raise ValueError(f"correct={self.correct!r} is unknown; there are: {', '.join(CORRECTIONS)}")
        self._belongs("staleness", self.staleness is not None, "ssp")
        self._belongs("backup", bool(self.backup), "sync")
        self._belongs("sync_every", self.sync_every is not None, "async")
        if self.mode == "sync":
            for name in ("correct", "prefetch"):
                if getattr(self, name) not in ("none", False):
                    raise ValueError(
                        f"{name} has no effect with mode=sync, where no gradient is late; use async or ssp"
                    )
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness takes a number of steps, 0 or more, not {self.staleness}")
        if self.sync_every is not None and self.sync_every < 1:
            raise ValueError(f"sync_every takes a number of steps, 1 or more, not {self.sync_every}")
        if self.sync_every is not None and self.prefetch:
            raise ValueError("prefetch=true would read past the synchronisation of sync_every; leave one of them out")
        if self.prefetch and self.correct == "dc":
            raise ValueError(
                "correct=dc needs the parameters that a gradient is based on, and prefetch=true reads newer ones "
                "before it is pushed; leave one of them out"
            )
        if self.backup < 0:
            raise ValueError(f"backup takes a number of workers, 0 or more, not {self.backup}")
        if self.dc_lambda is not None and self.correct != "dc":
            raise ValueError("dc_lambda has an effect only with correct=dc")
        if self.dc_lambda is not None and not 0 <= self.dc_lambda < math.inf:
            raise ValueError(f"dc_lambda takes a number, 0 or more, not {self.dc_lambda}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm takes a number above 0, not {self.clip_norm}")
        check(self.wire, self.topk)
        if self.block_bytes < 1024:
            raise ValueError(f"block_bytes takes a number of bytes of at least 1024, not {self.block_bytes}")

    def _belongs(self, option: str, given: bool, mode: str) -> None:
        if given and self.mode != mode:
            raise ValueError(f"{option} has an effect only with mode={mode}, not with mode={self.mode}")

    @property
    def algorithm(self) -> str:
        return "auto"

    @property
    def synchronous(self) -> bool:
        return self.mode == "sync"

    @property
    def elastic(self) -> bool:
        return self.mode != "sync"

    @property
    def leased(self) -> bool:
        return self.mode != "sync"

    def rules(self) -> Rules:
        """What the servers must know of this."""
        from ...server.state import Rules

        return Rules(
            mode=self.mode,
            staleness=STALENESS if self.staleness is None else self.staleness,
            sync_every=self.sync_every,
            backup=self.backup,
            correct=self.correct,
            dc_lambda=DC_LAMBDA if self.dc_lambda is None else self.dc_lambda,
            clip_norm=self.clip_norm if self.mode == "sync" else None,  # else the worker itself has the whole gradient
            wire=self.wire,
            topk=TOPK if self.topk is None else self.topk,
        )

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        from .worker import ParameterServerSync

        return ParameterServerSync(registry, hooks, self)
