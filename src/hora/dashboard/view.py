"""View: what the page is told of one run, read from its directory and memory. One thread at a time."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from ..monitor.status import RunStatus
from ..runs import exit_codes
from ..runs.reader import RunReader
from .runs import RunNotFound, StoredRun, StoredRuns

encode = msgspec.json.Encoder().encode

STOPS = (exit_codes.INTERRUPTED, exit_codes.OUTPUT_CLOSED, exit_codes.TERMINATED)
GLANCES = 4  # looks at the memory for one at the directory


class RunView:
    """A run as it changes. What changed last is remembered, so that `change` tells only what is new."""

    def __init__(self, runs: StoredRuns, name: str) -> None:
        self._runs, self._name = runs, name
        self._run = runs.find(name)
        self._mark: tuple[int, int] | None = None
        self._reading: RunReader | None = None
        self._problem = ""
        self._state = ""
        self._ended: dict[str, Any] | None = None  # what the memory says of the end; end.json is written after it
        self._version = 0
        self._event = 0
        self._looks = 0
        self._histograms = b""
        self._told: dict[str, Any] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more: its launcher has gone, or has written how it ended."""
        return not self._run.live or self._ended is not None

    @property
    def is_new(self) -> bool:
        """Whether nothing was told yet."""
        return not self._looks

    def begin(self) -> bytes:
        """All that is known now; `change` tells what comes after it."""
        self._looks += 1
        return self._whole(begin=True)

    def whole(self) -> bytes:
        """All that is known now."""
        return self._whole()

    def _whole(self, begin: bool = False) -> bytes:
        self._refresh(again=True)
        told: dict[str, Any] = {"curves": {}, "events": [], "histograms": {}, "version": 0}
        reading = self._reading
        if reading is not None:
            try:
                told["version"], told["curves"] = reading.curves()
                told["events"] = reading.events()
                told["histograms"] = reading.histograms()
                told["now"] = self._now(reading)
                told["summary"] = reading.get("summary")
            except ValueError as problem:
                self._problem = str(problem)
        self._settle(told)
        facts = self._facts()
        if begin:
            self._version, self._event = told["version"], told["events"][-1].number if told["events"] else 0
            self._told = facts
        return _encoded(told, facts)

    def change(self) -> tuple[bytes, bool] | None:
        """What is new since it was asked last, and whether that is all that there is (the memory began anew); None if
        nothing is. A memory that cannot be read now is asked again next time."""
        self._looks += 1
        anew = self._refresh(again=self._looks % GLANCES == 0)
        if anew:
            return self._whole(begin=True), True
        told: dict[str, Any] = {}
        if self._reading is not None:
            with contextlib.suppress(ValueError):
                told = self._news(self._reading)
        self._settle(told)
        facts = self._facts()
        told |= {key: value for key, value in facts.items() if self._told.get(key) != value}
        self._told = facts
        return (encode(told), False) if told else None

    def _news(self, reading: RunReader) -> dict[str, Any]:
        version = reading.version()
        told: dict[str, Any] = {}
        if version != self._version:
            told["version"], told["curves"] = reading.curves(after=self._version)
            told["now"] = self._now(reading)
            told["events"] = reading.events(after=self._event)
            self._version = told["version"]
            self._event = told["events"][-1].number if told["events"] else self._event
        if self._looks % (2 * GLANCES) == 1 or self.is_over:
            histograms = encode(reading.histograms())
            if histograms != self._histograms:
                self._histograms = histograms
                told["histograms"] = msgspec.Raw(histograms)
        if self.is_over:
            told["summary"] = reading.get("summary")
        return told

    def _now(self, reading: RunReader) -> RunStatus:
        now = reading.status()
        ended = reading.get("end") if now.state == "ended" else None
        self._ended = ended if isinstance(ended, dict) else None
        return now

    def _settle(self, told: dict[str, Any]) -> None:
        """What state the run is in."""
        run = self._run._replace(end=self._run.end or self._ended, live=not self.is_over)
        self._state = state_of(run, told["now"].state if "now" in told else self._state)

    def _refresh(self, again: bool) -> bool:
        """Look at the directory, if it is time, and open the memory that is there now; whether it is another one."""
        if again:
            try:
                self._run = self._runs.find(self._name)
            except RunNotFound:  # its directory was deleted
                self._run = self._run._replace(live=False)
        mark = self._run.mark
        if mark == self._mark and not (self._problem and self._run.live):  # it may have been on its way
            return False
        before, self._mark = self._mark, mark
        self._reading = self._ended = None
        try:
            self._reading, self._problem = self._run.read(), ""
        except ValueError as problem:
            self._problem = str(problem)
        return before not in (None, mark)

    def _facts(self) -> dict[str, Any]:
        run, begun = self._run, self._run.config
        if not begun and self._reading is not None:
            with contextlib.suppress(ValueError):
                begun = self._reading.get("config") or {}
        return {
            "name": run.name, "live": not self.is_over, "run": begun, "end": run.end or self._ended,
            "problem": self._problem,
            "remembered": self._mark is not None, "state": self._state,
        }  # fmt: skip


def _encoded(told: dict[str, Any], facts: dict[str, Any]) -> bytes:
    """A memory with what nobody can write as JSON costs what it told."""
    try:
        return encode({**told, **facts})
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        empty = {"curves": {}, "events": [], "histograms": {}, "version": told["version"]}
        return encode({**empty, **facts, "problem": facts["problem"] or f"its memory cannot be shown: {problem}"})


def state_of(run: StoredRun, told: str) -> str:
    """starting, running, ended, stopped, failed, or lost: its launcher went without a word. `told` is what its memory
    says."""
    if run.live:
        return told if told in ("starting", "running", "ended") else "starting"
    if run.end is None:
        return "ended" if told == "ended" else "lost"
    code = run.end.get("code")
    return "ended" if code in (exit_codes.OK, None) else "stopped" if code in STOPS else "failed"
