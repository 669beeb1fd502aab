"""The strategies `local` (Local SGD) and `diloco`: workers train alone, and average their parameters in rounds."""

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
    """Options of both.

    `every`: local steps in a round; 4/8@100/16@1000 is a schedule: 4, from step 100 on 8, from step 1000 on 16.
    `warmup`: steps with the mean gradient of all workers before the first round. `pace`: steps (every worker takes
    `every` steps in a round) or time (workers take as many as they can in the same time, `every` on average; samples
    are then leased). `state`: what a round does to the optimizers' state: keep (each worker its own), average, or
    reset. `algorithm`: of the all-reduce. `wire`: how pseudo-gradients are sent between hosts: fp32, fp16, bf16, int8,
    or topk: the largest `topk` of them (default 0.01). What compression loses is added to the next pseudo-gradient.
    """

    unit: ClassVar[str] = "round"
    topology = "rounds"

    # Options that only one of the two has:
    via = "workers"  # which take the mean: the workers, or servers (ps)
    outer_lr = 1.0  # of the outer step with the mean pseudo-gradient; 1 makes the anchors the mean of the workers
    outer_momentum = 0.0
    fragments = 1  # in which a round exchanges the model
    overlap = 0  # steps that are taken during an exchange

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
            raise ValueError(f"algorithm cannot be chosen with wire={self.wire}, which has an all-reduce of its own")

    def _one_of(self, option: str, known: Sequence[str]) -> None:
        if getattr(self, option) not in known:
            raise ValueError(f"{option}={getattr(self, option)!r} is unknown; there are: {', '.join(known)}")

    @property
    def averages_differences(self) -> bool:
        """Whether workers average pseudo-gradients rather than parameters."""
        return self.wire != "fp32"

    @property
    def leased(self) -> bool:
        return self.pace == "time"

    def interval(self, step: int) -> int:
        """Local steps of the round that begins after `step`."""
        return [interval for begin, interval in stages(self.every) if begin <= step][-1]

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        from .local_sgd import LocalSync

        return LocalSync(registry, hooks, self)


def stages(every: str | int) -> list[tuple[int, int]]:
    """The schedule `every` as (first step, interval) pairs. ValueError if it is not one."""
    found = []
    for number, part in enumerate(str(every).split("/")):
        match = re.fullmatch(r"(\d+)" + (r"@(\d+)" if number else ""), part.strip())
        if match is None or not int(match[1]):
            raise ValueError(
                f"every takes a number of steps, 1 or more, or a schedule as 4/8@100/16@1000, not {every!r}"
            )
        found.append((int(match[2]) if number else 0, int(match[1])))
    if [begin for begin, _ in found] != sorted({begin for begin, _ in found}):
        raise ValueError(f"every={every}: later stages of a schedule must begin at later steps")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(RoundStrategy):
    """A round averages the parameters, weighted by the samples of each worker.

    `via`: workers (all-reduce) or ps (servers keep and average the model). `barrier=false`, with via=ps: a worker
    pushes after its own `every` steps, weighted by its share of the samples, and goes on from the result without
    waiting for others. `block_bytes`: with via=ps, the largest piece of a parameter that is sent on its own.
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
                raise ValueError("barrier=false has an effect only with via=ps: an all-reduce needs every worker")
            if self.block_bytes != BLOCK_BYTES:
                raise ValueError("block_bytes has an effect only with via=ps")
            return
        if self.wire != "fp32":
            raise ValueError(f"wire={self.wire} compresses what workers send to each other: leave wire or via=ps out")
        if self.algorithm != "auto":
            raise ValueError("algorithm cannot be chosen with via=ps: the servers compute the mean")
        if not self.barrier:
            for option, idle in (("warmup", 0), ("pace", "steps"), ("state", "keep")):
                if getattr(self, option) != idle:
                    raise ValueError(f"{option} needs rounds in which all workers take part: leave barrier=false out")
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
        """The servers' side: a pseudo-gradient is the gradient of a step of rate 1."""
        return PS(mode="sync" if self.barrier else "async", block_bytes=self.block_bytes)

    def rules(self) -> Rules:
        return self.servers().rules()

    def served(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        import torch

        parameters = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
        return [torch.optim.SGD(list(parameters.values()), lr=1.0)]

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        if self.barrier:
            return super().sync(registry, hooks)
        from .async_local_sgd import AsyncLocalSync

        return AsyncLocalSync(registry, hooks, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(RoundStrategy):
    """A round averages the workers' pseudo-gradients (anchor minus parameters), and takes an outer Nesterov step.

    `outer_lr`, `outer_momentum`: of that step. `fragments=k`: a k-th of the model every `every`/k steps instead of all
    of it at once. `overlap`: local steps that are taken during an exchange.
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
            raise ValueError(f"state={self.state} needs exchanges during which no step is taken: leave overlap out")

    @property
    def averages_differences(self) -> bool:
        return True
