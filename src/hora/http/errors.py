"""HTTP errors: a status code and one sentence, sent to the client as {"error": "…"}."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from starlette.responses import Response

RETRY_S = 1  # sent as Retry-After with every 503


class HttpError(Exception):
    """400: the request is invalid. 500: the model or `predict` failed. 503: try again later."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def error_response(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    if status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_S)}
    return Response(msgspec.json.encode({"error": message}), status, headers, "application/json")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, at most 240 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:240] if lines else type(error).__name__


def quoted(names: Collection[str]) -> str:
    """Names for a message: 'a', 'b'."""
    return ", ".join(repr(name[:80]) for name in [*names][:16]) if names else "none"
