"""Child: one rank, server or predictor as the launcher holds it, on this machine or on another."""

from __future__ import annotations

import abc
import signal
import socket

from ..runs.exit_codes import SECONDARY_FAILURE
from ..terminal.screen import RankStream, seat_name
from ..terminal.tracebacks import exception_of, last_traceback
from .forkserver.client import ForkedProcess


class RunProcess(abc.ABC):
    """`err` is its stderr as it is shown; `host` where it runs; `peak_bytes` the most memory it had, once it has ended.
    Nothing here blocks."""

    role: str
    rank: int
    host: str
    err: RankStream
    peak_bytes: int

    @property
    @abc.abstractmethod
    def pid(self) -> int: ...

    @property
    @abc.abstractmethod
    def returncode(self) -> int | None:
        """As in subprocess, once `reap` was called."""

    @property
    def name(self) -> str:
        return seat_name(self.role, self.rank)

    @property
    @abc.abstractmethod
    def running(self) -> bool: ...

    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Whether it has ended, and was not reaped yet."""

    @abc.abstractmethod
    def reap(self) -> None:
        """After `has_ended`: takes its exit code."""

    @abc.abstractmethod
    def signal_main(self, number: int) -> None: ...

    @abc.abstractmethod
    def signal_group(self, number: int) -> None: ...

    @property
    def echo(self) -> bool:
        return self.returncode == SECONDARY_FAILURE

    @property
    def how(self) -> str:
        """How it ended, as `exit code 1` or `killed by SIGKILL`."""
        assert self.returncode is not None
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        return f"killed by {signal_name(-self.returncode)}"

    def traceback(self) -> list[str]:
        """The last traceback on its stderr; empty when there is none."""
        return last_traceback(self.err.last_lines())

    @property
    def exception(self) -> str:
        return exception_of(self.traceback())


class LocalProcess(RunProcess):
    """On this machine."""

    def __init__(self, role: str, rank: int, process: ForkedProcess, err: RankStream) -> None:
        self.role = role
        self.rank = rank
        self.host = socket.gethostname()
        self.err = err
        self.peak_bytes = 0
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def has_ended(self) -> bool:
        return self.process.has_ended()

    def reap(self) -> None:
        self.process.reap()
        self.peak_bytes = self.process.peak_bytes

    def signal_main(self, number: int) -> None:
        self.process.signal(number, group=False)

    def signal_group(self, number: int) -> None:
        self.process.signal(number, group=True)

    @property
    def how(self) -> str:
        return self.process.lost or super().how


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
