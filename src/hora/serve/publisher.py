"""Publisher: a worker's side of the predictor. It shows the parameters when they are due, and nobody waits for it.

strategy without rounds      every step, every N steps or every T seconds, as `--serve-every` says
with rounds                  whenever one was closed: what the workers have agreed upon. With `--serve-from newest`
                             every worker shows, and in between, as above, its own parameters too
always                       after `prepare` and `restore`, when a loop is left, and at the end
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ..coordinator import Control
from ..strategies.sync import Sync
from ..training.hooks import Hook
from ..transport.passing import Passing
from .config import ServeConfig, every_of
from .protocol import signature_of
from .showcase import Showcase
from .source import Stamp

log = logging.getLogger(__name__)

LINGER_S = 10.0  # how long a worker that is done waits for a predictor that is to stay and has not looked yet
FETCH_S = 60.0


class Offer(msgspec.Struct, frozen=True):
    """What a worker puts under `showcase/<rank>`: where its descriptor can be had, or why it shows nothing."""

    address: str = ""
    key: str = ""
    problem: str = ""


class Publisher:
    """One worker's. All is called on its training thread. What goes wrong here is one warning and the end of showing:
    nothing raises, and only `close` may wait for the predictor."""

    def __init__(self, config: ServeConfig, rank: int, sync: Sync, control: Control, token: bytes) -> None:
        self._config = config
        self._every = every_of(config.every)
        self._rank = rank
        self._sync = sync
        self._newest = config.source == "newest" and sync.rounds is not None
        self._round = -1  # the last one that was shown
        self._round_step = 0  # when it was closed
        self._last_step = 0
        self._last_at = time.monotonic()
        self._showcase: Showcase | None = None
        self._passing: Passing | None = None
        if rank and not self._newest:
            return
        if config.source == "newest" and not self._newest:
            log.warning("--serve-from newest: this strategy has no rounds, so it makes no difference")
        try:
            roster = sync.roster
            roster.refresh_buffers()
            self._showcase = Showcase.create(roster.parameters, roster.buffers, roster.entries())
            self._passing = Passing(token, FETCH_S)
            self._passing.offer("showcase", self._showcase.descriptor)
            offer = Offer(self._passing.address, "showcase")
        except Exception as problem:
            self._give_up(problem)
            offer = Offer(problem=str(problem))
        self.show(sync.steps, True)
        control.note(f"showcase/{rank}", msgspec.msgpack.encode(offer))

    def show(self, step: int, at_once: bool = False) -> None:
        """The parameters are whole, after this step: shows them if that is due."""
        if self._showcase is None:
            return
        try:
            if self._sync.rounds is None:
                if at_once or self._is_due(step):
                    self._publish(self._own(), Stamp(step))
            else:
                self._show_round(step, at_once)
        except Exception as problem:
            self._give_up(problem)

    def _show_round(self, step: int, at_once: bool) -> None:
        sync = self._sync
        assert sync.rounds is not None
        if sync.rounds != self._round or not sync.local_steps:
            self._round_step = step
        if at_once or sync.rounds != self._round:
            self._round = sync.rounds
            self._publish(sync.common(), Stamp(self._round_step, round=sync.rounds, local_step=0))
        elif self._newest and self._is_due(step):
            self._publish(self._own(), Stamp(step, round=sync.rounds, local_step=sync.local_steps))

    def sign(self, signature: bytes) -> None:
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

    def _publish(self, parameters: Sequence[torch.Tensor], stamp: Stamp) -> None:
        assert self._showcase is not None
        roster = self._sync.roster
        roster.refresh_buffers()
        self._showcase.publish(parameters, roster.buffers, stamp)
        self._last_step, self._last_at = stamp.step, time.monotonic()

    def _give_up(self, problem: Exception) -> None:
        log.warning("rank %d shows no parameters to the predictor any more: %s", self._rank, problem)
        if self._showcase is not None:
            self._showcase.close()
        self._showcase = None

    def close(self, well: bool) -> None:
        """The worker is done. If all went `well`, a predictor that is to stay but has not looked yet is waited for."""
        deadline = time.monotonic() + (LINGER_S if well and self._config.after else 0.0)
        while self._showcase is not None and not self._showcase.seen and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._passing is not None:
            self._passing.close()
        if self._showcase is not None:
            self._showcase.close()
            self._showcase = None


def note_signature(model: torch.nn.Module, told: Callable[[bytes], None]) -> None:
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
