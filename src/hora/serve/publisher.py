"""Publisher: a worker's side of the predictor. It shows the parameters when they are due, and nobody waits for it.

strategy without rounds      every step, every N steps or every T seconds, as `--serve-every` says
with rounds                  whenever one was closed: what the workers have agreed upon. With `--serve-from newest`
                             every worker shows, and in between, as above, its own parameters too
in their warm-up             as without rounds: every step is common
always                       after `prepare` and `restore`, when a loop is left, after `save`, and at the end
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
from .inference_protocol import signature_of
from .snapshot_buffer import SnapshotBuffer
from .source import ParameterVersion

log = logging.getLogger(__name__)

LINGER_S = 10.0  # how long a worker that is done waits for a predictor that is to stay and has not looked yet
FETCH_S = 60.0
KEY = "showcase"  # under which the descriptor is offered


class SnapshotOffer(msgspec.Struct, frozen=True):
    """What a worker puts under `showcase/<rank>`: where its descriptor can be had, or why it shows nothing."""

    address: str = ""
    key: str = ""
    problem: str = ""


class Publisher:
    """One worker's. All is called on its training thread. What goes wrong here is one warning and the end of showing:
    nothing raises, and only `close` may wait for the predictor."""

    def __init__(
        self,
        config: ServeConfig,
        rank: int,
        sync: Sync,
        control: CoordinatorConnection,
        token: bytes,
        all_ranks: bool = False,
    ) -> None:
        """`all_ranks`: the run outlives its rank 0, so every worker shows what only it would."""
        self._config = config
        self._every = parse_interval(config.every)
        self._rank = rank
        self._sync = sync
        self._newest = config.source == "newest" and sync.rounds is not None
        self._round = -1  # the last one that was shown
        self._problem = ""  # why nothing is shown any more
        self._last_step = 0
        self._last_at = time.monotonic()
        self._showcase: SnapshotBuffer | None = None
        self._passing: FdPassing | None = None
        self._forsaken = False  # the predictor has gone
        if rank and not (self._newest or all_ranks):
            return
        control.subscribe(self._hear)
        if config.source == "newest" and not self._newest:
            log.warning("--serve-from newest: this strategy has no rounds, so it makes no difference")
        try:
            roster = sync.roster
            roster.refresh_buffers()
            self._showcase = SnapshotBuffer.create(roster.parameters, roster.buffers, roster.entries())
            self._passing = FdPassing(token, FETCH_S)
            os.register_at_fork(after_in_child=self._passing.forget)
            self._passing.offer(KEY, self._showcase.descriptor)
        except Exception as problem:
            self._give_up(problem)
        self.publish(sync.steps, True)
        offer = SnapshotOffer(problem=self._problem)
        if self._passing is not None and self._showcase is not None:
            offer = SnapshotOffer(self._passing.address, KEY)
        control.put_nowait(f"showcase/{rank}", msgspec.msgpack.encode(offer))

    def _hear(self, event: CoordinatorEvent) -> None:
        """On the line's own thread."""
        if event.member is not None and event.member.role == "predictor" and event.kind in ("joined", "left", "died"):
            self._forsaken = event.kind != "joined"

    def publish(self, step: int, force: bool = False) -> None:
        """The parameters are whole, after this step: shows them if that is due."""
        if self._showcase is None:
            return
        try:
            if self._sync.rounds is None or self._sync.warm:
                self._round = -1  # the first one after the warm-up is news
                if force or self._is_due(step):
                    local_step = None if self._sync.rounds is None else 0
                    self._publish(self._own(), ParameterVersion(step, round=self._sync.rounds, local_step=local_step))
            else:
                self._show_round(step, force)
        except Exception as problem:
            self._give_up(problem)

    def _show_round(self, step: int, force: bool) -> None:
        """The average only as long as it is there: a worker's next step goes over it, unless the strategy keeps it."""
        sync = self._sync
        assert sync.rounds is not None
        closed = sync.rounds != self._round
        if ((force or closed) and not sync.local_steps) or (closed and self._keeps_average()):
            self._publish(sync.common(), ParameterVersion(step, round=sync.rounds, local_step=0))
            self._round = sync.rounds
        elif self._newest and (closed or self._is_due(step)):
            self._publish(self._own(), ParameterVersion(step, round=sync.rounds, local_step=sync.local_steps))
            self._round = sync.rounds

    def _keeps_average(self) -> bool:
        """Whether what was agreed upon lies elsewhere than in the parameters that this worker trains."""
        roster = self._sync.roster
        trained = {id(p) for each in roster.optimizers for group in each.param_groups for p in group["params"]}
        return not any(
            id(own) in trained and own.requires_grad and own.data_ptr() == agreed.data_ptr()
            for own, agreed in zip(roster.parameters, self._sync.common(), strict=True)
        )

    def set_signature(self, signature: bytes) -> None:
        """What the model takes and gives, for the predictor to know."""
        if self._showcase is not None:
            self._showcase.sign(signature)

    def _is_due(self, step: int) -> bool:
        if self._every.steps is not None:
            return step - self._last_step >= self._every.steps
        assert self._every.seconds is not None
        return time.monotonic() - self._last_at >= self._every.seconds

    def _own(self) -> Sequence[torch.Tensor]:
        return self._sync.roster.parameters

    def _publish(self, parameters: Sequence[torch.Tensor], stamp: ParameterVersion) -> None:
        assert self._showcase is not None
        roster = self._sync.roster
        roster.refresh_buffers()
        self._showcase.publish(parameters, roster.buffers, stamp)
        self._last_step, self._last_at = stamp.step, time.monotonic()

    def _give_up(self, problem: Exception) -> None:
        log.warning("rank %d shows no parameters to the predictor any more: %s", self._rank, problem)
        self._problem = str(problem)
        if self._passing is not None:
            self._passing.refuse(KEY, self._problem)  # before its number is that of another file
        if self._showcase is not None:
            self._showcase.close()
        self._showcase = None

    def close(self, clean: bool) -> None:
        """The worker is done. If all went `clean`, a predictor that is to stay but has not looked yet is waited for."""
        deadline = time.monotonic() + (LINGER_S if clean and self._config.after else 0.0)
        while self._showcase is not None and not self._showcase.seen and time.monotonic() < deadline:
            if self._forsaken:
                break  # nobody will look any more
            time.sleep(0.01)
        if self._passing is not None:
            self._passing.close()
        if self._showcase is not None:
            self._showcase.close()
            self._showcase = None


def record_signature(model: torch.nn.Module, told: Callable[[bytes], None]) -> None:
    """Tells once, as JSON, what `model` takes and gives: as its first forward in training shows it, if that has one."""

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        handle.remove()
        try:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            found = signature_of(list(given), list(given.values()), output)
        except (TypeError, ValueError):
            return  # a forward that says nothing of its inputs
        if found is not None:
            told(msgspec.json.encode(found))

    if not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
        handle = model.register_forward_hook(Hook(look), with_kwargs=True)
