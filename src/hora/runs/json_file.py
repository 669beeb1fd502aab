"""Facts: JSON as it lies on a disk, where anybody may have written it. What is read can be written again as UTF-8."""

from __future__ import annotations

import json
import os
import stat
from typing import Any, BinaryIO

MAX_BYTES = 1 << 20  # of a file

_LARGEST = 1 << 63


def decoded(text: str | bytes) -> Any:
    """What JSON says. Halves of signs, as paths with odd bytes leave them, become ?, integers beyond 64 bits floats.
    ValueError if it is none, or nested too deeply."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    try:
        told = json.loads(text, parse_int=_integer)
        if "\\ud" in text.lower():
            told = json.loads(json.dumps(told, ensure_ascii=False).encode("utf-8", "replace"))
        return told
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def opened(path: str) -> BinaryIO:
    """A plain file of at most MAX_BYTES, to be read; OSError for anything else. A pipe is not waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
        file.close()
        raise OSError(f"{path} is no plain file of at most {MAX_BYTES} bytes")
    return file


def read(path: str) -> dict[str, Any] | None:
    """The object in a file; None if there is none that can be read."""
    try:
        with opened(path) as file:
            told = decoded(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _integer(digits: str) -> int | float:
    number = int(digits) if len(digits) < 20 else _LARGEST
    return number if -_LARGEST <= number < _LARGEST else float(digits)
