"""Configuration of the prediction service (`--serve`): checked by the CLI, passed to the processes as JSON."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

import msgspec

from .listening import LOOPBACK, MAX_PORT, format_address, listen


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where the predictor listens, and which parameters it serves until when. ValueError for invalid values.

    `hosts` are further names that clients may use for it. `every` is how often a worker publishes between rounds:
    `step`, a number of steps, or seconds as `0.5s`. `source` is `average`, the result of the last round, or `newest`,
    the most recent worker's parameters. `after`: serve on after training. A `checkpoint` is served without a run.
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
            raise ValueError(f"--serve-from takes average or newest, not {self.source!r}")
        if self.max_batch < 1 or not 0 <= self.max_wait_ms < 60_000:
            raise ValueError("--serve-batch takes rows and milliseconds, e.g. --serve-batch 64,2")
        parse_interval(self.every)

    @property
    def _flag(self) -> str:
        return "--port" if self.checkpoint else "--serve"

    @property
    def url(self) -> str:
        return f"http://{format_address(self.host, self.port)}"

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> ServeConfig:
        try:
            return msgspec.json.decode(text, type=ServeConfig)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"HORA_SERVE cannot be read: {problem}") from None

    def check_port(self) -> None:
        """ValueError if the address cannot be bound now."""
        try:
            listen(self.host, self.port).close()
        except ValueError as problem:
            free = "0" if self.host == LOOPBACK else format_address(self.host, 0)
            raise ValueError(f"{problem}: {self._flag} {free}") from None


class PublishInterval(NamedTuple):
    """Either a number of steps or a number of seconds."""

    steps: int | None = None
    seconds: float | None = None


def parse_interval(text: str) -> PublishInterval:
    """`step`, `10` (steps), `1s`, `0.5s`; ValueError otherwise."""
    if text == "step":
        return PublishInterval(steps=1)
    if re.fullmatch(r"[1-9]\d{0,8}", text):
        return PublishInterval(steps=int(text))
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)s", text)
    if match is None:
        raise ValueError(f"--serve-every takes step, a number of steps, or seconds as 0.5s, not {text!r}")
    return PublishInterval(seconds=float(match[1]))


def parse_batch(text: str) -> tuple[int, float]:
    """`64,2`: the most rows in a batch, and how many milliseconds a request waits for others."""
    match = re.fullmatch(r"([1-9]\d{0,6})(?:,(\d{1,5}(?:\.\d{1,3})?))?", text)
    if match is None:
        raise ValueError(f"--serve-batch takes rows and milliseconds, not {text!r}; e.g. --serve-batch 64,2")
    return int(match[1]), float(match[2] or ServeConfig.max_wait_ms)
