"""What calls hand out besides tensors: handles of work under way, and what stands for a group one is not in."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..transport import Transfer


class CollectiveHandle:
    """A call under way on the group's thread. `wait()` returns its result or raises what went wrong."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._seen = False
        self.inference = False
        self.seconds = 0.0  # how long the work took, once it is done,
        self.ended = 0.0  # and when that was, as time.perf_counter counts
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> Any:
        self._finished.wait()
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def unseen(self) -> BaseException | None:
        """What went wrong, if nobody has waited for it."""
        return None if self._seen else self._error

    def _run(self, work: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
        self.ended = time.perf_counter()
        self.seconds = self.ended - begin
        self._finished.set()


class TransferHandle:
    """A point-to-point transfer under way; `wait()` returns the tensor."""

    def __init__(self, handle: Transfer, tensor: torch.Tensor, finish: Callable[[], None] | None) -> None:
        self._handle = handle
        self._tensor = tensor
        self._finish = finish

    @property
    def done(self) -> bool:
        return self._handle.done

    def wait(self) -> torch.Tensor:
        self._handle.wait()
        if self._finish:
            self._finish()
            self._finish = None
        return self._tensor


class NonMember:
    """What `new_group` gives a rank that it left out: false in a condition, and every call on it says why not."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank = None
        self.size = len(ranks)
        self._text = f"rank {rank} is not in this group of ranks {ranks}: make the call under `if group:`"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._text)


def received(tensor: torch.Tensor, finish: Callable[[], None] | None) -> Callable[[], None]:
    def done() -> None:
        if finish:
            finish()
        else:
            changed(tensor)

    return done


def changed(tensor: torch.Tensor) -> None:
    """Bytes that arrive go past torch, and autograd must know that values changed."""
    if not tensor.is_inference():
        increment_version(tensor)


def deliver(letters: queue.SimpleQueue[Transfer | None]) -> None:
    while (handle := letters.get()) is not None:
        with contextlib.suppress(Exception):  # whoever waits for it is told
            handle.wait()
