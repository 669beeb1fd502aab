"""Served: a worker whose parameters are the servers'. At a step it pushes its gradients and pulls the result.

    backward      as in plain PyTorch: `p.grad` is this worker's own, to be clipped or looked at
    open_step     the gradients go to the servers, chunk by chunk, and the parameters come back
    step()        finds its groups empty: the optimizer's state is the servers', and so is the update
    after_step    the groups hold the parameters again

In plain sync the workers step together, so all that is said of loops, absent workers and stopping holds as it does for
the all-reduce family (`lockstep`). Otherwise a worker goes its own way: it tells the servers when it begins and ends to
train, so that nobody waits for one that does not.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters import hyperparameters, optimizer_state
from ...parameters.registry import ParameterRegistry
from ...server.client import ServerClient
from ...server.embedding import server_embeddings
from ...server.layout import ParameterBlock
from ...server.messages import BeginStep, ChunkReady
from ...server.store import pack, unpack
from ..common import nonfinite
from ..common.local_gradients import LocalGradients
from ..common.sync import ExchangeCancelled, Snapshot, StepOutcome
from .connections import ServerConnections
from .flat_parameters import FlatParameters
from .server_state import ServerStateArchive

if TYPE_CHECKING:
    from .config import PS

log = logging.getLogger(__name__)

STANDING = "standing"  # under which rank 0's share of what no server has is kept
CATCH_UPS = 20  # how often a worker that was left behind reads again until all servers are at one step


class ParameterServerSync(LocalGradients):
    def __init__(self, roster: ParameterRegistry, strategy: PS, held: ParameterRegistry | None = None) -> None:
        """`held`: the model with what updates it on the servers, where that is not the user's optimizers."""
        super().__init__(roster)
        self._held = held or roster
        self.strategy = strategy
        self.lockstep = self.together = strategy.mode == "sync" and not strategy.backup
        self.unison = strategy.mode == "sync"
        self.num_dropped = 0
        self.jumped = 0  # steps of the others that a dropped gradient's worker has missed
        self._place = (0, 0)  # which batch of which loop is under way
        self._present = 0  # how many workers have samples in it
        self._passed = (-1, -1)  # the batch up to which the others have come
        self._lags = (0, 0)  # their sum and number since `notes` was asked
        self._lag: float | None = None  # the mean of the newest step
        self._outline = {id(each): [len(group["params"]) for group in each.param_groups] for each in roster.optimizers}
        self._spent: tuple[float, float, int] | None = None  # what the pile was at an optimizer's step, for the others'
        self._outpost: ServerConnections
        self._client: ServerClient
        self._flats: FlatParameters
        self._archive: ServerStateArchive
        self._tables = {roster.index[id(table.rows)]: table for table in server_embeddings(roster.models)}
        if self._tables and (strategy.backup or strategy.correct == "dc"):
            option = "backup" if strategy.backup else "correct=dc"
            raise ValueError(f"{option} needs a copy of what a worker has read, and of a ServerEmbedding nobody keeps "
                             "one: leave one of them out")  # fmt: skip
        self._step = 0  # as the servers count
        self._told: hyperparameters.Hyper | None = None  # the hyper-parameters that the servers know
        self._pushed = False  # a step was pushed whose result is still to be read
        self._eligible = True
        self._num_pushes = 0
        self._swapped: list[list[torch.Tensor]] = []
        self._buffer_versions: list[tuple[int, int]] = []
        self._culprit = ""
        self._scale = 1.0
        self._waits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # around a step

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        access = self.access
        for option in ("sync_every", "backup"):
            if getattr(self.strategy, option) and len(self.roster.optimizers) > 1:
                raise ValueError(f"{option} counts the steps of one optimizer, and job.prepare() got several")
        if self.strategy.backup >= access.size > 1:
            raise ValueError(f"backup={self.strategy.backup} of {access.size} workers leaves nobody to step with")
        self.home = group
        if not access.joined:
            self.roster.agree(group)
        if self.lockstep and group.size > 1:
            self.group = group.clone()
            self.group.describe_wait = self._doing
        self._outpost = ServerConnections(
            access, self._held, self.strategy.rules(), self.strategy.block_bytes, self._check, self._tables
        )
        self._client, self._flats = self._outpost.client, self._outpost.flats
        if group.deadlocks is not None and self.lockstep:
            self._client.pool.on_slow_wait = group.deadlocks.on_long_wait
            self._waits = group.deadlocks.scope("servers", self._doing, lambda: self._num_pushes)
        if self.lockstep:
            self._outpost.gather_mates(group)
        self._archive = ServerStateArchive(self.roster, self._client)
        if access.rank == 0:
            self._client.fill_parameters(self._flats.values)
            self._keep_standing()
        if access.joined:
            self._take_standing(self._client.get_blob(0, STANDING))
        else:
            group.barrier("the servers have rank 0's parameters")
        if access.rank == 0:
            access.control.put("bound", b"yes")  # from now on the run can do without a worker
        self._refresh()
        self._buffer_versions = self.roster.signature()
        self._backward.hook()
        for index, table in self._tables.items():
            table.attach(functools.partial(self._client.look_up, index), self._backward.join_in)

    def _check(self) -> None:
        """While this worker waits for a server: is there still something to wait for?"""
        if self.group is not None:
            (self.home if self.halted else self.group).transport.check()  # a halt ends steps, and nothing else

    def unbind(self) -> None:
        for table in self._tables.values():
            table.detach()
        self._backward.unhook()
        self._client.close()
        if self.group is not None:
            self.group.close()
            self.group = None

    def abort(self, cause: HoraError) -> None:
        super().abort(cause)
        self._outpost.abort(cause)

    def linger(self) -> None:
        self._outpost.linger()

    # -- backward ------------------------------------------------------------------------------------------------------

    def weigh(self, weight: float, expected: float) -> None:
        super().weigh(weight, expected)
        self._spent = None

    def after_backward(self) -> None:
        for table in self._tables.values():
            table.gather()
        super().after_backward()

    def rescaled(self) -> None:
        """In sync all workers' scalers must find the same; `combine` sees to that."""

    def combine(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """A scaler has looked for infinities: what one worker found counts for all that step with it."""
        if self.group is not None:
            for each in found:
                host = each.detach().cpu().clone()
                self.group.all_reduce(host, "max", name="found_inf")
                each.copy_(host)

    # -- the step ------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.roster.check_optimizer(optimizer)
        self._check_groups(optimizer)
        if self.halted:
            self.drop()
            return False
        found = getattr(optimizer, "found_inf", None)  # a scaler's words to a fused optimizer
        if found is not None and bool(found):
            self._pile.clear()
            return False
        scale = getattr(optimizer, "grad_scale", None)
        self._scale = 1.0 / float(scale) if scale is not None else 1.0
        mine = self._own(optimizer)
        self._verdict = StepOutcome(stop=self._verdict.stop and not self.lockstep)
        culprit = self._nonfinite(mine, self.access.name)
        if culprit and not self.lockstep:
            return self._lament(culprit)
        self._culprit = culprit
        if not self.lockstep:
            return True
        try:
            self.num_exchanges += 1
            self.exchanging = True
            self.before_exchange()
            self.exchanging = False
        except ExchangeCancelled as halt:
            self.halted = str(halt)
            self.drop()
            return False
        return True

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        if [len(group["params"]) for group in optimizer.param_groups] != self._outline[id(optimizer)]:
            raise HoraError(
                f"{type(optimizer).__name__} has got a parameter since job.prepare(), and the servers have none of it: "
                "complete the optimizer first, then prepare it"
            )

    def _lament(self, text: str) -> bool:
        self._pile.clear()
        self._verdict.skipped = text
        if self.on_nonfinite == "raise":
            raise HoraError(f"{text} {nonfinite.ADVICE}")
        if self.access.rank == 0 or not self.lockstep:
            log.warning("%s: this step is not taken", text)
        return False

    def open_step(self, optimizer: torch.optim.Optimizer) -> None:
        with self._timed():
            self._flats.collect(optimizer)
            self.push_pull(self.roster.optimizers.index(optimizer), self._flats.gradient)
            self._flats.clear()
        self._pile.clear()
        self._absent = False
        if self._verdict.skipped:
            return
        for group in optimizer.param_groups:
            self._swapped.append(group["params"])
            group["params"] = []

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """What happens inside is communication."""
        begin_s, pushed_bytes = time.perf_counter(), self._client.pushed_bytes
        yield
        seconds = time.perf_counter() - begin_s
        self.traffic.num_exchanges += 1
        self.traffic.comm_s += seconds
        self.traffic.exposed_s += seconds
        self.traffic.sent_bytes += self._client.pushed_bytes - pushed_bytes

    def push_pull(self, number: int, gradient: Callable[[ParameterBlock], torch.Tensor | None]) -> None:
        """One step of optimizer `number`: every block's gradient to its server, every block's parameters back."""
        if self._pushed:
            self._client.freeze_base_versions()
            self._conclude(self._client.pull())
        self._num_pushes += 1
        self._pushed = True  # in part, if it is broken off
        with self._waits:
            self._client.push(self._begin(number), gradient, defer=self.strategy.prefetch)
            if not self.strategy.prefetch:
                self._conclude(self._client.pull())

    def _doing(self) -> str:
        return f"the servers' update of step {self.steps + 1}"

    def _begin(self, number: int) -> BeginStep:
        settings = hyperparameters.read(self.roster.optimizers)
        told, self._told = self._told, settings
        pile, strategy = self._pile, self.strategy
        if pile:
            self._spent = (pile.total, pile.total_expected, pile.count)
        total, expected, count = self._spent or (pile.weight, pile.weight, 1)
        weight, scale = pile.weight, self._scale
        if self._absent and not pile:
            weight = total = 0.0
            count = 0
        if strategy.mode != "sync":
            scale *= total / expected if expected else 1.0
            scale *= self._clipping()
        self.roster.refresh_buffers()
        changed = self.access.rank == 0 and self.roster.signature() != self._buffer_versions
        return BeginStep(
            self._step,
            number,
            0,
            weight=weight,
            total=total,
            count=count,
            scale=scale,
            hyper=None if settings == told else settings,
            nonfinite=self._culprit,
            stop=self.stop_wanted,
            buffers=changed and self.group is not None,
            present=self._present or self.access.size,
            place=self._place,
            eligible=self._eligible,
            reaches=self.steps + (number == 0),
        )

    def _clipping(self) -> float:
        """What `clip_norm` multiplies this gradient by: alone, a worker has all of it."""
        if self.strategy.clip_norm is None:
            return 1.0
        norm = self._flats.norm() * self._scale
        return min(1.0, self.strategy.clip_norm / (norm + 1e-6))

    def _conclude(self, readies: list[ChunkReady]) -> None:
        """The step's result is here: what the servers said of it."""
        self._pushed = False
        self._flats.scatter()
        self._pulled()
        self._step += 1
        lags = self._client.lags
        self._lags = (self._lags[0] + sum(lags), self._lags[1] + len(lags))
        if lags and self.strategy.mode != "sync":
            self._lag = sum(lags) / len(lags)
        if self.strategy.sync_every:
            self._client.acknowledge(self._step)
        if self.strategy.mode == "sync":
            self._conclude_sync(readies)

    def _conclude_sync(self, readies: list[ChunkReady]) -> None:
        skipped = next((ready.skipped for ready in readies if ready.skipped), "")
        if self.strategy.backup:
            if any(ready.dropped for ready in readies) and not self._absent:
                self.num_dropped += 1
                if self.num_dropped & (self.num_dropped - 1) == 0:  # the first, the second, the fourth, …
                    log.warning("%s came late to step %d: its gradient was dropped, the %s",
                                self.access.name, self._step - 1, _nth(self.num_dropped))  # fmt: skip
            readies = self._catch_up(readies)
        self._verdict.stop = any(ready.stop for ready in readies)
        if any(ready.buffers for ready in readies) and self.group is not None:
            ParameterRegistry.broadcast(list(self.roster.buffers.values()), self.group)
            self._buffer_versions = self.roster.signature()
        if skipped:
            self._lament(skipped)

    def _catch_up(self, readies: list[ChunkReady]) -> list[ChunkReady]:
        """Other workers may be further: this one goes on where they are. What the servers said last."""
        tries = 0
        while len({ready.now for ready in readies}) > 1 and tries < CATCH_UPS:
            tries += 1
            readies = self._client.refresh()
            self._flats.scatter()
        now = max(ready.now for ready in readies)
        self._eligible = all(ready.now == now for ready in readies)
        self.jumped += now - self._step
        self._step = now
        self._passed = max([self._passed, *(ready.place for ready in readies)])
        return readies

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._swapped, strict=True):
            group["params"] = parameters
        self._swapped = []

    def drop(self) -> None:
        if self._pushed:
            self._pushed = False
            with contextlib.suppress(HoraError):
                self._client.drop_step(self._step)
        self._flats.clear()
        super().drop()

    def begin_batch(self, loop: int, batch: int, present: int, unit: float) -> None:
        self._place, self._present = (loop, batch), present

    def is_past(self, loop: int, batch: int) -> bool:
        return self._passed >= (loop, batch)

    # -- loops ---------------------------------------------------------------------------------------------------------

    def enter_loop(self) -> None:
        if not self.lockstep:
            self._client.enter_loop()

    def leave_loop(self, finished: bool = True) -> None:
        """Waits for what is still on its way; where workers go their own ways, all take the newest there is."""
        if self._pushed:
            self._conclude(self._client.pull())
        if self.lockstep:
            return
        self._client.leave_loop()
        self._refresh()
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Rank 0's are kept by server 0 for whoever leaves the same loop after it; who leaves before has its own."""
        if self.access.rank == 0:
            self._keep_standing()
        else:
            self._take_standing(self._client.get_blob(0, STANDING), self.loop)

    def _standing(self) -> dict[str, torch.Tensor]:
        """What no server has: buffers, and parameters that no optimizer has."""
        self.roster.refresh_buffers()
        named = zip(self.roster.names, self.roster.parameters, strict=True)
        idle = {name: p.detach() for index, (name, p) in enumerate(named) if index not in self._client.layout.served}
        return {name: tensor for name, tensor in {**idle, **self.roster.buffers}.items() if tensor.numel()}

    def _keep_standing(self) -> None:
        standing = {name: tensor.detach().cpu() for name, tensor in self._standing().items()}
        self._client.put_blob(0, STANDING, pack([{"loop": self.loop, **standing}]))

    def _take_standing(self, blob: bytes, loop: int = 0) -> None:
        """Rank 0's, unless they are from before this loop."""
        if not blob:
            return
        theirs, mine = unpack(blob)[0], self._standing()
        if theirs.pop("loop") < loop:
            return
        with torch.no_grad():
            for name, value in theirs.items():
                if name in mine:
                    mine[name].copy_(value)

    def post(self, what: str, words: bytes) -> None:
        self._client.put_blob(0, what, words)

    def read(self, what: str) -> bytes:
        return self._client.get_blob(0, what)

    def _pulled(self) -> None:
        """Hook: the parameters are what was read."""

    def _refresh(self) -> None:
        readies = self._client.refresh()
        self._flats.scatter()
        self._pulled()
        if self.strategy.backup:
            self._verdict.stop = any(ready.stop for ready in self._catch_up(readies))
        elif self.strategy.mode == "sync":
            self._step = max(ready.now for ready in readies)

    def notes(self) -> dict[str, float]:
        found: dict[str, float] = {}
        total, count = self._lags
        if count and self.strategy.mode != "sync":
            found["lag"] = total / count
        self._lags = (0, 0)
        if self.num_dropped:
            found["dropped"] = self.num_dropped
        return found

    def facts(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._lag is not None:
            found["lag"] = self._lag
        if self.num_dropped:
            found["dropped"] = self.num_dropped
        return found

    def stats(self) -> list[bytes]:
        """What each server has done, as it tells it."""
        return [self._client.get_blob(link.number, "stats") for link in self._client.connections]

    def summary(self) -> str:
        wire = self.strategy.wire
        if wire == "fp32" or not self._num_pushes:
            return ""
        sent, plain = (num / self._num_pushes / 1e6 for num in (self._client.pushed_bytes, self._client.plain_bytes))
        if not any(link.encodes for link in self._client.connections):
            return f"wire={wire} had no effect: all servers are on this host, where gradients do not travel"
        return f"wire={wire}: pushes {sent:.1f} MB instead of {plain:.1f} MB per step"

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """In sync of one step. Otherwise others may go on meanwhile: then each server's blocks and their optimizer's
        state are of one moment, and servers may differ by what was under way."""
        if self._pushed:
            self._conclude(self._client.pull())
        if self.lockstep:
            self.home.barrier("all are here to take a snapshot")
        self._refresh()
        self.roster.refresh_buffers()
        parameters = {name: p.detach() for name, p in zip(self.roster.names, self.roster.parameters, strict=True)}
        found: optimizer_state.OptimizerStates = [{} for _ in self.roster.optimizers]
        if complete:
            parameters = {name: p.clone() for name, p in parameters.items()}
            found = self._archive.fetch(parameters)
        if self.lockstep:
            self.home.barrier("snapshot taken")
        return Snapshot(parameters, dict(self.roster.buffers), found)

    def load_states(self, kept: optimizer_state.OptimizerStates) -> None:
        if self.home.rank == 0:
            self._archive.put(kept)
        self.home.barrier("optimizer state restored")

    def reload(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], extra: dict[str, torch.Tensor]
    ) -> None:
        with torch.no_grad():
            for name, parameter in zip(self.roster.names, self.roster.parameters, strict=True):
                parameter.copy_(parameters[name])
            for name, buffer in self.roster.buffers.items():
                buffer.copy_(buffers[name])
        self.home.barrier("before the servers' parameters are restored")
        if self.home.rank == 0:
            self._client.fill_parameters(self._flats.values, self.steps)
            self._keep_standing()
        self.home.barrier("the servers' parameters are restored")
        self._client.reset_error_feedback()
        self._refresh()
        self._buffer_versions = self.roster.signature()


def _nth(number: int) -> str:
    return {1: "first", 2: "second"}.get(number, f"{number}th")
