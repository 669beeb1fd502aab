"""Rounds: the synchronous steps. A parcel is updated by the mean of the gradients of all workers, or, with `backup=b`,
of all but the b slowest; with `clip_norm` the servers first tell each other the norms of their parts of that mean.

    Begin, Push …  ->  [chosen]  ->  mean of each parcel  ->  [norms -> factor]  ->  update  ->  Ready to the chosen
                                                            at the end of the step  ->  Ready(dropped) to the others

Where the workers of a host send one gradient for all of them, each says Begin and one of them pushes: it alone is
answered, and gives the others what it reads. A parcel of which rows travel is everybody's own as ever.

With backups server 0 chooses, and a worker is answered only between two steps: what it reads here is all of one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..monitor import spans
from ..parameters.hyperparameters import Hyper
from .keeper import Keeper, Out
from .layout import Chunk
from .messages import BeginStep, ChosenWorkers, ChunkReady, GradientNorm, Push
from .shelf import Gradient

if TYPE_CHECKING:
    from .state import Rules, WorkerState


@dataclasses.dataclass
class _Round:
    """One synchronous step: what is in so far."""

    begins: dict[int, BeginStep] = dataclasses.field(default_factory=dict)
    hyper: dict[int, Hyper | None] = dataclasses.field(default_factory=dict)
    pushes: dict[int, dict[int, Sequence[Gradient]]] = dataclasses.field(default_factory=dict)  # by parcel and worker
    complete: list[int] = dataclasses.field(default_factory=list)  # workers whose gradients are all in, as they came
    chosen: list[int] | None = None
    applied: set[int] = dataclasses.field(default_factory=set)
    means: dict[int, list[Gradient]] = dataclasses.field(default_factory=dict)  # kept until the norm is known
    squares: dict[int, float] = dataclasses.field(default_factory=dict)  # by server
    factor: float | None = None

    def forget(self, worker: int) -> None:
        """With those whose gradients would have come in this one's."""
        self.begins.pop(worker, None)
        for other in [other for other, begin in self.begins.items() if begin.carrier == worker]:
            self.forget(other)
        self.complete = [other for other in self.complete if other != worker]
        for pushes in self.pushes.values():
            pushes.pop(worker, None)

    def senders(self, parcel: Chunk) -> list[int]:
        """Those of the chosen whose gradients of this parcel come by themselves."""
        assert self.chosen is not None
        return [worker for worker in self.chosen if not parcel.whole or self.begins[worker].carrier < 0]


class SynchronousSteps:
    """The synchronous steps of server `number`. `workers` are the server's own, which it changes."""

    def __init__(
        self, keeper: Keeper, rules: Rules, workers: Mapping[int, WorkerState], number: int, num_servers: int
    ) -> None:
        self.now = 0  # the step that is next
        self.place = (0, 0)
        self._stop = self._stopped = False  # with backups: somebody wants to stop; the last step was closed after that
        self._keeper = keeper
        self._rules = rules
        self._workers = workers
        self._number = number
        self._num_servers = num_servers
        self._rounds: dict[int, _Round] = {}
        self._waiting: dict[int, list[ChunkReady]] = {}  # answers that are held back until the step is done
        self._asked: dict[int, list[ChunkReady]] = {}  # and those outside of a step

    # -- what comes ----------------------------------------------------------------------------------------------------

    def begin(self, worker: int, message: BeginStep, settings: Hyper | None) -> None:
        self._stop = self._stop or message.stop
        if message.step >= self.now:
            each = self._rounds.setdefault(message.step, _Round())
            each.begins[worker], each.hyper[worker] = message, settings

    def push(self, worker: int, parcel: Chunk, push: Push, gradients: Sequence[Gradient]) -> Out:
        """One that is too late is answered when all of that worker's are in, and the step under way is done."""
        if push.step < self.now:
            self._waiting.setdefault(worker, []).append(ChunkReady(push.step, parcel.number, [], dropped=True))
            return [] if self._workers[worker].missing else self._flush_dropped(worker)
        self._rounds.setdefault(push.step, _Round()).pushes.setdefault(parcel.number, {})[worker] = gradients
        return self._advance(push.step, (parcel.number,)) if self._workers[worker].missing else []

    def complete(self, worker: int, step: int) -> Out:
        """All gradients of the worker's step are in."""
        if step in self._rounds:
            self._rounds[step].complete.append(worker)
        return self._advance(step)

    def hear(self, server: int, message: ChosenWorkers | GradientNorm) -> Out:
        """What another server said."""
        if message.step < self.now:
            return []
        each = self._rounds.setdefault(message.step, _Round())
        if isinstance(message, ChosenWorkers):
            each.chosen = list(message.workers)
            self._excuse(each)
            return self._advance(message.step)
        if self._number == 0:
            each.squares[server] = message.squares
            return self._sum_norms(message.step)
        return self._clip(message.step, message.squares)

    def refresh(self, worker: int, readies: list[ChunkReady]) -> Out:
        """Answers outside of a step."""
        self._asked[worker] = readies
        return self._flush_asked()

    def leave(self, worker: int) -> Out:
        """It is gone. Gradients of a step that are all in stay; what was not complete is forgotten."""
        self._waiting.pop(worker, None)
        self._asked.pop(worker, None)
        for each in self._rounds.values():
            if worker not in each.complete:
                each.forget(worker)
            self._excuse(each)
        out: Out = []
        for step in sorted(self._rounds):
            out += self._advance(step)
        return out

    def rest(self) -> Out:
        """Somebody has left its loop: others may have waited for it."""
        return self._advance(self.now)

    def drop(self, worker: int, step: int) -> None:
        """The step will not take place: nobody can have finished it, since one worker never came."""
        self._waiting.pop(worker, None)
        each = self._rounds.get(step)
        if each is not None:
            each.forget(worker)
            if not each.begins:
                del self._rounds[step]

    @property
    def queue(self) -> int:
        """Gradients that are in and not applied."""
        return sum(
            len(pushes)
            for each in self._rounds.values()
            for number, pushes in each.pushes.items()
            if number not in each.applied
        )

    def awaited(self) -> list[int]:
        """Whose gradients are still to come."""
        each = self._rounds.get(self.now, _Round())
        return sorted(set(self._workers if each.chosen is None else each.chosen) - set(each.complete))

    # -- a step --------------------------------------------------------------------------------------------------------

    def _advance(self, step: int, parcels: Iterable[int] | None = None) -> Out:
        """Applies what can be applied of this step, and answers."""
        each = self._rounds.get(step)
        if each is None or step != self.now:
            return []
        out: Out = []
        if each.chosen is None:
            out += self._choose(step, each)
            if each.chosen is None:
                return out
        if not each.chosen:
            return out + self._close(step, each, "nobody is left whose gradients were chosen")
        if any(worker not in each.begins for worker in each.chosen):
            return out
        begin = each.begins[min(each.chosen)]
        mine = [parcel for parcel in self._keeper.shelf.part.parcels if parcel.optimizer == begin.optimizer]
        skipped = next((each.begins[w].nonfinite for w in each.chosen if each.begins[w].nonfinite), "")
        for number in [parcel.number for parcel in mine] if parcels is None else parcels:
            pushes, parcel = each.pushes.get(number, {}), self._keeper.shelf.part.parcels[number]
            pending = number not in each.applied and number not in each.means
            if pending and all(worker in pushes for worker in each.senders(parcel)):
                if skipped:
                    self._finish_parcel(each, parcel, [], skipped)
                elif self._rules.clip_norm is not None:
                    each.means[number] = self._mean(each, parcel)
                    continue
                else:
                    self._finish_parcel(each, parcel, self._mean(each, parcel), skipped)
                out += self._answer(each, step, parcel, skipped)
        if self._rules.clip_norm is not None and not skipped and each.factor is None:
            if len(each.means) == len(mine) and self._number not in each.squares:
                each.squares[self._number] = self._squares(each)
                if self._number:
                    return [*out, (("server", 0), GradientNorm(step, each.squares[self._number]))]
                return out + self._sum_norms(step)
            return out
        if len(each.applied) == len(mine) and all(w in each.complete for w in each.chosen):
            out += self._close(step, each, skipped)
        return out

    def _choose(self, step: int, each: _Round) -> Out:
        """Whose gradients make up this step: everybody's, or, with backups, those that server 0 had first.

        Who has no samples in this batch has nothing to add, so it neither counts nor is it waited for."""
        workers = list(self._workers)
        if not self._rules.backup:
            if all(worker in each.begins for worker in workers):
                each.chosen = sorted({*workers, *each.complete})
            return []
        if self._number or not each.complete:
            return []
        present = each.begins[each.complete[0]].present or len(workers)
        loop = each.begins[each.complete[0]].place[0]
        left = [
            state
            for state in self._workers.values()
            if state.begin and not state.inside and state.begin.place[0] >= loop
        ]
        needed = max(1, min(present, len(workers)) - max(self._rules.backup, len(left)))
        able = [worker for worker in each.complete if each.begins[worker].eligible and each.begins[worker].weight]
        if len(able) < needed:
            return []
        absent = [worker for worker in each.complete if not each.begins[worker].weight]
        each.chosen = sorted(able[:needed] + absent)
        self._keeper.record("chosen", step=step, workers=each.chosen, present=present)
        return [(("server", other), ChosenWorkers(step, each.chosen)) for other in range(1, self._num_servers)]

    def _excuse(self, each: _Round) -> None:
        """Those of the chosen that are gone before their gradients were here are not waited for."""
        if each.chosen is not None:
            each.chosen = [w for w in each.chosen if w in self._workers or w in each.complete]

    def _mean(self, each: _Round, parcel: Chunk) -> list[Gradient]:
        """Over the samples of the global batch; several backwards that piled up before a step add up."""
        assert each.chosen is not None
        begins = [each.begins[worker] for worker in each.chosen]
        total = math.fsum(begin.total for begin in begins)
        even = max(begin.count for begin in begins) / total if total else 0.0
        pushes = each.pushes[parcel.number]
        pairs = [(pushes[w], _factor(each.begins[w], parcel) * even) for w in each.senders(parcel)]
        if len(pairs) == 1 and pairs[0][1] == 1.0 and self._rules.clip_norm is None:
            return list(pairs[0][0])
        return self._keeper.shelf.mean(parcel, pairs)

    def _finish_parcel(self, each: _Round, parcel: Chunk, mean: Sequence[Gradient], skipped: str) -> None:
        assert each.chosen is not None
        each.applied.add(parcel.number)
        if not skipped:
            self._keeper.shelf.disturb()
            self._keeper.counts.parcels += 1
            self._keeper.counts.lags[0] += 1
            began = spans.clock() if spans.on else 0
            self._keeper.apply(parcel, mean, each.hyper[min(each.chosen)])
            if spans.on:
                spans.add(spans.SERVER, "update", began, blocks=parcel.numbers, workers=list(each.chosen))
            self._keeper.record("mean", step=self.now, parcel=parcel.number, workers=list(each.chosen))

    def _answer(self, each: _Round, step: int, parcel: Chunk, skipped: str) -> Out:
        """Everybody who sent something may read this parcel; with backups only when the whole step is done."""
        assert each.chosen is not None
        stop = any(each.begins[w].stop for w in each.chosen)
        buffers = any(each.begins[w].buffers for w in each.chosen)
        out: Out = []
        for worker in each.senders(parcel):
            if worker not in self._workers:
                continue
            ready = ChunkReady(step, parcel.number, [], now=step + 1, stop=stop, skipped=skipped, buffers=buffers)
            if self._rules.backup:
                self._waiting.setdefault(worker, []).append(ready)
            else:
                out += self._keeper.answer(worker, [ready])
        return out

    def _close(self, step: int, each: _Round, skipped: str) -> Out:
        assert each.chosen is not None
        begins = [each.begins[worker] for worker in each.chosen]
        self.now = step + 1
        self.place = max([self.place, *(begin.place for begin in begins)])
        self._stopped = self._stop
        self._keeper.counts.updates += not skipped
        self._keeper.counts.skipped += bool(skipped)
        self._keeper.shelf.rest(None if skipped else each.begins[min(each.chosen)].reaches)
        del self._rounds[step]
        out: Out = []
        if self._rules.backup:
            for worker in each.chosen:
                out += self._keeper.answer(worker, self._released(worker, self._waiting))
            out += self._drop_late(step, each)
        return out + self._flush_asked() + self._advance(self.now)

    def _flush_asked(self) -> Out:
        out: Out = []
        if not (self._rules.backup and self._is_torn()):
            for worker in list(self._asked):
                out += self._keeper.answer(worker, self._released(worker, self._asked))
        return out

    def _is_torn(self) -> bool:
        """Whether some parcels here are of one step, some of the next."""
        return any(each.applied for each in self._rounds.values())

    def _released(self, worker: int, held: dict[int, list[ChunkReady]]) -> list[ChunkReady]:
        waiting = held.pop(worker, [])
        for ready in waiting:
            ready.now, ready.place, ready.stop = self.now, self.place, self._stopped
        return waiting

    def _drop_late(self, step: int, each: _Round) -> Out:
        """Those of this step that were not chosen: what came of it is forgotten, and they may read on."""
        assert each.chosen is not None
        out: Out = []
        for worker, state in self._workers.items():
            if worker in each.chosen:
                continue
            numbers = [number for number, pushes in each.pushes.items() if worker in pushes]
            if numbers:
                self._waiting.setdefault(worker, []).extend(ChunkReady(step, n, [], dropped=True) for n in numbers)
            if not state.missing:
                out += self._flush_dropped(worker)
        return out

    def _flush_dropped(self, worker: int) -> Out:
        """Between steps, so that all parcels it reads here are of one step."""
        if not self._waiting.get(worker) or self._is_torn():
            return []
        waiting = self._released(worker, self._waiting)
        begin = self._workers[worker].begin
        if begin is not None and begin.weight:  # one without samples has lost nothing
            self._keeper.counts.dropped += 1
            self._keeper.record("dropped", worker=worker, step=waiting[0].step, now=self.now)
        return self._keeper.answer(worker, waiting)

    # -- clipping ------------------------------------------------------------------------------------------------------

    def _squares(self, each: _Round) -> float:
        total = 0.0
        for mean in each.means.values():
            for gradient in mean:
                if gradient is not None:
                    values = gradient._values() if gradient.is_sparse else gradient
                    wide = torch.promote_types(values.dtype, torch.float32)
                    total += float(torch.linalg.vector_norm(values, dtype=wide)) ** 2
        return total

    def _sum_norms(self, step: int) -> Out:
        """Server 0: once all servers have told theirs."""
        each = self._rounds[step]
        if len(each.squares) < self._num_servers:
            return []
        total = math.fsum(each.squares.values())
        out: Out = [(("server", other), GradientNorm(step, total)) for other in range(1, self._num_servers)]
        return out + self._clip(step, total)

    def _clip(self, step: int, squares: float) -> Out:
        each = self._rounds[step]
        assert each.chosen is not None and self._rules.clip_norm is not None
        each.factor = min(1.0, self._rules.clip_norm / (math.sqrt(squares) + 1e-6))
        out: Out = []
        for number, mean in list(each.means.items()):
            parcel = self._keeper.shelf.part.parcels[number]
            if each.factor < 1.0:
                mean = [None if g is None else g.mul_(each.factor) for g in mean]
            self._finish_parcel(each, parcel, mean, "")
            out += self._answer(each, step, parcel, "")
        return out + self._advance(step, ())


def _factor(begin: BeginStep, parcel: Chunk) -> float:
    if begin.factor is not None and parcel.whole:
        return begin.factor
    return begin.weight * begin.scale
