"""RunView: one run as JSON for the page, read from its directory and its database."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import msgspec

from .. import strategies
from ..monitor.status import RunStatus
from ..runs.reader import RunReader
from .catalogue import RunCatalogue, RunNotFound, encode, state_of

POLLS = 4  # of the database per look at the directory; histograms are read half as often


class RunView:
    """`snapshot` is all that is known, `change` what is new since the last call. For one thread."""

    def __init__(self, catalogue: RunCatalogue, name: str) -> None:
        self._catalogue, self._name = catalogue, name
        self._run = catalogue.find(name)
        self._database_id: tuple[int, int] | None = None
        self._reader: RunReader | None = None
        self._problem = self._state = ""
        self._end: dict[str, Any] | None = None  # as the database has it; end.json is written later
        self._version = self._event = self._num_polls = 0
        self._histograms = b""
        self._strategy: dict[str, Any] = {}
        self._sent: dict[str, Any] = {}
        self.is_new = True  # no snapshot was taken yet

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more: the launcher is gone, or has recorded the end."""
        return not self._run.live or self._end is not None

    def snapshot(self, *, restart: bool = False) -> bytes:
        """All that is known now. With `restart`, `change` continues from here."""
        self._refresh_record()
        self._reopen()
        data: dict[str, Any] = {"curves": {}, "events": [], "histograms": {}, "version": 0}
        if self._reader is not None:
            try:
                data["version"], data["curves"] = self._reader.curves()
                data["events"] = self._reader.events()
                data["histograms"] = self._reader.histograms()
                data["now"] = self._status(self._reader)
                data["summary"] = self._reader.get("summary")
            except ValueError as error:
                self._problem = str(error)
        facts = self._facts(data)
        if restart:
            self.is_new = False
            self._version, self._event = data["version"], data["events"][-1].number if data["events"] else 0
            self._sent = facts
        try:
            return encode({**data, **facts})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # the database holds no valid text
            empty = {"curves": {}, "events": [], "histograms": {}, "version": data["version"]}
            problem = self._problem or f"the run database cannot be shown: {error}"
            return encode({**empty, **facts, "problem": problem})

    def change(self) -> tuple[bytes, bool] | None:
        """What is new since the last call, and whether it is a whole snapshot, as after a new run has started in the
        directory; None if nothing is new. A database that cannot be read now is read again next time."""
        self._num_polls += 1
        if self._num_polls % POLLS == 0:
            self._refresh_record()
        if self._reopen():
            return self.snapshot(restart=True), True
        data: dict[str, Any] = {}
        if self._reader is not None:
            with contextlib.suppress(ValueError):
                data = self._changes(self._reader)
        facts = self._facts(data)
        data |= {key: value for key, value in facts.items() if self._sent.get(key) != value}
        self._sent = facts
        return (encode(data), False) if data else None

    def _changes(self, reader: RunReader) -> dict[str, Any]:
        data: dict[str, Any] = {}
        if reader.version() != self._version:
            data["version"], data["curves"] = reader.curves(after=self._version)
            data["now"] = self._status(reader)
            data["events"] = reader.events(after=self._event)
            self._version = data["version"]
            self._event = data["events"][-1].number if data["events"] else self._event
        if self._num_polls % (2 * POLLS) == 1 or self.is_over:
            histograms = encode(reader.histograms())
            if histograms != self._histograms:
                self._histograms = histograms
                data["histograms"] = msgspec.Raw(histograms)
        if self.is_over:
            data["summary"] = reader.get("summary")
        return data

    def _status(self, reader: RunReader) -> RunStatus:
        status = reader.status()
        end = reader.get("end") if status.state == "ended" else None
        self._end = end if isinstance(end, dict) else None
        self._strategy = _description(status)
        return status

    def _refresh_record(self) -> None:
        try:
            self._run = self._catalogue.find(self._name)
        except RunNotFound:  # its directory was deleted
            self._run = dataclasses.replace(self._run, live=False)

    def _reopen(self) -> bool:
        """Open the database if it is another file than before, or could not be read; whether it replaced an earlier
        one."""
        current = self._run.database_id
        if current == self._database_id and not (self._problem and self._run.live):
            return False
        before, self._database_id = self._database_id, current
        self._reader = self._end = None
        try:
            self._reader, self._problem = self._run.reader(), ""
        except ValueError as error:
            self._problem = str(error)
        return before not in (None, current)

    def _facts(self, data: dict[str, Any]) -> dict[str, Any]:
        run = dataclasses.replace(self._run, end=self._run.end or self._end, live=not self.is_over)
        self._state = state_of(run, data["now"].state if "now" in data else self._state)
        config = run.config
        if not config and self._reader is not None:
            with contextlib.suppress(ValueError):
                config = self._reader.get("config") or {}
        return {
            "name": run.name, "live": run.live, "run": config, "end": run.end, "problem": self._problem,
            "remembered": self._database_id is not None, "state": self._state, "strategy": self._strategy,
        }  # fmt: skip


def _description(status: RunStatus) -> dict[str, Any]:
    """How the strategy describes itself, and its options; the page draws from this and knows no strategy by name."""
    strategy = _parse(status.strategy)
    described = {name: getattr(strategy or status, name) for name in ("topology", "unit", "synchronous")}
    return {**described, "options": dataclasses.asdict(strategy) if strategy is not None else {}}


@functools.lru_cache(64)
def _parse(spelling: str) -> strategies.Strategy | None:
    """None for a strategy that is not known yet, or not installed here."""
    try:
        return strategies.parse(spelling)
    except ValueError:
        return None
