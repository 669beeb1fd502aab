"""JsonLines: logged values and events as lines of JSON that can be followed while the run goes on.

{"step": 12, "count": 1, "at": 3.2, "samples": 768, "epoch": 0, "rank": 1, "loss": 2.31}
{"event": "checkpoint", "step": 12, "at": 3.3, "who": "rank 0 (host a, pid 7)", "text": "…"}
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import msgspec

from .metrics_log import LoggedRow
from .status import RunEvent

NAME = "metrics.jsonl"
_FIELDS = ("step", "count", "at", "samples", "epoch", "rank")
_encode = msgspec.json.Encoder().encode  # NaN and infinity become null


class JsonLines:
    """The writer of one file, which replaces that of an earlier run; for one thread.

    Each write is passed to the kernel in whole lines when it returns. A disk that fails ends it: `warn` is called once.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._fd = -1
        self._size = 0
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._give_up(error)

    def write(self, rows: Iterable[LoggedRow], events: Iterable[RunEvent] = ()) -> None:
        if self._fd < 0:
            return
        lines = [_encode(_row(row)) for row in rows] + [_encode(_event(event)) for event in events]
        text = b"".join(line + b"\n" for line in lines)
        done = 0
        try:
            while done < len(text):
                done += os.write(self._fd, text[done:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size + text.rfind(b"\n", 0, done) + 1)
            self._give_up(error)
        self._size += done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._warn(f"{self.path} cannot be written: {error.strerror or error}; the run continues without it")


def _row(row: LoggedRow) -> dict[str, object]:
    """A value whose name is that of a field is written as value/<name>."""
    line = {name: getattr(row, name) for name in _FIELDS} | {"at": round(row.at, 6)}
    return line | {
        f"value/{name}" if name in _FIELDS or name == "event" else name: value for name, value in row.values.items()
    }


def _event(event: RunEvent) -> dict[str, object]:
    return {"event": event.kind, "step": event.step, "at": round(event.at, 6), "who": event.who, "text": event.text}
