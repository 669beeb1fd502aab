"""One of the two ranks of `hora claims pipeline`: RESULT ROUNDS STEPS.

Both train the same small GPT on the same batch of 32 windows in every way in turn: as a pipeline of two stages under
both schedules of torch, with 1 to 8 micro-batches; as data parallel, 16 windows each, by Hora's ring and by torch's
DDP; and `free`, data parallel that never speaks, which is as fast as two processes can be. All ways live in the same
two processes, so nothing but the way differs. Round after round each takes a step that is not timed and then STEPS that
are; the order is rotated. Rank 0 writes what was found.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import hora
from hora_benchmarks.bench.models import GPT
from hora_benchmarks.claims.pipeline import BATCH, DRAWN, ROUND, STAGES, WAYS, name_of

LAYERS, WIDTH, HEADS, CONTEXT, WORDS = 4, 192, 4, 64, 128
FORWARD, BACKWARD, OTHER = range(3)  # other: the loss, the mean over micro-batches, the update
Span = tuple[float, float, float, float]  # kind, micro-batch, begin, end
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Embedded(nn.Module):
    """What comes before the blocks of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.token(codes) + self.position.weight[: codes.shape[1]]


def build() -> GPT:
    """The same on every call."""
    torch.manual_seed(0)
    return GPT(LAYERS, WIDTH, HEADS, CONTEXT, WORDS)


def split(model: GPT) -> tuple[nn.Sequential, nn.Sequential]:
    """Its two stages, of the same modules: half of the blocks each."""
    blocks = list(model.blocks)
    half = len(blocks) // 2
    return nn.Sequential(Embedded(model), *blocks[:half]), nn.Sequential(*blocks[half:], model.norm, model.head)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(WORDS, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Clock:
    """What this rank computed, and from when to when; clocks of one host agree."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def during(self, kind: int, micro_batch: int = 0) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spans.append((kind, micro_batch, begin, time.perf_counter()))

    @property
    def busy_s(self) -> float:
        return sum(end - begin for _, _, begin, end in self.spans)


class Stage(PipelineStage):
    """Notes what it computes; receiving and sending are the schedule's, outside."""

    clock: Clock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during(FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during(BACKWARD, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def scale_grads(self, grad_scale_factor: int) -> None:
        with self.clock.during(OTHER):
            super().scale_grads(grad_scale_factor)


class Way:
    """A way to train: `step` takes one, `clock` knows what this rank computed in it."""

    model: nn.Module
    exposed_s = 0.0  # of what the clock noted, communication

    def __init__(self) -> None:
        self.clock = Clock()

    def begin(self) -> None:
        self.clock.spans.clear()

    def optimize(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update(self) -> None:
        with self.clock.during(OTHER):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        raise NotImplementedError  # defined by each way


class Pipeline(Way):
    """Needs `job.process_group()`. `stage` is this rank's."""

    def __init__(self, schedule: str, micro_batches: int, rank: int) -> None:
        super().__init__()
        parts, (inputs, self.targets) = split(build()), batch()
        self.optimize(parts[rank])
        takes = inputs[: BATCH // micro_batches]
        for earlier in parts[:rank]:
            takes = earlier(takes)
        gives = self.model(takes)
        self.stage = Stage(self.model, rank, STAGES, torch.device("cpu"), input_args=takes, output_args=gives)
        self.stage.clock = self.clock
        self.inputs = [inputs] if rank == 0 else []
        self.schedule = SCHEDULES[schedule](self.stage, micro_batches, self._loss)

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.clock.during(OTHER):
            return loss_of(outputs, targets)

    def step(self) -> None:
        self.schedule.step(*self.inputs, target=self.targets if self.stage.is_last else None)
        self.update()


class DataParallel(Way):
    """Each rank has the whole model and its share of the batch. How gradients are averaged is the model's business."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inputs, self.targets = (half.chunk(STAGES)[rank].contiguous() for half in batch())
        self.optimize(build())

    def step(self) -> None:
        with self.clock.during(FORWARD):
            loss = loss_of(self.model(self.inputs), self.targets)
        with self.clock.during(BACKWARD):
            loss.backward()
        self.update()


class Ring(DataParallel):
    def __init__(self, job: hora.Job) -> None:
        super().__init__(job.rank)
        job.prepare(self.model, self.optimizer)
        self.traffic = job.traffic

    def begin(self) -> None:
        super().begin()
        self.traffic.reset()

    @property
    def exposed_s(self) -> float:  # type: ignore[override]
        return self.traffic.exposed_s


class DDP(DataParallel):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.model = nn.parallel.DistributedDataParallel(self.model)


def make(schedule: str, micro_batches: int, job: hora.Job) -> Way:
    if schedule in SCHEDULES:
        return Pipeline(schedule, micro_batches, job.rank)
    return {"ring": lambda: Ring(job), "ddp": lambda: DDP(job.rank), "free": lambda: DataParallel(job.rank)}[schedule]()


def main(path: str, rounds: str, steps: str) -> None:
    torch.set_num_threads(1)
    job = hora.init()
    job.process_group("gloo")
    ways = {way: make(*way, job) for way in WAYS}
    rows: dict[Any, dict[str, Any]] = {
        way: {"schedule": way[0], "micro_batches": way[1], "step_s": [], "busy_s": []} for way in WAYS
    }
    for number in range(int(rounds)):
        for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
            found = _measure(ways[way], int(steps), job)
            rows[way]["step_s"].append(max(found[:, 0].tolist()))
            rows[way]["busy_s"].append(found[:, 1].tolist())
        if job.rank == 0:
            print(f"{ROUND} {number + 1} of {rounds}", flush=True)
    for way in WAYS:
        spans = job.group.gather(torch.tensor(_middle_step(ways[way].clock), dtype=torch.float64))
        if spans is not None:
            rows[way]["order"] = [_order(one) for one in spans]
            if name_of(*way) in DRAWN:
                rows[way]["timeline"] = [one.tolist() for one in spans]
    if job.rank == 0:
        pathlib.Path(path).write_text(json.dumps(list(rows.values())))


def _measure(way: Way, steps: int, job: hora.Job) -> torch.Tensor:
    """Of both ranks: seconds and seconds of computing per step."""
    hora.barrier()
    way.step()
    way.begin()
    begin = time.perf_counter()
    for _ in range(steps):
        way.step()
    seconds = time.perf_counter() - begin
    mine = torch.tensor([seconds / steps, (way.clock.busy_s - way.exposed_s) / steps])
    return torch.stack(job.group.all_gather(mine))


def _middle_step(clock: Clock) -> list[Span]:
    """Of the last round the step that took rank 0 a middling time. A step begins with its first forward."""
    firsts = [number for number, span in enumerate(clock.spans) if span[:2] == (FORWARD, 0)]
    steps = [clock.spans[begin:end] for begin, end in itertools.pairwise([*firsts, len(clock.spans)])]
    by_time = sorted(range(len(steps)), key=lambda number: steps[number][-1][3] - steps[number][0][2])
    return steps[int(hora.broadcast(torch.tensor(by_time[len(steps) // 2])))]


def _order(spans: torch.Tensor) -> list[str]:
    """As F0 F1 B0 B1."""
    return [f"{'FB'[int(kind)]}{int(part)}" for kind, part, *_ in spans.tolist() if kind != OTHER]


if __name__ == "__main__":
    main(*sys.argv[1:])
