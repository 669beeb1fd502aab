"""How a process of the run ends: the exception hook that reports failures, and exit functions that leave the run."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ..errors import HoraError, PeerLost
from ..runs.exit_codes import SCRIPT_FAILED, SECONDARY_FAILURE

if TYPE_CHECKING:
    from .job import Job

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def install(job: Job) -> None:
    if job.launcher != "alone":
        _report_exceptions(job)
    elif job.role == "predictor":
        atexit.register(_check_prepared, job)  # runs after `_close`
    atexit.register(_close, job)


def _close(job: Job) -> None:
    try:
        job.close()
    except HoraError as problem:
        _fail(f"hora.errors.HoraError: {problem}")


def _check_prepared(job: Job) -> None:
    """A script of `hora serve` that ended without `prepare` has failed."""
    if job.pid == os.getpid() and not job._prepared and getattr(sys, "last_value", None) is None:
        _fail("hora serve: the script ended before job.prepare(model, optimizer): nothing was served")


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    _flush()
    os._exit(SCRIPT_FAILED)  # an exit function has no other way to choose the code


def _report_exceptions(job: Job) -> None:
    """An exception that ends the script is announced to the other ranks; one that follows from another rank's end is
    printed as one line."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != job.pid or threading.current_thread() is not threading.main_thread():
            previous(kind, error, trace)
            return
        error = job._world.peer_lost_by(error) or error
        if isinstance(error, PeerLost):  # the rank that was lost is the cause, even if it left without an error
            job._failed = True
            if error.secondary:
                print(f"stopped: {error}", file=sys.stderr, flush=True)
            else:
                _print_user_frames(error, trace)
            exit_process(SECONDARY_FAILURE)
        if issubclass(kind, KeyboardInterrupt):
            with contextlib.suppress(Exception):
                job.training.go_on()
        else:
            job.fail(f"{kind.__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}".rstrip(": "))
        if isinstance(error, HoraError) or (isinstance(error, ValueError) and _is_ours(trace)):
            _print_user_frames(error, trace)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether it was raised inside of Hora."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


def _print_user_frames(error: Exception, trace: TracebackType | None) -> None:
    """Prints the traceback without the frames inside of Hora."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    print("".join([*lines, *traceback.format_exception_only(error)]), end="", file=sys.stderr, flush=True)


def exit_process(code: int, run_exit_functions: Callable[[], None] = atexit._run_exitfuncs) -> NoReturn:
    """Ends the process with this code, after its exit functions: an exception hook has no other way to choose it."""
    with contextlib.suppress(BaseException):
        run_exit_functions()
    _flush()
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
