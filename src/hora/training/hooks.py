"""Hook: a hook on a user's module that copies and pickles of the module do not carry along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def idle(*_: Any) -> None:
    """What a hook is in a copy of its module."""


class Hook:
    """Calls `work`, except where torch.compile traces. Copied or pickled with its module it turns into `idle`."""

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._work(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle, ()


def _idle() -> Callable[..., None]:
    return idle
