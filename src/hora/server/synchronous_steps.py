"""SynchronousSteps: the steps of mode=sync. A chunk is updated with the mean of all workers' gradients; with `backup=b`
of all but the b slowest; with `clip_norm` the servers first exchange the norms of their parts of that mean.

    BeginStep, Push …  ->  [choose]  ->  mean per chunk  ->  [norms -> factor]  ->  update  ->  ChunkReady to the chosen
                                                at the end of the step  ->  ChunkReady(dropped) to the others

Where the workers of a host push one gradient (HostAggregation), each sends BeginStep and one of them pushes. Only that
one is answered; it gives the others what it reads. Chunks of which rows travel are pushed by every worker.

With backups server 0 chooses, and workers are answered between two steps only: what they read here is all of one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..monitor import spans
from ..parameters.hyperparameters import Hyper
from .layout import Chunk
from .messages import BeginStep, ChosenWorkers, ChunkReady, GradientNorm, Push
from .store import Gradient, Outbox, ParameterStore

if TYPE_CHECKING:
    from .state import Rules, WorkerState


@dataclasses.dataclass
class _Step:
    """What has arrived of one step."""

    number: int
    begins: dict[int, BeginStep] = dataclasses.field(default_factory=dict)
    hyper: dict[int, Hyper | None] = dataclasses.field(default_factory=dict)
    pushes: dict[int, dict[int, Sequence[Gradient]]] = dataclasses.field(default_factory=dict)  # by chunk and worker
    complete: list[int] = dataclasses.field(default_factory=list)  # workers whose pushes have all arrived, in order
    chosen: list[int] | None = None
    applied: set[int] = dataclasses.field(default_factory=set)  # chunks
    means: dict[int, list[Gradient]] = dataclasses.field(default_factory=dict)  # by chunk, until the norm is known
    squares: dict[int, float] = dataclasses.field(default_factory=dict)  # by server
    clipped: bool = False

    def forget(self, worker: int) -> None:
        """Discards what came of this worker, and of those whose gradients would have come in its pushes."""
        self.begins.pop(worker, None)
        for other in [other for other, begin in self.begins.items() if begin.carrier == worker]:
            self.forget(other)
        self.complete = [other for other in self.complete if other != worker]
        for pushes in self.pushes.values():
            pushes.pop(worker, None)

    def senders(self, chunk: Chunk) -> list[int]:
        """The chosen workers that push this chunk themselves."""
        assert self.chosen is not None
        return [worker for worker in self.chosen if not chunk.dense or self.begins[worker].carrier < 0]


class SynchronousSteps:
    """The synchronous steps of server `number`. `workers` belongs to ServerState, which changes it."""

    def __init__(
        self,
        store: ParameterStore,
        rules: Rules,
        workers: Mapping[int, WorkerState],
        number: int,
        num_servers: int,
        record: Callable[..., None],
    ) -> None:
        self.now = 0  # the next step
        self._place = (0, 0)  # the newest batch: (loop, batch)
        self._stop = self._stopped = False  # with backups: a worker wants to stop; the same at the end of the last step
        self._store = store
        self._rules = rules
        self._workers = workers
        self._number = number
        self._num_servers = num_servers
        self._record = record
        self._steps: dict[int, _Step] = {}
        self._waiting: dict[int, list[ChunkReady]] = {}  # by worker: answers to send when the step is done
        self._refreshes: dict[int, list[ChunkReady]] = {}  # by worker: answers outside of a step

    # -- messages ------------------------------------------------------------------------------------------------------

    def begin(self, worker: int, message: BeginStep, hyper: Hyper | None) -> None:
        self._stop = self._stop or message.stop
        if message.step >= self.now:
            step = self._get(message.step)
            step.begins[worker], step.hyper[worker] = message, hyper

    def push(self, worker: int, chunk: Chunk, push: Push, gradients: Sequence[Gradient]) -> Outbox:
        """A late push is answered when all of that worker's have arrived and the current step is done."""
        if push.step < self.now:
            self._waiting.setdefault(worker, []).append(ChunkReady(push.step, chunk.number, [], dropped=True))
            return [] if self._workers[worker].missing else self._flush_dropped(worker)
        self._get(push.step).pushes.setdefault(chunk.number, {})[worker] = gradients
        return self._advance(push.step, (chunk.number,)) if self._workers[worker].missing else []

    def complete(self, worker: int, number: int) -> Outbox:
        """All pushes of the worker's step have arrived."""
        if number in self._steps:
            self._steps[number].complete.append(worker)
        return self._advance(number)

    def on_server_message(self, server: int, message: ChosenWorkers | GradientNorm) -> Outbox:
        if message.step < self.now:
            return []
        step = self._get(message.step)
        if isinstance(message, ChosenWorkers):
            step.chosen = list(message.workers)
            self._drop_lost(step)
            return self._advance(message.step)
        if self._number == 0:
            step.squares[server] = message.squares
            return self._sum_norms(step)
        return self._clip(step, message.squares)

    def refresh(self, worker: int, readies: list[ChunkReady]) -> Outbox:
        """Answers outside of a step."""
        self._refreshes[worker] = readies
        return self._flush_refreshes()

    def leave(self, worker: int) -> Outbox:
        """The worker is gone. A step keeps its gradients if they have all arrived."""
        self._waiting.pop(worker, None)
        self._refreshes.pop(worker, None)
        for step in self._steps.values():
            if worker not in step.complete:
                step.forget(worker)
            self._drop_lost(step)
        return [sent for number in sorted(self._steps) for sent in self._advance(number)]

    def leave_loop(self) -> Outbox:
        """A worker has left its loop: others may have waited for it."""
        return self._advance(self.now)

    def drop(self, worker: int, number: int) -> None:
        """The step will not take place: no worker can have finished it, since one never pushed."""
        self._waiting.pop(worker, None)
        step = self._steps.get(number)
        if step is not None:
            step.forget(worker)
            if not step.begins:
                del self._steps[number]

    @property
    def queue(self) -> int:
        """How many pushes have arrived and are not applied."""
        return sum(
            len(pushes)
            for step in self._steps.values()
            for chunk, pushes in step.pushes.items()
            if chunk not in step.applied
        )

    def awaited(self) -> list[int]:
        """The ranks whose gradients are missing."""
        step = self._steps.get(self.now, _Step(self.now))
        return sorted(set(self._workers if step.chosen is None else step.chosen) - set(step.complete))

    def _get(self, number: int) -> _Step:
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = _Step(number)
        return step

    # -- a step --------------------------------------------------------------------------------------------------------

    def _advance(self, number: int, chunks: Iterable[int] | None = None) -> Outbox:
        """Applies what can be applied of this step, or of these chunks, and answers."""
        step = self._steps.get(number)
        if step is None or number != self.now:
            return []
        out: Outbox = []
        if step.chosen is None:
            out += self._choose(step)
            if step.chosen is None:
                return out
        if not step.chosen:
            return out + self._close(step, "none of the chosen workers is left")
        if any(worker not in step.begins for worker in step.chosen):
            return out
        optimizer = step.begins[min(step.chosen)].optimizer
        mine = [chunk for chunk in self._store.part.chunks if chunk.optimizer == optimizer]
        skipped = next((step.begins[w].nonfinite for w in step.chosen if step.begins[w].nonfinite), "")
        for chunk in mine if chunks is None else [self._store.part.chunks[each] for each in chunks]:
            pushes = step.pushes.get(chunk.number, {})
            pending = chunk.number not in step.applied and chunk.number not in step.means
            if pending and all(worker in pushes for worker in step.senders(chunk)):
                mean = [] if skipped else self._mean(step, chunk)
                if self._rules.clip_norm is not None and not skipped:
                    step.means[chunk.number] = mean
                else:
                    out += self._apply(step, chunk, mean, skipped)
        if self._rules.clip_norm is not None and not skipped and not step.clipped:
            if len(step.means) == len(mine) and self._number not in step.squares:
                step.squares[self._number] = _sum_of_squares(step.means.values())
                if self._number:
                    return [*out, (("server", 0), GradientNorm(number, step.squares[self._number]))]
                return out + self._sum_norms(step)
            return out
        if len(step.applied) == len(mine) and all(w in step.complete for w in step.chosen):
            out += self._close(step, skipped)
        return out

    def _choose(self, step: _Step) -> Outbox:
        """Whose gradients make up this step: all workers', or, with backups, those that server 0 received first.

        A worker without samples in this batch contributes nothing: it neither counts nor is it waited for."""
        workers = list(self._workers)
        if not self._rules.backup:
            if all(worker in step.begins for worker in workers):
                step.chosen = sorted({*workers, *step.complete})
            return []
        if self._number or not step.complete:
            return []
        first = step.begins[step.complete[0]]
        present = first.present or len(workers)
        left = sum(
            state.begin is not None and not state.in_loop and state.begin.place[0] >= first.place[0]
            for state in self._workers.values()
        )
        needed = max(1, min(present, len(workers)) - max(self._rules.backup, left))
        able = [worker for worker in step.complete if step.begins[worker].eligible and step.begins[worker].weight]
        if len(able) < needed:
            return []
        absent = [worker for worker in step.complete if not step.begins[worker].weight]
        step.chosen = sorted(able[:needed] + absent)
        self._record("chosen", step=step.number, workers=step.chosen, present=present)
        return [(("server", other), ChosenWorkers(step.number, step.chosen)) for other in range(1, self._num_servers)]

    def _drop_lost(self, step: _Step) -> None:
        """Chosen workers that were lost before all their gradients arrived are not waited for."""
        if step.chosen is not None:
            step.chosen = [w for w in step.chosen if w in self._workers or w in step.complete]

    def _mean(self, step: _Step, chunk: Chunk) -> list[Gradient]:
        """Over the samples of the global batch; gradients accumulated over several backwards add up."""
        assert step.chosen is not None
        begins = [step.begins[worker] for worker in step.chosen]
        total = math.fsum(begin.total for begin in begins)
        even = max(begin.count for begin in begins) / total if total else 0.0
        pushes = step.pushes[chunk.number]
        terms = [(pushes[w], _factor(step.begins[w], chunk) * even) for w in step.senders(chunk)]
        if len(terms) == 1 and terms[0][1] == 1.0 and self._rules.clip_norm is None:
            return list(terms[0][0])
        return self._store.weighted_sum(chunk, terms)

    def _apply(self, step: _Step, chunk: Chunk, mean: Sequence[Gradient], skipped: str) -> Outbox:
        """Updates a chunk, and lets the workers that pushed it read it; with backups when the whole step is done."""
        assert step.chosen is not None
        step.applied.add(chunk.number)
        if not skipped:
            self._store.begin_step()
            self._store.counts.lags[0] += 1
            began = spans.clock() if spans.on else 0
            self._store.apply(chunk, mean, step.hyper[min(step.chosen)])
            spans.add(spans.SERVER, "update", began, blocks=chunk.block_numbers, workers=step.chosen)
            self._record("mean", step=self.now, chunk=chunk.number, workers=list(step.chosen))
        stop = any(step.begins[w].stop for w in step.chosen)
        buffers = any(step.begins[w].buffers for w in step.chosen)
        out: Outbox = []
        for worker in step.senders(chunk):
            if worker not in self._workers:
                continue
            ready = ChunkReady(
                step.number, chunk.number, [], now=step.number + 1, stop=stop, skipped=skipped, buffers=buffers
            )
            if self._rules.backup:
                self._waiting.setdefault(worker, []).append(ready)
            else:
                out += self._store.answer(worker, [ready])
        return out

    def _close(self, step: _Step, skipped: str) -> Outbox:
        assert step.chosen is not None
        self.now = step.number + 1
        self._place = max([self._place, *(step.begins[worker].place for worker in step.chosen)])
        self._stopped = self._stop
        self._store.counts.updates += not skipped
        self._store.counts.skipped += bool(skipped)
        self._store.end_step(None if skipped else step.begins[min(step.chosen)].reaches)
        del self._steps[step.number]
        out: Outbox = []
        if self._rules.backup:
            for worker in step.chosen:
                out += self._store.answer(worker, self._release(worker, self._waiting))
            out += self._drop_late(step)
        return out + self._flush_refreshes() + self._advance(self.now)

    def _flush_refreshes(self) -> Outbox:
        out: Outbox = []
        if not (self._rules.backup and self._is_torn()):
            for worker in list(self._refreshes):
                out += self._store.answer(worker, self._release(worker, self._refreshes))
        return out

    def _is_torn(self) -> bool:
        """Whether some chunks here belong to one step and some to the next."""
        return any(step.applied for step in self._steps.values())

    def _release(self, worker: int, held: dict[int, list[ChunkReady]]) -> list[ChunkReady]:
        readies = held.pop(worker, [])
        for ready in readies:
            ready.now, ready.place, ready.stop = self.now, self._place, self._stopped
        return readies

    def _drop_late(self, step: _Step) -> Outbox:
        """Workers of this step that were not chosen: their gradients are dropped, and they may read on."""
        assert step.chosen is not None
        out: Outbox = []
        for worker, state in self._workers.items():
            if worker in step.chosen:
                continue
            pushed = [chunk for chunk, pushes in step.pushes.items() if worker in pushes]
            if pushed:
                dropped = [ChunkReady(step.number, chunk, [], dropped=True) for chunk in pushed]
                self._waiting.setdefault(worker, []).extend(dropped)
            if not state.missing:
                out += self._flush_dropped(worker)
        return out

    def _flush_dropped(self, worker: int) -> Outbox:
        """Between steps, so that all chunks that it reads here belong to one step."""
        if not self._waiting.get(worker) or self._is_torn():
            return []
        readies = self._release(worker, self._waiting)
        begin = self._workers[worker].begin
        if begin is not None and begin.weight:  # a worker without samples has lost nothing
            self._store.counts.dropped += 1
            self._record("dropped", worker=worker, step=readies[0].step, now=self.now)
        return self._store.answer(worker, readies)

    # -- clipping ------------------------------------------------------------------------------------------------------

    def _sum_norms(self, step: _Step) -> Outbox:
        """On server 0, once all servers have sent theirs."""
        if len(step.squares) < self._num_servers:
            return []
        total = math.fsum(step.squares.values())
        others = range(1, self._num_servers)
        return [*((("server", other), GradientNorm(step.number, total)) for other in others), *self._clip(step, total)]

    def _clip(self, step: _Step, squares: float) -> Outbox:
        assert step.chosen is not None and self._rules.clip_norm is not None
        step.clipped = True
        factor = min(1.0, self._rules.clip_norm / (math.sqrt(squares) + 1e-6))
        out: Outbox = []
        for number, mean in list(step.means.items()):
            if factor < 1.0:
                mean = [None if g is None else g.mul_(factor) for g in mean]
            out += self._apply(step, self._store.part.chunks[number], mean, "")
        return out + self._advance(step.number, ())


def _sum_of_squares(means: Iterable[Sequence[Gradient]]) -> float:
    total = 0.0
    for gradient in (gradient for mean in means for gradient in mean if gradient is not None):
        values = gradient._values() if gradient.is_sparse else gradient
        wide = torch.promote_types(values.dtype, torch.float32)
        total += float(torch.linalg.vector_norm(values, dtype=wide)) ** 2
    return total


def _factor(begin: BeginStep, chunk: Chunk) -> float:
    return begin.factor if begin.factor is not None and chunk.dense else begin.weight * begin.scale
