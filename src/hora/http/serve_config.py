"""ServeConfig: what `--serve` was asked to do, checked before anything is started; the processes get it as text."""

from __future__ import annotations

import dataclasses
import re
import socket

import msgspec

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where the predictor listens, what it shows and how long. ValueError, in one line, says what is wrong.

    `hosts` are names by which it may be asked besides its own address. `every` is when a worker publishes what no round
    publishes: `step`, a number of steps, or seconds as `0.5s`. `source` is `average`, what the workers agreed upon
    last, or `newest`, the freshest worker's parameters within a round. `after`: it stays after the training. A
    `checkpoint` is served by itself, without a run.
    """

    host: str = LOOPBACK
    port: int = 0
    hosts: tuple[str, ...] = ()
    every: str = "1s"
    source: str = "average"
    after: bool = False
    max_batch: int = 64
    max_wait_ms: float = 2.0
    name: str = "model"
    checkpoint: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"{self._flag} takes a port from 0 to {MAX_PORT}, not {self.port}; e.g. {self._flag} 8000")
        if self.source not in ("average", "newest"):
            raise ValueError(f"--serve-from {self.source!r} is unknown; there are: average, newest")
        if self.max_batch < 1 or not 0 <= self.max_wait_ms < 60_000:
            raise ValueError("--serve-batch takes rows and milliseconds, e.g. --serve-batch 64,2")
        every_of(self.every)

    @property
    def _flag(self) -> str:
        return "--port" if self.checkpoint else "--serve"

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def spell(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def parse(text: str) -> ServeConfig:
        try:
            return msgspec.json.decode(text, type=ServeConfig)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"HORA_SERVE cannot be read: {problem}") from None

    def check_port(self) -> None:
        """ValueError if nobody can listen there now."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as problem:
            why = str(problem.strerror or problem).partition(" (")[0]
            raise ValueError(
                f"cannot serve on {self.host}:{self.port}: {why}; choose another port, or 0 for one that is free: "
                f"{self._flag} {'' if self.host == LOOPBACK else f'{self.host}:'}0"
            ) from None


@dataclasses.dataclass(frozen=True)
class PublishInterval:
    """After so many steps, or after so many seconds."""

    steps: int | None = None
    seconds: float | None = None


def every_of(text: str) -> PublishInterval:
    """`step`, `10` (steps), `1s`, `0.5s`; else ValueError."""
    if text == "step":
        return PublishInterval(steps=1)
    if re.fullmatch(r"[1-9]\d{0,8}", text):
        return PublishInterval(steps=int(text))
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)s", text)
    if match is None:
        raise ValueError(f"--serve-every takes step, a number of steps, or seconds as 0.5s, not {text!r}")
    return PublishInterval(seconds=float(match[1]))


def address_of(text: str, flag: str = "--serve") -> tuple[str, int]:
    """`8000`, `:8000`, `0.0.0.0:8000`, `[::1]:8000`: without a host it is this machine's own, 127.0.0.1.

    ValueError names the `flag` that it was given to."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > MAX_PORT or not re.fullmatch(r"[A-Za-z0-9._:-]*", host):
        raise ValueError(f"{flag} takes [HOST:]PORT, not {text!r}; e.g. {flag} 8000, {flag} 0.0.0.0:8000")
    return host or LOOPBACK, int(port)


def batch_of(text: str) -> tuple[int, float]:
    """`64,2`: rows of a batch at most, and how many milliseconds the first of them waits for others."""
    match = re.fullmatch(r"([1-9]\d{0,6})(?:,(\d{1,5}(?:\.\d{1,3})?))?", text)
    if match is None:
        raise ValueError(f"--serve-batch takes rows and milliseconds, not {text!r}; e.g. --serve-batch 64,2")
    return int(match[1]), float(match[2] or ServeConfig.max_wait_ms)
