"""Job: one process's part in the run, and the calls that a training script makes on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ..collectives.group import Group
from ..coordinator import CoordinatorEvent, Member
from ..data import DataService, LedgerView, Shard, shard
from ..errors import HoraError, PeerLost
from ..monitor import spans
from ..monitor.values import Histogram, check_values
from ..rendezvous.context import RunContext
from ..strategies import Strategy
from ..strategies.common.sync import CommStats
from ..training import Training, checkpointing
from ..training.progress import Progress
from ..training.recorder import Recorder
from ..world import World, single_process_world
from . import roles
from .worker_means import WorkerMeansRegistry

if TYPE_CHECKING:
    from ..serve.publisher import Publisher

LINGER_S = 10.0  # a rank that hosts the coordinator waits this long for the others to leave

_current: Job | None = None


class Job:
    """One process's part in the run. Made by `hora.init()`; closed at exit, or by `close()`.

    `rank` and `size` count the workers, `local_rank` those on this host; `group` has all of them. In a server or a
    predictor `rank` is None and `group` has this process only; it does not return from `prepare`.
    """

    def __init__(self, context: RunContext, world: World, strategy: Strategy, on_nonfinite: str | None = None) -> None:
        # None in servers and predictors, whose user code never runs beyond `prepare`: typed as for workers.
        self.rank: int = context.rank if context.role == "worker" else None  # type: ignore[assignment]
        self.size = context.size
        self.local_rank = context.local_rank
        self.role = context.role
        self.launcher = context.launcher
        self.pid = os.getpid()
        self.strategy = strategy
        self.group: Group = world.group
        servers = context if strategy.uses_servers else None
        self.training = Training(world.group, context.control, strategy, on_nonfinite, servers)
        self.training.max_steps = context.max_steps
        self.training.stop_reason = lambda: world.stop_reason or self._stop_reason
        if context.watched and context.role == "worker":
            self.training.recorder = Recorder(self.training, context.control.report)
        self._context = context
        self._world = world
        self._data = DataService(
            context, leased=strategy.leased, last=self.training.last_epoch, idle=self.training.idle
        )
        self._progress = Progress() if context.progress == "plain" and self.rank == 0 else None
        self._means = WorkerMeansRegistry(context.control)
        self._publisher: Publisher | None = None
        self._stop_reason: str | None = None
        self._ended_workers: set[int] = set()
        self._coordinator_lost = ""  # why a server cannot go on
        self._prepared = False
        self._logged = False
        self._failed = False
        self._closed = False
        self._shrunk = False  # a worker of the launch was lost
        context.control.subscribe(self._on_event)

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.kind == "stop" and self._stop_reason is None:
            self._stop_reason = event.text
        if event.kind in ("left", "died") and event.member is not None and event.member.role == "worker":
            self._ended_workers.add(event.member.rank)

    def _on_coordinator_lost(self, reason: str) -> None:
        """The connection to rank 0, which hosts the coordinator, broke."""
        if self.role == "worker":
            self._world.peer_died(0, f"the connection to it broke: {reason}")
            return
        running = set(range(self.size)) - self._ended_workers
        if running:  # a server would not learn of their ends any more
            control = self._context.control
            self._coordinator_lost = (
                f"{self._context.name}: lost {control.hosted_by}: the connection to it broke: {reason}"
            )
            for rank in running:
                gone = Member("worker", rank, "?", 0)
                control.inject(CoordinatorEvent(kind="died", generation=0, member=gone, text=reason))

    def __repr__(self) -> str:
        return f"<hora.Job {self.role} {self.rank} of {self.size}, strategy {self.strategy.spell()}>"

    @property
    def device(self) -> torch.device:
        """This rank's GPU (more ranks than GPUs share them), or the CPU, also for servers and predictors."""
        if self.role == "worker" and torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def step(self) -> int:
        """The number of steps that the first optimizer has taken."""
        return self.training.step

    @property
    def stopped(self) -> bool:
        """Whether all workers have agreed to stop; loaders and `epochs` end by themselves then."""
        return self.training.stopped()

    @property
    def traffic(self) -> CommStats:
        """What communication has cost this worker since `traffic.reset()`."""
        sync = self.training.sync
        if sync is None:
            raise HoraError("job.traffic comes after job.prepare()")
        return sync.traffic

    def process_group(self, backend: str | None = None) -> Any:
        """torch's default process group over all workers, for torch's own pipelines and the like. Collective, once.

        Call it instead of torch.distributed.init_process_group; Hora provides the addresses and destroys the group. A
        server or a predictor exits here. Without `backend`: Gloo, and NCCL for tensors on GPUs where each rank has one.
        Its connections are not authenticated.
        """
        if self.role != "worker":
            raise SystemExit(0)
        if self._context.joined:
            raise HoraError(f"{self._context.name}: job.process_group() is for the workers that the run started with")
        return self._world.torch_group(backend, self.device).group

    # -- training ----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: Any,
        optimizer: Any,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        predict: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """From now on the workers train this model together, as the strategy says. Collective, once.

        The objects are not wrapped, and the loop is written as for one process. All workers start from rank 0's
        parameters and buffers. Several models or optimizers are given as lists. A `scheduler` given here is saved with
        checkpoints; with a `scaler` a step that overflows on one worker is skipped on all. A predictor answers with
        `predict(model, inputs)`, or without it with the model itself. A server or a predictor does not return from
        here: it serves until the workers have left, and exits.
        """
        if predict is not None and not callable(predict):
            raise ValueError(f"job.prepare: predict must be a function of model and inputs, not {predict!r}")
        self._prepared = True
        if self.role == "server":
            roles.serve_parameters(self, model, optimizer)
        if self.role == "predictor":
            roles.answer_requests(self, model, optimizer, predict)
        self.training.prepare(model, optimizer, scheduler, scaler)
        roles.publish_parameters(self)

    def shard(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        source: int | None = None,
    ) -> Shard:
        """A loader that gives this worker its part of every global batch: every sample once per epoch, none twice.

        `data` is a dataset, with `batch_size` per worker or `global_batch` for all together, or a DataLoader, whose
        options are taken over. The k-th global batch depends on seed, epoch and its size, not on the number of workers.
        Where workers do not step together (ps:mode=async and ssp), each takes the next `batch_size` samples that no
        other worker has. With `source` only that rank's `data` is read: it sends the samples to the others.
        """
        if self.role != "worker":  # it reads no samples: it does not return from `prepare`
            data, source = ([] if source is not None else data), None
        made = shard(
            data,
            self.training,
            batch_size=batch_size,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            source=source,
            service=self._data if self.role == "worker" else None,
        )
        return self.training.adopt(made)

    def epochs(self, count: int) -> Iterator[int]:
        """0 to count − 1; after `restore` from the restored epoch; ends early when the workers have agreed to stop."""
        yield from self.training.epochs(count)
        if self._progress is not None:
            self._progress.close(self.training)

    def log(self, **values: float | torch.Tensor | Histogram) -> None:
        """Metrics of this step: numbers, tensors of one element, or `hora.Histogram(tensor)`; rank 0's are shown.

        Does not synchronise with a device: its tensors are read later, by another thread."""
        scalars, histograms = check_values(values)
        self._logged = True
        if self._progress is not None:
            self._progress.log(scalars, self.training)
        if self.training.recorder is not None and (self.rank == 0 or self.strategy.elastic):  # rank 0 may be lost
            self.training.recorder.log(scalars, histograms)

    def _record_event(self, kind: str, text: str) -> None:
        if self.training.recorder is not None:
            self.training.recorder.notice(kind, text)

    def stop(self, reason: str) -> None:
        """Asks all workers to leave their loops. They do so after the same step; rank 0 prints the reason."""
        self.training.stop(reason)

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which backward() synchronises nothing: gradients accumulate for the next backward() outside."""
        return self.training.accumulate()

    def weight(self, count: float) -> None:
        """This batch counts as `count` samples, for example its tokens, instead of its length. Before backward()."""
        self.training.weight(count)

    def ledger(self) -> LedgerView:
        """The state of the first loader's epoch: batches done, and those that this worker holds. Print it."""
        if not self.training.shards:
            raise HoraError("no loader yet: call job.shard(…) first")
        return self.training.shards[0].view()

    def save(self, directory: str | os.PathLike[str], *, keep: int = 2) -> str:
        """Writes `directory/step-N` atomically and keeps the newest `keep`; returns its path. Collective.

        In a run that goes on after it has lost a worker, the lowest rank left writes alone; the others return "".
        """
        with spans.during(spans.TRAINING, "checkpoint", step=self.step):
            saved = self._save(os.fspath(directory), keep)
        self.training.show(True)  # saving has ended the round
        if saved and (self.rank == 0 or self._shrunk or self._context.joined):
            self._record_event("checkpoint", saved)
        return saved

    def _save(self, path: str, keep: int) -> str:
        if self.strategy.elastic and (self._shrunk or self._context.joined):
            return self._save_alone(path, keep)
        try:
            return checkpointing.save(self.training, self.group, path, self.strategy.spell(), keep)
        except PeerLost:
            if not self.strategy.elastic:
                raise
            self._shrunk = True
            return self._save_alone(path, keep)

    def _save_alone(self, directory: str, keep: int) -> str:
        left = [member.rank for member in self._context.control.members() if member.role == "worker"]
        if self.rank != min(left, default=self.rank):
            return ""
        own = single_process_world(self._context.member, self._context.timeout_s)
        try:
            return checkpointing.save(self.training, own.group, directory, self.strategy.spell(), keep)
        finally:
            own.close()

    def restore(self, directory: str | os.PathLike[str]) -> int | None:
        """Restores the newest valid checkpoint there, also of another number of workers; returns its step, or None.

        A worker that joins a run gets its parameters from the servers and restores nothing."""
        if self._context.joined:
            return None
        with spans.during(spans.TRAINING, "checkpoint", what="restored"):
            step = checkpointing.restore(self.training, self.group, os.fspath(directory))
        self.training.show(True)
        if step is not None and self.rank == 0:
            self._record_event("restore", f"from step {step} in {os.fspath(directory)}")
        return step

    def close(self) -> None:
        """Leaves the run. Called at exit; calling it again does nothing."""
        global _current
        if self._closed or self.pid != os.getpid():
            return
        unfinished = "" if self._failed or self.role != "worker" else self.training.end_inside()
        if unfinished:
            self.fail(unfinished)
        self._closed = True
        if _current is self:
            _current = None
        if not self._failed and self.role == "worker":
            if self._progress is not None:
                self._progress.close(self.training)
            self.training.conclude(self._logged)
        self._data.close(**({"linger_s": 0.0} if self._failed else {}))
        if not self._failed:
            self.training.depart(for_good=True)
            self.training.show(True)
        if self.training.recorder is not None:
            self.training.recorder.close()
        if not self._failed:
            with contextlib.suppress(HoraError):
                self._context.control.leave()
            self.training.stay()
        if self._publisher is not None:
            self._publisher.close(clean=not self._failed)
        self._world.close()
        service = self._context.service
        if service is not None:
            deadline = time.monotonic() + LINGER_S
            while service.others_alive(self.rank) and time.monotonic() < deadline:
                time.sleep(0.01)
            service.close()
        self._context.control.close()
        if unfinished:
            remedy = "Leave the loop with break, or end all workers with job.stop(reason)"
            raise HoraError(f"{self._context.name}: {unfinished}. {remedy}")

    def fail(self, reason: str) -> None:
        """This rank is about to die of `reason`: announces it to the others at once."""
        if not self._failed and not self._closed:
            self._failed = True
            with contextlib.suppress(HoraError):
                self._context.control.fail(reason)


def current() -> Job:
    """The job of this process; HoraError if `init` was not called."""
    if _current is None:
        raise HoraError("there is no job: call hora.init() first")
    return _current
