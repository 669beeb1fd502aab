"""RunDisplay: what a launch shows of its run: the terminal panel, the dashboard's address, the summary and the trace.

A launch of workers that join another launcher's run has none: they report to that run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..runs.run_directory import RunDirectory, home
from ..terminal.screen import Screen
from .config import RunConfig
from .dashboard_socket import DashboardSocket
from .process_set import TRACE
from .signal_pipe import SignalPipe, Watched

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorEvent, CoordinatorService
    from hora.launch.monitor import RunMonitor

PANEL_S = 0.5
UPDATE_S = 1.0
SLOW_START_S = 10.0
"""After this long without a first step, a line says what the run waits for. A panel shows it from the beginning."""


class ValueSource(Protocol):
    def values(self, prefix: str) -> dict[str, bytes]: ...


class RunDisplay:
    """`facts` are those of run.json. ValueError if the run directory is of another version of Hora, or if a package is
    missing. Main thread only."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        screen: Screen,
        signals: SignalPipe,
        facts: dict[str, object],
        make_folder: Callable[[str], str],
    ) -> None:
        from hora.launch.monitor import RunMonitor

        self._config = config
        self._screen = screen
        self._name = directory.name
        self._updated_at = self._started_at = 0.0
        self._slow_start_logged = False
        self._monitor = RunMonitor(
            directory.path if directory.control_path is not None else None,
            directory.name,
            config.size,
            config.strategy.spell() if config.strategy else "",
            facts,
            warn=signals.post,
            log=signals.post if config.progress != "off" else lambda text: None,
            tensorboard_dir=config.tensorboard,
            make_folder=make_folder,
        )
        self._dashboard = self._open_dashboard() if config.dashboard != "off" else None

    def _open_dashboard(self) -> DashboardSocket | None:
        port = self._config.dashboard
        try:
            dashboard = DashboardSocket(port if isinstance(port, int) else None)
        except ValueError as problem:
            self._screen.log(f"no dashboard: {problem}; the run goes on without it")
            return None
        taken = f"port {port} is taken; " if dashboard.moved else ""
        self._screen.log(f"{taken}page {dashboard.address(self._name)}")
        return dashboard

    def observe(self, service: CoordinatorService) -> None:
        """From now on the coordinator passes reports and events to the monitor."""
        service.coordinator.observer = _CoordinatorObserver(self._monitor)

    @property
    def due(self) -> float:
        """When `tick` has something to do, in time.monotonic's time."""
        return self._updated_at + (PANEL_S if self._config.progress == "panel" else UPDATE_S)

    def descriptors(self) -> Watched:
        """The dashboard's socket, while no dashboard process accepts its connections."""
        dashboard = self._dashboard
        if dashboard is None or not dashboard.waiting:
            return {}
        return {dashboard.fileno(): (select.POLLIN, self._on_connection)}

    def _on_connection(self) -> None:
        assert self._dashboard is not None
        try:
            self._dashboard.start(self._name, self._monitor.directory, home())
        except ValueError as problem:
            self._screen.log(f"{problem}; the run goes on without it")

    def tick(self, now: float, coordinator: ValueSource, waiting_for: Callable[[], str]) -> None:
        """Updates panel and monitor if they are due. `waiting_for` says what a run without a first step waits for."""
        if now < self.due:
            return
        self._updated_at = now
        strategy, serving = (
            coordinator.values(key).get(key, b"").decode(errors="replace") for key in ("strategy", "serving")
        )
        starting = self._monitor.status().state == "starting"
        waiting = waiting_for() if starting else ""
        self._monitor.update(strategy=strategy, algorithm=_algorithm(coordinator), serving=serving, waiting=waiting)
        self._started_at = self._started_at or now
        if self._config.progress == "panel":
            self._draw_panel()
        elif starting and not self._slow_start_logged and now - self._started_at >= SLOW_START_S:
            self._slow_start_logged = True
            if waiting != "the first step":
                self._screen.log(f"the run has waited {SLOW_START_S:g} s for {waiting}")

    def _draw_panel(self) -> None:
        from ..terminal import panel

        width, height = self._screen.size()
        lines = panel.render(
            self._monitor.status(),
            width=width,
            height=height,
            address=self._dashboard.address(self._name) if self._dashboard is not None else None,
            color=self._screen.color,
            events=self._monitor.recent,
        )
        self._screen.panel(lines)

    def end(self, end_facts: dict[str, Any]) -> dict[str, Any]:
        """Closes the monitor; returns the run's summary."""
        return self._monitor.close(end_facts)

    def summary_lines(self, facts: dict[str, object], found: dict[str, Any]) -> list[str]:
        """The lines about the summary `found` of the run with these facts."""
        if self._config.progress == "off" or not found:
            return []
        from ..runs import summary

        return summary.summary_lines(found, single=summary.single_worker_speed(facts, summary.steps_taken(found)))

    def merge_trace(self, scratch: str, stop: Callable[[], bool]) -> None:
        """Merges the processes' trace files in `scratch`. It may take long; it ends early when `stop` returns True."""
        if self._config.trace is None:
            return
        from hora.monitor import trace

        try:
            self._screen.log(trace.merge(os.path.join(scratch, TRACE), self._config.trace, stop=stop))
        except ValueError as problem:
            self._screen.log(f"no trace: {problem}")

    def close(self) -> None:
        self._monitor.close({})
        if self._dashboard is not None:
            self._dashboard.end()
            self._dashboard = None


class _CoordinatorObserver:
    """Passes what the coordinator reports to the monitor."""

    def __init__(self, monitor: RunMonitor) -> None:
        self.on_report = monitor.on_report
        self._monitor = monitor

    def on_event(self, event: CoordinatorEvent) -> None:
        self._monitor.on_event(event.kind, str(event.member) if event.member else "", event.text)


def _algorithm(coordinator: ValueSource) -> str:
    """What `auto` has chosen for the largest gradients, if it has."""
    for table in coordinator.values("auto/").values():
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(table)["rows"][-1]["algorithm"])
    return ""
