"""Record: what was measured for a claim, where, when and by which command, as JSON lines: a head, then the rows.

A record holds no verdict: it is judged again when it is read (claim.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import subprocess
from collections.abc import Sequence

from .claim import Row

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """`commit` ends with + if the tree had other changes."""

    claim: str
    command: str
    date: str
    machine: str
    cores: int
    commit: str
    seconds: float
    quick: bool
    rows: Sequence[Row]

    @property
    def stem(self) -> str:
        """The name of its files: one for each claim, number of cores, and length."""
        return f"{self.claim}-{self.cores}-cores{'-quick' if self.quick else ''}"

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """Creates the folder if needed. The file is written atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        path = folder / f"{self.stem}.jsonl"
        fresh = path.with_suffix(".part")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in (head, *self.rows)))
        fresh.replace(path)
        return path


def measured(
    claim: str, command: str, rows: Sequence[Row], seconds: float, *, commit: str = UNKNOWN, quick: bool = False
) -> Record:
    """The record of what was measured just now, on this machine."""
    from hora.net.machine import machine_text, num_cores

    return Record(
        claim=claim,
        command=command,
        date=datetime.date.today().isoformat(),
        machine=machine_text(),
        cores=num_cores(),
        commit=commit,
        seconds=seconds,
        quick=quick,
        rows=rows,
    )


def read(path: pathlib.Path) -> Record:
    """Raises ValueError if the file is no record."""
    try:
        head, *rows = (json.loads(line) for line in path.read_text().splitlines())
        return Record(rows=rows, **head)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no record of a claim: {error}") from None


def read_all(folder: pathlib.Path) -> list[Record]:
    return [read(path) for path in sorted(folder.glob("*.jsonl"))]


def commit() -> str:
    """Of the tree that Hora is imported from, if it is one."""
    home = pathlib.Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=home, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return described.stdout.strip() or UNKNOWN
