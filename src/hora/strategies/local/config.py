"""Local SGD and DiLoCo: every worker trains alone, and now and then, in a round, they agree."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, ClassVar

from ...compression.names import check
from ..base import Strategy
from ..ps.config import BLOCK_BYTES, PS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ...parameters.registry import ParameterRegistry
    from ...server.state import Rules
    from ..common.hooks import TrainingHooks
    from ..common.sync import Sync

STATES = ("keep", "average", "reset")
PACES = ("steps", "time")
CARRIERS = ("workers", "ps")
ALGORITHMS = ("auto", "ring", "tree", "halving", "star", "shared", "engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundStrategy(Strategy):
    """What both have in common.

    `every`: after so many steps a round; 4/8@100/16@1000 is a schedule: 4, from step 100 on 8, from step 1000 on 16.
    `warmup`: so many steps with the mean gradient of all workers come first. `pace`: steps (every worker takes `every`
    steps in a round) or time (each does what it can in the time in which all together take as many; samples are then
    lent). `state`: what a round does to the optimizers' state: keep (each worker its own), average, or reset.
    `algorithm`: by which collective the mean is taken. `wire`: as what drifts travel between hosts: fp32 (as they are),
    fp16, bf16, int8, or topk: the share `topk` that is largest, 0.01 if nothing is said. What that takes away is added
    to the next drift. Inside a host they travel as they are.
    """

    unit: ClassVar[str] = "round"

    every: str | int = 8
    warmup: int = 0
    pace: str = "steps"
    state: str = "keep"
    algorithm: str = "auto"
    wire: str = "fp32"
    topk: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, str) and self.every.strip().lstrip("+-").isdecimal():
            object.__setattr__(self, "every", int(self.every))
        stages(self.every)
        if self.warmup < 0:
            raise ValueError(f"warmup takes a number of steps, 0 or more, not {self.warmup}")
        self._one_of("pace", PACES)
        self._one_of("state", STATES)
        self._one_of("algorithm", ALGORITHMS)
        check(self.wire, self.topk)
        if self.wire != "fp32" and self.algorithm != "auto":
            raise ValueError(f"algorithm cannot be chosen with wire={self.wire}, which travels by exchanges of its own")

    def _one_of(self, option: str, known: Sequence[str]) -> None:
        if getattr(self, option) not in known:
            raise ValueError(f"{option}={getattr(self, option)!r} is unknown; there are: {', '.join(known)}")

    @property
    def topology(self) -> str:
        return "rounds"

    @property
    def via(self) -> str:
        """Who takes the mean: the workers, or servers (ps)."""
        return "workers"

    @property
    def outer_lr(self) -> float:
        """Of the step from the anchor along the mean pseudo-gradient; 1 makes the anchor the workers' mean."""
        return 1.0

    @property
    def outer_momentum(self) -> float:
        return 0.0

    @property
    def fragments(self) -> int:
        """In how many parts a round averages the model."""
        return 1

    @property
    def overlap(self) -> int:
        """How many steps are taken while a fragment is averaged."""
        return 0

    @property
    def averages_differences(self) -> bool:
        """Whether workers average how far they came from the anchor, rather than their parameters."""
        return self.wire != "fp32"

    @property
    def leased(self) -> bool:
        return self.pace == "time"

    def interval(self, step: int) -> int:
        """How many steps the round takes that begins after this one."""
        return [interval for begin, interval in stages(self.every) if begin <= step][-1]


def stages(every: str | int) -> list[tuple[int, int]]:
    """The schedule as (from this step on, so many steps); ValueError if it is none."""
    found = []
    for number, part in enumerate(str(every).split("/")):
        match = re.fullmatch(r"(\d+)" + (r"@(\d+)" if number else ""), part.strip())
        if match is None or not int(match[1]):
            raise ValueError(
                f"every takes a number of steps, 1 or more, or a schedule as 4/8@100/16@1000, not {every!r}"
            )
        found.append((int(match[2]) if number else 0, int(match[1])))
    if [begin for begin, _ in found] != sorted({begin for begin, _ in found}):
        raise ValueError(f"every={every}: a schedule's later stages begin at later steps")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(RoundStrategy):
    """In a round the parameters are averaged, each worker's weighted by the samples that it saw.

    `via`: workers (by a collective) or ps (the servers keep and average the model). `barrier=false`, with via=ps: each
    worker reports after its own `every` steps, is averaged in by its share of the samples, takes the result and goes
    on: nobody waits for anybody. `block_bytes`: with via=ps, the largest piece of a parameter that travels on its own.
    """

    name: ClassVar[str] = "local"
    may_use_servers: ClassVar[bool] = True

    via: str = "workers"
    barrier: bool = True
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("via", CARRIERS)
        if self.via == "workers":
            if not self.barrier:
                raise ValueError("barrier=false has an effect only with via=ps: a collective needs every worker")
            if self.block_bytes != BLOCK_BYTES:
                raise ValueError("block_bytes has an effect only with via=ps")
            return
        if self.wire != "fp32":
            raise ValueError(f"wire={self.wire} is for drifts between workers, and with via=ps servers take them")
        if self.algorithm != "auto":
            raise ValueError("algorithm cannot be chosen with via=ps: the servers take the mean")
        if not self.barrier:
            for option, idle in (("warmup", 0), ("pace", "steps"), ("state", "keep")):
                if getattr(self, option) != idle:
                    raise ValueError(f"{option} needs rounds in which all workers meet: leave barrier=false out")
        self.servers()

    @property
    def uses_servers(self) -> bool:
        return self.via == "ps"

    @property
    def synchronous(self) -> bool:
        return self.barrier

    @property
    def elastic(self) -> bool:
        return not self.barrier

    @property
    def leased(self) -> bool:
        return self.pace == "time" or not self.barrier

    def servers(self) -> PS:
        """How the servers work, as a parameter server would: a worker's drift is the gradient of a step of rate 1."""
        return PS(mode="sync" if self.barrier else "async", block_bytes=self.block_bytes)

    def rules(self) -> Rules:
        return self.servers().rules()

    def served(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        import torch

        those = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
        return [torch.optim.SGD(list(those.values()), lr=1.0)]

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        if not self.barrier:
            from .async_local_sgd import AsyncLocalSync

            return AsyncLocalSync(registry, hooks, self)
        from .local_sgd import LocalSync

        return LocalSync(registry, hooks, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(RoundStrategy):
    """In a round the workers' mean drift from the last common point is the gradient of an outer Nesterov step from it.

    `outer_lr`, `outer_momentum`: that step's. `fragments=k`: a k-th of the model every `every`/k steps instead of all
    at once. `overlap`: so many steps are computed while a drift travels.
    """

    name: ClassVar[str] = "diloco"

    every: str | int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr takes a number above 0, not {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum takes a number from 0 to below 1, not {self.outer_momentum}")
        fewest = min(interval for _, interval in stages(self.every))
        if not 1 <= self.fragments <= fewest:
            raise ValueError(f"fragments takes a number from 1 to {fewest}, the steps of a round, not {self.fragments}")
        if not 0 <= self.overlap < fewest // self.fragments:
            raise ValueError(
                f"overlap takes a number of steps from 0 to below {fewest // self.fragments}, the steps from one "
                f"fragment to the next, not {self.overlap}"
            )
        if self.overlap and self.state != "keep":
            raise ValueError(f"state={self.state} needs a round that ends where it begins: leave overlap out")

    @property
    def averages_differences(self) -> bool:
        return True

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        from .local_sgd import LocalSync

        return LocalSync(registry, hooks, self)
