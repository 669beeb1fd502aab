"""RunDisplay: what a launch shows of its run: the terminal panel, the dashboard's address, the summary and the trace.

A launch of workers that join another launcher's run shows nothing: they report to that run.
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
    """Main thread only. Without a monitor it does nothing."""

    def __init__(self) -> None:
        self._dashboard: DashboardSocket | None = None
        self._monitor: RunMonitor | None = None
        self._config: RunConfig | None = None
        self._screen: Screen | None = None
        self._name = ""
        self._updated_at = 0.0
        self._summary: dict[str, Any] = {}
        self._panel_closed = False
        self._started_at = 0.0
        self._slow_start_logged = False

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        directory: RunDirectory,
        screen: Screen,
        signals: SignalPipe,
        facts: dict[str, object],
        make_folder: Callable[[str], str],
    ) -> RunDisplay:
        """ValueError if the run directory is of another version of Hora, or if a package is missing."""
        from hora.launch.monitor import RunMonitor

        display = cls()
        display._config, display._screen, display._name = config, screen, directory.name
        display._monitor = RunMonitor(
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
        if config.dashboard != "off":
            try:
                socket = DashboardSocket(config.dashboard if isinstance(config.dashboard, int) else None)
            except ValueError as problem:
                screen.log(f"no dashboard: {problem}; the run goes on without it")
            else:
                display._dashboard = socket
                taken = f"port {config.dashboard} is taken; " if socket.moved else ""
                screen.log(f"{taken}page {socket.address(directory.name)}")
        return display

    def observe(self, service: CoordinatorService) -> None:
        """From now on the coordinator passes reports and events to the monitor."""
        assert self._monitor is not None
        service.coordinator.observer = _CoordinatorObserver(self._monitor)

    @property
    def due(self) -> float | None:
        """When `tick` has something to do, in time.monotonic's time."""
        if self._monitor is None or self._panel_closed:
            return None
        return self._updated_at + (PANEL_S if self._has_panel else UPDATE_S)

    @property
    def _has_panel(self) -> bool:
        return self._config is not None and self._config.progress == "panel"

    def descriptors(self) -> Watched:
        """The dashboard's socket, while no dashboard process accepts its connections."""
        dashboard = self._dashboard
        if dashboard is None or not dashboard.waiting:
            return {}
        return {dashboard.fileno(): (select.POLLIN, self._on_connection)}

    def _on_connection(self) -> None:
        assert self._dashboard is not None and self._monitor is not None and self._screen is not None
        try:
            self._dashboard.start(self._name, self._monitor.directory, home())
        except ValueError as problem:
            self._screen.log(f"{problem}; the run goes on without it")

    def tick(self, now: float, coordinator: ValueSource, waiting_for: Callable[[], str]) -> None:
        """Updates panel and monitor if they are due. `waiting_for` says what a run without a first step waits for."""
        if self.due is None or now < self.due:
            return
        self._updated_at = now
        assert self._monitor is not None and self._screen is not None
        strategy, serving = (
            coordinator.values(key).get(key, b"").decode(errors="replace") for key in ("strategy", "serving")
        )
        starting = self._monitor.status().state == "starting"
        waiting = waiting_for() if starting else ""
        self._monitor.update(strategy=strategy, algorithm=_algorithm(coordinator), serving=serving, waiting=waiting)
        self._started_at = self._started_at or now
        if self._has_panel:
            self._draw_panel()
        elif starting and not self._slow_start_logged and now - self._started_at >= SLOW_START_S:
            self._slow_start_logged = True
            if waiting != "the first step":
                self._screen.log(f"the run has waited {SLOW_START_S:g} s for {waiting}")

    def _draw_panel(self) -> None:
        from ..terminal import panel

        assert self._monitor is not None and self._screen is not None
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

    def close_panel(self) -> None:
        self._panel_closed = True

    def end(self, end_facts: dict[str, Any]) -> dict[str, Any]:
        """Closes the monitor; returns the run's summary."""
        if self._monitor is not None:
            self._summary = self._monitor.close(end_facts)
            self._monitor = None
        return self._summary

    def summary_lines(self, facts: dict[str, object]) -> list[str]:
        if self._config is None or self._config.progress == "off" or not self._summary:
            return []
        from ..runs import summary

        single = summary.single_worker_speed(facts, summary.steps_taken(self._summary))
        return summary.summary_lines(self._summary, single=single)

    def merge_trace(self, scratch: str, stop: Callable[[], bool]) -> None:
        """Merges the processes' trace files in `scratch`. It may take long; it ends early when `stop` returns True."""
        if self._config is None or self._config.trace is None:
            return
        from hora.monitor import trace

        assert self._screen is not None
        try:
            self._screen.log(trace.merge(os.path.join(scratch, TRACE), self._config.trace, stop=stop))
        except ValueError as problem:
            self._screen.log(f"no trace: {problem}")

    def close(self) -> None:
        self.end({})
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
