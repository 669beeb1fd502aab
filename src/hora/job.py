"""Job: what a user holds. `hora.init()` finds out who this process is in the run and meets the others."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from . import strategies
from .collectives.group import Group
from .coordinator import CoordinatorClient, CoordinatorEvent, InProcessCoordinator, Member
from .data import DataService, LedgerView, Shard, shard
from .errors import HoraError, PeerLost
from .launch.forkserver import interpreter
from .monitor import spans
from .monitor.values import Histogram, check_values
from .net.machine import num_cores
from .parameters.registry import ParameterRegistry
from .rendezvous import environment
from .rendezvous.context import TIMEOUT_S, ProcessIdentity, RunContext
from .rendezvous.rendezvous import rendezvous
from .runs.exit_codes import SCRIPT_FAILED, SECONDARY_FAILURE
from .strategies import PS, Auto, LocalSGD, Strategy
from .strategies.common.sync import CommStats
from .training import Training, as_list, checkpointing
from .training.progress import Progress
from .training.recorder import Recorder
from .world import World

if TYPE_CHECKING:
    from .serve.publisher import Publisher

log = logging.getLogger(__name__)

MEAN = "mean "  # the topic of a value that workers tell each other, and its number
LINGER_S = 10.0  # a rank that hosts the coordinator stays this long for the others' goodbyes

_current: Job | None = None


class Job:
    """One process's part in the run. Made by `hora.init()`; closed at exit, or by `close()`.

    `rank` and `size` count the workers, `local_rank` those on this host; `group` is all of them together. In a server
    or a predictor `rank` is None and `group` is itself alone; it is captured in `prepare`.
    """

    def __init__(
        self,
        context: RunContext,
        world: World,
        strategy: Strategy,
        on_nonfinite: str | None = None,
    ) -> None:
        # Elsewhere it is None, which no user's code sees after `prepare`: whoever counts on a number is a worker.
        self.rank: int = context.rank if context.role == "worker" else None  # type: ignore[assignment]
        self.size = context.size
        self.local_rank = context.local_rank
        self.role = context.role
        self.strategy = strategy
        self.group: Group = world.group
        self._access = context if strategy.uses_servers else None
        self.training = Training(world.group, context.control, strategy, on_nonfinite, self._access)
        self.training.max_steps = context.max_steps
        self.training.stop_reason = lambda: world.stop_reason or self._stop_reason
        self._stop_reason: str | None = None
        self._desk = DataService(
            control=context.control,
            rank=context.rank,
            token=context.token,
            bind=context.bind,
            leased=strategy.leased,
            last=self.training.last_epoch,
            idle=self.training.idle,
            timeout_s=world.timeout_s,
        )
        self._progress = Progress() if context.progress == "plain" and self.rank == 0 else None
        if context.watched and context.role == "worker":
            self.training.recorder = Recorder(self.training, context.control.report)
        self._logged = False
        self._means: list[Any] = []  # of values that workers tell each other
        self._told: collections.deque[CoordinatorEvent] = collections.deque(maxlen=1000)
        self._telling = threading.Lock()
        self.pid = os.getpid()
        self.launcher = context.launcher
        self._context = context
        self._world = world
        self._failed = False
        self._closed = False
        self._joined = context.joined
        self._apart = False  # the workers of the launch are no longer all there
        self._serving = context.serve
        self._publisher: Publisher | None = None
        self._asked = False  # a predictor has come to `prepare`
        self._ended: set[int] = set()  # workers
        self._lost = ""  # why a server cannot go on: the coordinator's process is gone
        context.control.subscribe(self._hear)

    def _hear(self, event: CoordinatorEvent) -> None:
        if event.kind == "stop" and self._stop_reason is None:
            self._stop_reason = event.text
        if event.kind in ("left", "died") and event.member is not None and event.member.role == "worker":
            self._ended.add(event.member.rank)
        if event.kind in ("left", "died") or (event.kind == "message" and event.topic.startswith(MEAN)):
            with self._telling:
                self._told.append(event)
                for means in self._means:
                    means.hear(event)

    def _lose_coordinator(self, reason: str) -> None:
        """The line to rank 0, who hosts the coordinator, broke."""
        if self.role == "worker":
            self._world.lose(0, f"the line to it broke: {reason}")
            return
        left = set(range(self.size)) - self._ended
        if left:  # a server would not hear of their ends any more
            self._lost = f"{self._context.name}: lost {self._context.control.hosted_by}: the line to it broke: {reason}"
            for rank in left:
                gone = Member("worker", rank, "?", 0)
                self._context.control.inject(CoordinatorEvent(kind="died", generation=0, member=gone, text=reason))

    def __repr__(self) -> str:
        return f"<hora.Job {self.role} {self.rank} of {self.size}, strategy {self.strategy.spell()}>"

    @property
    def device(self) -> torch.device:
        """This rank's GPU (ranks beyond their number share), or the CPU, where servers and predictors are at home."""
        if self.role == "worker" and torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def step(self) -> int:
        """How many steps the first optimizer has taken."""
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

        Every worker calls it where it would call torch.distributed.init_process_group; addresses are Hora's business,
        and so is its end. A server or a predictor ends here. Without `backend`: Gloo, and NCCL for tensors on GPUs
        where each rank has one. Its links are not authenticated.
        """
        if self.role != "worker":
            raise SystemExit(0)  # a script that speaks to torch itself has nothing for a server or a predictor to do
        if self._joined:
            raise HoraError(f"{self._context.name}: job.process_group() is for the workers that the run began with")
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

        The objects stay what they are: nothing is wrapped or renamed, and the loop is written as for one process. All
        workers start from rank 0's parameters and buffers. Where there are several models or optimizers, give lists.
        A `scheduler` given here is saved with checkpoints; with a `scaler` a step that overflows on one worker is
        skipped on all. A predictor answers with `predict(model, inputs)`, or without it with the model itself. A server
        serves in here until the workers have left, and then ends; so does a predictor.
        """
        if predict is not None and not callable(predict):
            raise ValueError(f"job.prepare: predict must be a function of model and inputs, not {predict!r}")
        if self.role == "server":
            self._serve(model, optimizer)
        if self.role == "predictor":
            self._answer(model, optimizer, predict)
        self.training.prepare(model, optimizer, scheduler, scaler)
        self._publish()

    def _publish(self) -> None:
        """Rank 0 notes what the model takes; and in a run with a predictor parameters are shown to it."""
        from .serve.publisher import Publisher, record_signature

        training = self.training
        assert training.sync is not None
        if self._serving is not None:
            control, token = self._context.control, self._context.token
            everybody = self._everybody_shows
            publisher = Publisher(self._serving, training.rank, training.sync, control, token, everybody)
            self._publisher = publisher
            training.show = lambda at_once: publisher.publish(training.step, at_once)

        def sign(signature: bytes) -> None:
            training.signature = signature
            if self._publisher is not None:
                self._publisher.set_signature(signature)

        if training.rank == 0:
            record_signature(training.models[0], sign)

    @property
    def _everybody_shows(self) -> bool:
        """Whether there are rounds, and a run goes on without rank 0."""
        return self.strategy.elastic and self.strategy.unit == "round"

    def _answer(self, model: Any, optimizer: Any, predict: Callable[[Any, Any], Any] | None) -> NoReturn:
        from .serve import predictor

        self._asked = True
        models, optimizers = as_list("model", model, torch.nn.Module), as_list("optimizer", optimizer, Optimizer)
        assert self._serving is not None
        registry = ParameterRegistry(models, optimizers)
        if self._serving.checkpoint:
            predictor.serve_checkpoint(self._serving, registry, predict)
        else:
            ps = (self.strategy, self._access) if isinstance(self.strategy, PS) and self._access is not None else None
            if ps is not None and ps[0].mode == "sync" and len(optimizers) > 1:
                ps = None  # servers are at rest after each optimizer's part of a step, rank 0 knows when it is whole
            many = self._serving.source == "newest" or self._everybody_shows
            run = predictor.ServedRun(self._context.control, self._context.token, self.size if many else 1, ps)
            predictor.serve(self._serving, registry, predict, run)
        raise SystemExit(0)

    def _serve(self, model: Any, optimizer: Any) -> NoReturn:
        from .server.process import serve

        assert isinstance(self.strategy, PS | LocalSGD) and self._access is not None
        models, optimizers = as_list("model", model, torch.nn.Module), as_list("optimizer", optimizer, Optimizer)
        try:
            with torch.no_grad():
                registry = ParameterRegistry(models, self.strategy.served(optimizers))
                serve(self._access, registry, self.strategy.rules(), self.strategy.block_bytes)
        except ValueError:  # of this model and these servers: all find the same, and one says it
            if self._access.rank == 0:
                raise
            time.sleep(LINGER_S)  # until the launcher, which has heard it, ends this one too
            self._failed = True
            _exit(SECONDARY_FAILURE)
        if self._lost:
            raise PeerLost(self._lost, (0,), secondary=True)
        raise SystemExit(0)

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
        Where workers do not step together (ps:mode=async and ssp), each takes the next `batch_size` samples that nobody
        has. With `source` only that rank's `data` counts: it hands the samples out to the others.
        """
        if self.role != "worker":  # it is captured before it could read any
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
            desk=self._desk if self.role == "worker" else None,
        )
        return self.training.adopt(made)

    def epochs(self, count: int) -> Iterator[int]:
        """0 to count − 1; after `restore` from where the run stood; ends early when the workers have agreed to stop."""
        yield from self.training.epochs(count)
        if self._progress is not None:
            self._progress.close(self.training)

    def log(self, **values: float | torch.Tensor | Histogram) -> None:
        """What to show of this step: numbers, tensors of one element, or `hora.Histogram(tensor)`; rank 0's are shown.

        No device is waited for: a tensor on one is read later, by another thread."""
        scalars, histograms = check_values(values)
        self._logged = True
        if self._progress is not None:
            self._progress.log(scalars, self.training)
        if self.training.recorder is not None and (self.rank == 0 or self.strategy.elastic):  # rank 0 may be lost
            self.training.recorder.log(scalars, histograms)

    def _worker_means(self, make: Callable[..., Any]) -> Any:
        """The means over the workers of one more value."""
        sync = self.training.sync
        together = sync is not None and sync.lockstep
        with self._telling:
            topic = f"{MEAN}{len(self._means)}"
            made = make(self._context.control, self.rank, self.size, topic, together)
            self._means.append(made)
            for event in [event for event in self._told if event.topic == topic]:  # by those who came first
                made.hear(event)
        return made

    def _note(self, kind: str, text: str) -> None:
        if self.training.recorder is not None:
            self.training.recorder.notice(kind, text)

    def stop(self, reason: str) -> None:
        """Asks all workers to leave their loops. They do so after the same step; rank 0 says why."""
        self.training.stop(reason)

    def accumulate(self) -> AbstractContextManager[None]:
        """Inside it backward() synchronises nothing: gradients pile up for the next backward() outside."""
        return self.training.accumulate()

    def weight(self, count: float) -> None:
        """This batch stands for `count` samples, say its tokens, instead of its length. Before backward()."""
        self.training.weight(count)

    def ledger(self) -> LedgerView:
        """Which batches of the epoch are done, and what this worker holds; of the first loader. Print it."""
        if not self.training.shards:
            raise HoraError("no ledger yet: job.shard(…) makes one")
        return self.training.shards[0].view()

    def save(self, directory: str | os.PathLike[str], *, keep: int = 2) -> str:
        """Writes `directory/step-N`, atomically, and keeps the newest `keep`; its path. Every worker calls it.

        Where a run goes on without a worker that was lost, the lowest rank that is left writes by itself; "" elsewhere.
        """
        with spans.during(spans.TRAINING, "checkpoint", step=self.step):
            saved = self._save(os.fspath(directory), keep)
        self.training.show(True)  # it has closed the round
        if saved and (self.rank == 0 or self._apart or self._joined):
            self._note("checkpoint", saved)
        return saved

    def _save(self, path: str, keep: int) -> str:
        if self.strategy.elastic and (self._apart or self._joined):
            return self._save_alone(path, keep)
        try:
            return checkpointing.save(self.training, self.group, path, self.strategy.spell(), keep)
        except PeerLost:
            if not self.strategy.elastic:
                raise
            self._apart = True
            return self._save_alone(path, keep)

    def _save_alone(self, directory: str, keep: int) -> str:
        left = [member.rank for member in self._context.control.members() if member.role == "worker"]
        if self.rank != min(left, default=self.rank):
            return ""
        own = _own_world(self._context.member, self._world.timeout_s)
        try:
            return checkpointing.save(self.training, own.group, directory, self.strategy.spell(), keep)
        finally:
            own.close()

    def restore(self, directory: str | os.PathLike[str]) -> int | None:
        """Goes on from the newest valid checkpoint there, also of another number of workers: its step, or None.

        A worker that joins a run has its parameters from the servers, and restores nothing."""
        if self._joined:
            return None
        with spans.during(spans.TRAINING, "checkpoint", what="restored"):
            step = checkpointing.restore(self.training, self.group, os.fspath(directory))
        self.training.show(True)
        if step is not None and self.rank == 0:
            self._note("restore", f"from step {step} in {os.fspath(directory)}")
        return step

    def close(self) -> None:
        """Leaves the run. Called at exit; calling it again does nothing."""
        global _current
        if self._closed or self.pid != os.getpid():
            return
        self._closed = True
        if _current is self:
            _current = None
        unfinished = "" if self._failed or self.role != "worker" else self.training.end_inside()
        if unfinished:
            self.fail(unfinished)
        if not self._failed and self.role == "worker":
            if self._progress is not None:
                self._progress.close(self.training)
            self.training.conclude(self._logged)
        self._desk.close(**({"linger_s": 0.0} if self._failed else {}))
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
            raise HoraError(
                f"{self._context.name}: {unfinished}. Leave it with break, or end all workers with job.stop(reason)"
            )

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except HoraError as problem:
            print(f"hora.errors.HoraError: {problem}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(SCRIPT_FAILED)  # an exit function has no other way to choose the code

    def fail(self, reason: str) -> None:
        """This rank is about to die of `reason`: the others hear it at once."""
        if not self._failed and not self._closed:
            self._failed = True
            with contextlib.suppress(HoraError):
                self._context.control.fail(reason)


def init(
    strategy: str | Strategy | None = None,
    *,
    on_nonfinite: str | None = None,
    transport: str = "auto",
    timeout_s: float | None = None,
) -> Job:
    """Joins the run; blocks until all ranks are there. Alone, without a launcher, it is a world of one.

    `strategy` is the script's default, as text ("ring") or as a dataclass (hora.Ring()); the command line's beats it.
    `on_nonfinite` says what a NaN or an infinity in a gradient does: 'raise', naming rank and parameter, or 'skip' that
    step on every worker; without it: raise, or skip when a scaler was given to `prepare`. `transport` is auto, shm, tcp
    or engine. `timeout_s` is how long a rank that is alive but slow is waited for. A second call returns the same job.
    """
    global _current
    if _current is not None:
        if _current.pid != os.getpid():
            raise HoraError(_CHILD.format(pid=_current.pid))
        return _current
    owner = environment.owner_of_rank()
    if owner is not None and owner != os.getpid():
        raise HoraError(_CHILD.format(pid=owner))
    identity = environment.read()
    if on_nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r} is unknown; there are: raise, skip")
    chosen = _choose(strategy, identity)
    if chosen.uses_servers and identity.rate_bytes_per_s is not None:
        raise ValueError("HORA_RATE_BYTES_PER_S holds for what workers send to each other; servers would not heed it")
    if identity.servers and not chosen.uses_servers:
        able = ", ".join(name for name, kind in strategies.known().items() if kind.may_use_servers)
        raise ValueError(f"HORA_SERVERS={identity.servers}: strategy {chosen.name!r} uses none; with servers: {able}")
    if identity.trace and identity.role != "predictor":
        spans.open(identity.trace, identity.role, identity.rank, identity.host)
    limit = identity.timeout_s or timeout_s or TIMEOUT_S
    context = rendezvous(identity, timeout_s=limit, shared=transport in ("auto", "shm"))
    reply = context.control.join(context.member, _versions(), limit, context.size, context.servers or 0)
    if context.role != "worker" or context.joined:  # it takes no part in the workers' collectives
        world = _own_world(context.member, limit)
    else:
        world = World(
            context.control,
            tuple(m for m in reply.members if m.role == "worker"),
            context.rank,
            reply.generation,
            context.token,
            bind=context.bind,
            rate_bytes_per_s=context.rate_bytes_per_s,
            timeout_s=limit,
            transport=transport,
            algorithm=chosen.algorithm,
            backend=chosen.backend,
            deterministic=chosen.deterministic,
            under_mpirun=context.launcher == "mpirun",
        )
    if context.role == "worker" and context.rank == 0:
        context.control.put("strategy", chosen.spell().encode())
    job = _current = Job(context, world, chosen, on_nonfinite)
    if context.joined:
        job.training.begin_at(context.control.newest_epoch() or 0)
    _label_records(context)
    if context.rank == 0 and context.role == "worker" and not context.joined:
        _advise_on_cores(context)
    if context.rank == 0 and context.role == "worker" and (late := interpreter.changed_too_late()):
        log.warning(
            "the script sets %s, which has no effect: torch is imported before ranks are forked. Set it with "
            "hora run --env %s=%s, or start interpreters with hora run --no-fork",
            " and ".join(late), late[0], os.environ.get(late[0], ""),
        )  # fmt: skip
    if context.launcher != "alone":
        environment.take_rank()
        _keep_scratch(context.scratch)
        _report_failures(job)
    if context.service is not None:
        os.register_at_fork(after_in_child=context.service.forget)
    if isinstance(context.control, CoordinatorClient) and context.launcher != "hora":
        context.control.hosted_by = reply.members[0]
        context.control.on_lost = job._lose_coordinator
    if context.role == "predictor" and context.launcher == "alone":
        atexit.register(_complain_of_nothing, job)  # after `close`
    atexit.register(job._close_at_exit)
    return job


def _label_records(identity: ProcessIdentity) -> None:
    """From now on every record of `logging` says whose it is: %(hora_role)s and %(hora_rank)s in a format."""
    before = logging.getLogRecordFactory()
    before = getattr(before, "unlabelled", before)  # of an earlier job of this process

    def labelled(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        record.hora_role, record.hora_rank = identity.role, identity.rank
        return record

    labelled.unlabelled = before  # type: ignore[attr-defined]
    logging.setLogRecordFactory(labelled)


def _advise_on_cores(identity: ProcessIdentity) -> None:
    """More workers than cores take turns, unless they have GPUs to keep busy."""
    cores = num_cores()
    if identity.local_size > cores and not os.path.exists("/dev/nvidia0"):
        log.warning(
            "%d workers share %d cores of %s, so they take turns: -n %d is as fast, --hosts adds machines",
            identity.local_size, cores, identity.host, cores,
        )  # fmt: skip


def _own_world(member: Member, timeout_s: float) -> World:
    """A world of this process alone, with a coordinator of its own."""
    line = InProcessCoordinator(1).connect()
    me = Member("worker", 0, member.host, member.pid)
    line.join(me)
    return World(line, (me,), 0, 1, b"", timeout_s=timeout_s)


def _versions() -> str:
    """What must be alike on all hosts."""
    from . import __version__

    torch_version = torch.__version__.partition("+")[0]  # builds for other devices speak the same
    return f"hora {__version__}, python {sys.version_info.major}.{sys.version_info.minor}, torch {torch_version}"


def _complain_of_nothing(job: Job) -> None:
    """The script of `hora serve` has ended: that it never came to `prepare` is a failure that its end would hide."""
    if job.pid == os.getpid() and not job._asked and getattr(sys, "last_value", None) is None:
        print("hora serve: the script ended before job.prepare(model, optimizer): nothing was served", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(SCRIPT_FAILED)  # an exit function has no other way to choose the code


_CHILD = (
    "hora.init() was called in a child of the process that is this rank (pid {pid}), a DataLoader worker perhaps: "
    "call it once, in the main process, under if __name__ == '__main__':"
)


def current() -> Job:
    """The job of this process; HoraError if `init` was not called."""
    if _current is None:
        raise HoraError("no job yet: call hora.init() first")
    return _current


def _choose(strategy: str | Strategy | None, identity: ProcessIdentity) -> Strategy:
    given = strategies.parse(strategy) if isinstance(strategy, str) else strategy
    if identity.strategy is None:
        return given or Auto()
    chosen = strategies.parse(identity.strategy)
    if given is not None and given != chosen and identity.rank == 0:
        log.warning("strategy: %s from the command line, not %s from the script", chosen.spell(), given.spell())
    return chosen


def _keep_scratch(folder: str) -> None:
    """Sockets and folders of multiprocessing (DataLoader workers) go where the launcher clears up after a kill."""
    if folder and os.path.isdir(folder):
        multiprocessing.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def _report_failures(job: Job) -> None:
    """An exception that ends the script is told to the others; one that only echoes another rank's end is one line."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != job.pid or threading.current_thread() is not threading.main_thread():
            previous(kind, error, trace)
            return
        error = job._world.lost_behind(error) or error
        if isinstance(error, PeerLost):  # whoever was lost is the cause, even one that left without an error
            job._failed = True
            if error.secondary:
                print(f"stopped: {error}", file=sys.stderr, flush=True)
            else:
                _show(error, trace)
            _exit(SECONDARY_FAILURE)
        if issubclass(kind, KeyboardInterrupt):
            with contextlib.suppress(Exception):
                job.training.go_on()
        else:
            job.fail(f"{kind.__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}".rstrip(": "))
        if isinstance(error, HoraError) or (isinstance(error, ValueError) and _is_ours(trace)):
            _show(error, trace)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


_INSIDE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether it was raised inside of Hora: a word to the user, like HoraError."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and frames[-1].filename.startswith(_INSIDE)


def _show(error: Exception, trace: TracebackType | None) -> None:
    """The traceback as far as it is the user's: where Hora was called, not how it works inside."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_INSIDE)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    print("".join([*lines, *traceback.format_exception_only(error)]), end="", file=sys.stderr, flush=True)


def _exit(code: int, run_exit_functions: Callable[[], None] = atexit._run_exitfuncs) -> None:
    """Ends the process with this code as a normal end would: an exception hook has no other way to choose it."""
    with contextlib.suppress(BaseException):
        run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
