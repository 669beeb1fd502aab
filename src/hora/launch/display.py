"""Show: what a launch lets be seen of its run: the watcher behind it, the panel, the page's bell, the trace.

A launch of workers that join another's run shows nothing itself: they report to the run that they have joined.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..runs.run_directory import RunDirectory, home
from ..terminal.screen import Screen
from .config import RunConfig
from .dashboard_socket import DashboardSocket
from .process_set import TRACE
from .signal_pipe import SignalPipe

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorEvent, CoordinatorService, Member
    from hora.launch.monitor import RunMonitor

PANEL_S = 0.5
LOOK_S = 1.0
SLOW_START_S = 10.0
"""After this long a start that is not over says what it waits for; a panel says it from the beginning."""


class ValueSource(Protocol):
    def values(self, prefix: str) -> dict[str, bytes]: ...


class RunDisplay:
    """Main thread only. Without a watcher it does nothing."""

    def __init__(self) -> None:
        self.bell: DashboardSocket | None = None
        self.watcher: RunMonitor | None = None
        self._config: RunConfig | None = None
        self._screen: Screen | None = None
        self._name = ""
        self._looked_at = 0.0
        self._summary: dict[str, Any] = {}
        self._closed = False
        self._started_at = 0.0
        self._told_waiting = False

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        record: RunDirectory,
        screen: Screen,
        wake: SignalPipe,
        facts: dict[str, object],
        make_folder: Callable[[str], str],
    ) -> RunDisplay:
        """ValueError if the run's directory is another version's, or something that was asked for is not there."""
        from hora.launch.monitor import RunMonitor

        show = cls()
        show._config, show._screen, show._name = config, screen, record.name
        show.watcher = RunMonitor(
            record.path if record.control_path is not None else None,
            record.name,
            config.size,
            config.strategy.spell() if config.strategy else "",
            facts,
            warn=wake.post,
            say=wake.post if config.progress != "off" else lambda text: None,
            tensorboard_dir=config.tensorboard,
            make_folder=make_folder,
        )
        if config.dashboard != "off":
            try:
                show.bell = DashboardSocket(config.dashboard if isinstance(config.dashboard, int) else None)
            except ValueError as problem:
                screen.say(f"no page: {problem}; the run goes on")
        if show.bell is not None:
            taken = f"port {config.dashboard} is taken; " if show.bell.moved else ""
            screen.say(f"{taken}page {show.bell.address(record.name)}")
        return show

    def watch(self, service: CoordinatorService) -> None:
        """From now on the coordinator tells the watcher."""
        assert self.watcher is not None
        service.coordinator.observer = _CoordinatorObserver(self.watcher)

    @property
    def due(self) -> float | None:
        """When there is something to draw or to look up, as time.monotonic counts."""
        return None if self.watcher is None or self._closed else self._looked_at + self._every

    @property
    def _every(self) -> float:
        return PANEL_S if self._has_panel else LOOK_S

    @property
    def _has_panel(self) -> bool:
        return self._config is not None and self._config.progress == "panel"

    def answer(self) -> None:
        """Somebody has come to the page's address."""
        assert self.bell is not None and self.watcher is not None
        try:
            self.bell.answer(self._name, self.watcher.directory, home())
        except ValueError as problem:
            assert self._screen is not None
            self._screen.say(f"{problem}; the run goes on without it")

    def tick(self, now: float, desk: ValueSource, awaited: Callable[[], str]) -> None:
        """`awaited` says what a run waits for that has not taken a step yet."""
        due = self.due
        if due is None or now < due:
            return
        self._looked_at = now
        assert self.watcher is not None and self._screen is not None
        told = [desk.values(key).get(key, b"").decode(errors="replace") for key in ("strategy", "serving")]
        starting = self.watcher.now().state == "starting"
        waiting = awaited() if starting else ""
        self.watcher.settle(strategy=told[0], algorithm=_algorithm(desk), serving=told[1], waiting=waiting)
        self._started_at = self._started_at or now
        if starting and not self._has_panel and not self._told_waiting and now - self._started_at >= SLOW_START_S:
            self._told_waiting = True
            if waiting != "the first step":
                self._screen.say(f"the run has waited {SLOW_START_S:g} s for {waiting}")
        if self._has_panel:
            from ..terminal import panel

            width, height = self._screen.size()
            address = self.bell.address(self._name) if self.bell is not None else None
            lines = panel.render(
                self.watcher.now(),
                width=width,
                height=height,
                address=address,
                color=self._screen.color,
                events=self.watcher.recent,
            )
            self._screen.panel(lines)

    def close_panel(self) -> None:
        self._closed = True

    def end(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The run is over; what there is to say of it."""
        if self.watcher is not None:
            self._summary = self.watcher.close(facts)
            self.watcher = None
        return self._summary

    def last_words(self, facts: dict[str, object]) -> list[str]:
        if self._config is None or self._config.progress == "off" or not self._summary:
            return []
        from ..runs import summary

        return summary.summary_lines(
            self._summary, single=summary.single_worker_speed(facts, summary.steps_taken(self._summary))
        )

    def merge(self, scratch: str, stop: Callable[[], bool]) -> None:
        """The trace, of the ranks' parts of it in `scratch`. It may take long; `stop` says that nobody waits for it."""
        if self._config is None or self._config.trace is None:
            return
        from hora.monitor import trace

        assert self._screen is not None
        try:
            self._screen.say(trace.merge(os.path.join(scratch, TRACE), self._config.trace, stop=stop))
        except ValueError as problem:
            self._screen.say(f"no trace: {problem}")

    def close(self) -> None:
        if self.watcher is not None:
            self.watcher.close({})
            self.watcher = None
        if self.bell is not None:
            self.bell.end()
            self.bell = None


class _CoordinatorObserver:
    """The coordinator's words, as the watcher takes them."""

    def __init__(self, watcher: RunMonitor) -> None:
        self._watcher = watcher

    def on_report(self, member: Member, body: bytes) -> None:
        self._watcher.hear(member, body)

    def on_event(self, event: CoordinatorEvent) -> None:
        self._watcher.event(event.kind, str(event.member) if event.member else "", event.text)


def _algorithm(desk: ValueSource) -> str:
    """What `auto` has chosen for the largest gradients, if it has."""
    for table in desk.values("auto/").values():
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(table)["rows"][-1]["algorithm"])
    return ""
