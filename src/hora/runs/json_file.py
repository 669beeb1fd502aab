"""Safe reading of JSON files that another process, or another user, may have written."""

from __future__ import annotations

import json
import math
import os
import stat
from typing import Any, BinaryIO

MAX_BYTES = 1 << 20  # of a file

_INT64_LIMIT = 1 << 63


def decode(text: str | bytes) -> Any:
    """The JSON value in `text`, encodable as UTF-8 JSON again: lone surrogates become ?, integers beyond 64 bits become
    floats. ValueError if it is not JSON or nested too deeply."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_int=_parse_int)
        if "\\ud" in text.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_regular(path: str) -> BinaryIO:
    """A regular file of at most MAX_BYTES, opened for reading; OSError for anything else. Never blocks on a FIFO."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
        file.close()
        raise OSError(f"{path} is not a regular file of at most {MAX_BYTES} bytes")
    return file


def read_object(path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none that can be read."""
    try:
        with open_regular(path) as file:
            value = decode(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def jsonable(value: Any) -> Any:
    """The same value with None for NaN and infinity, and with string keys."""
    if isinstance(value, dict):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse_int(digits: str) -> int | float:
    number = int(digits) if len(digits) < 20 else _INT64_LIMIT
    return number if -_INT64_LIMIT <= number < _INT64_LIMIT else float(digits)
