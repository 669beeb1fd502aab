"""Refusal: a request that gets no answer, as a status of HTTP and one sentence that says why and what to do."""

from __future__ import annotations

from collections.abc import Collection

RETRY_S = 1  # when to come back, told to those whom nothing but the moment stands against


class HttpError(Exception):
    """400: the request cannot be answered as it is. 500: the model or `predict` is at fault. 503: try again."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


class NotReady(HttpError):
    """There are no parameters yet to answer with."""

    def __init__(self) -> None:
        super().__init__("no parameters have been published yet", 503)


def first_line(error: BaseException) -> str:
    """What an exception says, short enough to stand within a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0][:240] if lines else type(error).__name__


def quoted(names: Collection[str]) -> str:
    """Names within a sentence: 'a', 'b'."""
    return ", ".join(repr(name[:80]) for name in [*names][:16]) if names else "none"
