"""RunDigest: a run, live or past, in a few facts, from its directory and its run database."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import exit_codes
from .json_file import jsonable
from .run_directory import RunRecord
from .summary import logged_values, number_at

if TYPE_CHECKING:
    from ..monitor.status import RunStatus

_STATES = {
    exit_codes.OK: "ended well",
    exit_codes.SCRIPT_FAILED: "failed",
    exit_codes.RANK_KILLED: "rank killed",
    exit_codes.INTERRUPTED: "interrupted",
    exit_codes.OUTPUT_CLOSED: "output closed",
    exit_codes.TERMINATED: "terminated",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDigest:
    """`summary` is RunStatus.summary(), empty if unknown; `problem` says why the run database cannot be read. `status`
    is the newest status, for a run without end.json."""

    name: str
    path: str
    live: bool
    state: str
    strategy: str
    workers: int | None
    servers: int | str | None
    started: str
    ended: str
    seconds: float | None
    summary: dict[str, Any]
    command: list[str]
    problem: str = ""
    status: RunStatus | None = None

    @property
    def steps(self) -> int:
        return int(number_at(self.summary, "steps"))

    @property
    def samples(self) -> int:
        return int(number_at(self.summary, "samples"))

    @property
    def samples_per_s(self) -> float:
        return number_at(self.summary, "samples_per_s")

    @property
    def values(self) -> dict[str, float]:
        return logged_values(self.summary)

    def as_json(self) -> dict[str, Any]:
        """For `--json`: NaN and infinity become null."""
        plain: dict[str, Any] = jsonable(dataclasses.asdict(dataclasses.replace(self, status=None)))
        del plain["status"]
        return plain


def digest(record: RunRecord) -> RunDigest:
    """What is known of a run without contacting its coordinator."""
    config, end = record.config, record.end or {}
    summary, problem, status = end.get("summary"), "", None
    if not isinstance(summary, dict):
        summary = {}
        try:
            if (reader := record.reader()) is not None:
                status = reader.status()
                written = reader.get("summary")
                summary = written if isinstance(written, dict) else {}
        except ValueError as error:
            problem = str(error)
    seconds = end.get("seconds")
    if seconds is None:
        seconds = number_at(summary, "seconds") or None
    workers, command = config.get("size"), config.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    return RunDigest(
        name=record.name,
        path=record.path,
        live=record.live,
        state=_state(record, status.state if status is not None else ""),
        strategy=str(config.get("strategy") or end.get("strategy") or (status.strategy if status else "")),
        workers=workers if isinstance(workers, int) else None,
        servers=config.get("servers"),
        started=str(config.get("started") or ""),
        ended=str(end.get("ended") or ""),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        summary=summary,
        command=["-m", *words] if config.get("module") else words,
        problem=problem,
        status=status,
    )


def _state(record: RunRecord, status: str) -> str:
    if record.end is not None:
        code = record.end.get("code")
        return _STATES.get(code, "failed") if isinstance(code, int) else "failed"
    if not record.live:
        return "broken off"
    return status if status in ("starting", "running") else "running"
