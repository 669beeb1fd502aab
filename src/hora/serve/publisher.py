"""Publisher: a worker's side of serving. It copies parameters into a snapshot buffer when they are due; no step waits.

strategy without rounds   every step, N steps or T seconds (`--serve-every`)
strategy with rounds      after each round, the average. With `--serve-from newest` every worker publishes, and between
                          rounds, at the same interval, its own parameters too
warm-up before rounds     as without rounds: workers agree after every step
always                    after `prepare` and `restore`, when a loop ends, after `save`, and at the end
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..http.serve_config import ServeConfig, parse_interval
from ..net.fd_passing import FdPassing
from ..strategies.common.sync import Sync
from ..training.hooks import Hook
from .signature import signature_of
from .snapshot_buffer import ParameterVersion, SnapshotBuffer

log = logging.getLogger(__name__)

LINGER_S = 10.0  # how long `close` waits for a predictor that stays after training and has not opened the buffer
FETCH_S = 60.0
KEY = "snapshot"  # of the descriptor that is offered


class SnapshotOffer(msgspec.Struct, frozen=True):
    """A worker's value under `snapshot/<rank>`: where to fetch the descriptor, or why nothing is published."""

    address: str = ""
    key: str = ""
    problem: str = ""


class Publisher:
    """One worker's. Call it on the training thread only. A failure is logged once and ends publishing; nothing raises,
    and only `close` may wait for the predictor."""

    def __init__(
        self, config: ServeConfig, rank: int, sync: Sync, control: CoordinatorConnection, token: bytes,
        all_ranks: bool = False,
    ) -> None:  # fmt: skip
        """`all_ranks`: all ranks publish what only rank 0 would, since the run can outlive rank 0."""
        self._config = config
        self._interval = parse_interval(config.every)
        self._rank = rank
        self._sync = sync
        self._own_parameters = config.source == "newest" and sync.rounds is not None
        self._round = -1  # the last one that was published
        self._problem = ""  # why nothing is published any more
        self._last_step = 0
        self._last_at = time.monotonic()
        self._snapshot: SnapshotBuffer | None = None
        self._fd_passing: FdPassing | None = None
        self._predictor_gone = False
        if rank and not (self._own_parameters or all_ranks):
            return
        control.subscribe(self._on_event)
        if config.source == "newest" and not self._own_parameters:
            log.warning("--serve-from newest has no effect: this strategy has no rounds")
        try:
            registry = sync.registry
            registry.refresh_buffers()
            self._snapshot = SnapshotBuffer.create(registry.parameters, registry.buffers, registry.entries())
            self._fd_passing = FdPassing(token, FETCH_S)
            os.register_at_fork(after_in_child=self._fd_passing.forget)
            self._fd_passing.offer(KEY, self._snapshot.descriptor)
        except Exception as problem:
            self._give_up(problem)
        self.publish(sync.hooks.step, force=True)
        offer = SnapshotOffer(problem=self._problem)
        if self._fd_passing is not None and self._snapshot is not None:
            offer = SnapshotOffer(self._fd_passing.address, KEY)
        control.put_nowait(f"snapshot/{rank}", msgspec.msgpack.encode(offer))

    def _on_event(self, event: CoordinatorEvent) -> None:
        """On the connection's thread."""
        if event.member is not None and event.member.role == "predictor" and event.kind in ("joined", "left", "died"):
            self._predictor_gone = event.kind != "joined"

    def publish(self, step: int, force: bool = False) -> None:
        """Publish if it is due, or `force`. The parameters must be complete after this step."""
        if self._snapshot is None:
            return
        try:
            due = self._select(step, force)
            if due is not None:
                registry = self._sync.registry
                registry.refresh_buffers()
                self._snapshot.publish(due[0], registry.buffers, due[1])
                self._last_step, self._last_at = step, time.monotonic()
        except Exception as problem:
            self._give_up(problem)

    def _select(self, step: int, force: bool) -> tuple[Sequence[torch.Tensor], ParameterVersion] | None:
        """What to publish now. A round's average can be published until the next local step overwrites it, unless the
        strategy keeps it apart."""
        sync = self._sync
        rounds, own = sync.rounds, sync.registry.parameters
        if rounds is None or sync.warming_up:
            self._round = -1  # the first round after the warm-up is new
            if not force and not self._is_due(step):
                return None
            return own, ParameterVersion(step, round=rounds, local_step=None if rounds is None else 0)
        is_new = rounds != self._round
        if ((force or is_new) and not sync.local_steps) or (is_new and self._keeps_average()):
            self._round = rounds
            return sync.agreed_parameters(), ParameterVersion(step, round=rounds, local_step=0)
        if self._own_parameters and (is_new or self._is_due(step)):
            self._round = rounds
            return own, ParameterVersion(step, round=rounds, local_step=sync.local_steps)
        return None

    def _keeps_average(self) -> bool:
        """Whether the average lies elsewhere than in the parameters that this worker trains."""
        registry = self._sync.registry
        trained = {id(p) for each in registry.optimizers for group in each.param_groups for p in group["params"]}
        return not any(
            id(own) in trained and own.requires_grad and own.data_ptr() == average.data_ptr()
            for own, average in zip(registry.parameters, self._sync.agreed_parameters(), strict=True)
        )

    def _is_due(self, step: int) -> bool:
        if self._interval.steps is not None:
            return step - self._last_step >= self._interval.steps
        assert self._interval.seconds is not None
        return time.monotonic() - self._last_at >= self._interval.seconds

    def set_signature(self, signature: bytes) -> None:
        """Pass the model's signature to the predictor."""
        if self._snapshot is not None:
            self._snapshot.set_signature(signature)

    def _give_up(self, problem: Exception) -> None:
        log.warning("rank %d stops publishing parameters to the predictor: %s", self._rank, problem)
        self._problem = str(problem)
        if self._fd_passing is not None:
            self._fd_passing.refuse(KEY, self._problem)  # before the descriptor's number is reused
        self._close_snapshot()

    def _close_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def close(self, clean: bool) -> None:
        """After a `clean` end, wait up to LINGER_S for a predictor that stays and has not opened the buffer yet."""
        deadline = time.monotonic() + (LINGER_S if clean and self._config.after else 0.0)
        while self._snapshot and not (self._snapshot.opened or self._predictor_gone) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._fd_passing is not None:
            self._fd_passing.close()
        self._close_snapshot()


def record_signature(model: torch.nn.Module, callback: Callable[[bytes], None]) -> None:
    """Call `callback` once with the model's signature as JSON, taken from its first forward in training, if that has
    one."""

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        handle.remove()
        try:
            inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            signature = signature_of(list(inputs), list(inputs.values()), output)
        except (TypeError, ValueError):
            return  # a forward whose inputs have no names
        if signature is not None:
            callback(msgspec.json.encode(signature))

    if not isinstance(model, torch.jit.ScriptModule):  # it has no hooks
        handle = model.register_forward_hook(Hook(record), with_kwargs=True)
