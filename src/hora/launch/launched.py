"""One run through the real launcher, whose workers leave a result: `hora run … -m MODULE RESULT ARGUMENTS…`.

The first argument of the worker is the path of a file, into which one of its ranks writes JSON before it ends. What
Hora keeps of the run goes into a folder that is removed afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..runs import exit_codes
from .forkserver.client import shared

LIMIT_S = 1800.0
LEAVE_S = 10.0
TAIL_LINES = 20

Hear = Callable[[str], bool]


def launched(
    worker: Sequence[str],
    *arguments: object,
    size: int,
    strategy: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    hear: Hear = lambda line: False,
    limit_s: float = LIMIT_S,
) -> Any:
    """The result of `worker`, a script or ("-m", module), with `size` workers; one thread each.

    `options` are more flags of `hora run`. `hear` gets each line of output; those it returns True for are not kept for
    the complaint. RuntimeError with the last lines if the run fails, leaves nothing, or takes longer than `limit_s`. An
    interruption ends the run before it goes on.
    """
    with tempfile.TemporaryDirectory(prefix="hora-run-", ignore_cleanup_errors=True) as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "hora.cli.main", "run", "-n", str(size), "--strategy", strategy, *options]
        command += ["--run-dir", f"{folder}/run", *worker, str(path), *map(str, arguments)]
        said: list[str] = []
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={"HORA_FORKSERVER": _forkserver(), **os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        ) as launcher:
            assert launcher.stdout is not None
            late = threading.Timer(limit_s, _end, (launcher,))
            late.start()
            begin = time.monotonic()
            try:
                said += (line for line in launcher.stdout if not hear(line))
                launcher.wait()
            except BaseException:
                _end(launcher)
                raise
            finally:
                late.cancel()
            overdue = time.monotonic() - begin >= limit_s
        tail = "".join(f"  {line}" for line in said[-TAIL_LINES:]).rstrip()
        if launcher.returncode:
            why = f"ended with exit code {launcher.returncode}" if not overdue else f"was ended after {limit_s:g} s"
            raise RuntimeError(f"{strategy} with {size} {why}:\n{tail}")
        if not path.exists():
            raise RuntimeError(f"{strategy} with {size} ended well, but left no result:\n{tail}")
        return json.loads(path.read_text())


@functools.cache
def _forkserver() -> str:
    """The socket of a fork server for all launches of this process, so that torch is imported once."""
    if "HORA_FORKSERVER" in os.environ:
        return os.environ["HORA_FORKSERVER"]
    until_exit = contextlib.ExitStack()
    atexit.register(until_exit.close)
    return until_exit.enter_context(shared({**os.environ, "OMP_NUM_THREADS": "1"}))


def _end(launcher: subprocess.Popen[str]) -> None:
    """It ends its ranks, which takes it a moment; if it does not, its guardian does."""
    launcher.terminate()
    try:
        launcher.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP, as Ctrl-C does anyway, unwind the stack, so that what was started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(exit_codes.TERMINATED)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
