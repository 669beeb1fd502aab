"""`launched`: runs a worker script under `hora run` and returns the result that one of its ranks wrote.

The command is `hora run … WORKER RESULT ARGUMENTS…`: the first argument of the worker is the path of a file into which
one rank writes JSON. The run directory is removed afterwards.
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

LineFilter = Callable[[str], bool]


def launched(
    worker: Sequence[str],
    *arguments: object,
    size: int,
    strategy: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    on_line: LineFilter = lambda line: False,
    limit_s: float = LIMIT_S,
) -> Any:
    """The result of `worker`, a script or ("-m", module), with `size` workers of one thread each. Blocks.

    `options` are more flags of `hora run`. `on_line` gets each line of output; it returns True for lines to be left out
    of the error message. RuntimeError with the last lines if the run fails, writes no result, or takes longer than
    `limit_s`. An exception, as KeyboardInterrupt, ends the run.
    """
    with tempfile.TemporaryDirectory(prefix="hora-run-", ignore_cleanup_errors=True) as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "hora.cli.main", "run", "-n", str(size), "--strategy", strategy, *options]
        command += ["--run-dir", f"{folder}/run", *worker, str(path), *map(str, arguments)]
        lines: list[str] = []
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
            timer = threading.Timer(limit_s, _end, (launcher,))
            timer.start()
            begin = time.monotonic()
            try:
                lines += (line for line in launcher.stdout if not on_line(line))
                launcher.wait()
            except BaseException:
                _end(launcher)
                raise
            finally:
                timer.cancel()
            overdue = time.monotonic() - begin >= limit_s
        tail = "".join(f"  {line}" for line in lines[-TAIL_LINES:]).rstrip()
        if launcher.returncode:
            why = f"ended with exit code {launcher.returncode}" if not overdue else f"was ended after {limit_s:g} s"
            raise RuntimeError(f"{strategy} with {size} {why}:\n{tail}")
        if not path.exists():
            raise RuntimeError(f"{strategy} with {size} ended well, but wrote no result:\n{tail}")
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
    """It ends its ranks, which takes a moment; if it does not, its reaper does."""
    launcher.terminate()
    try:
        launcher.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that processes started inside are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit(number: int, _: object) -> None:
        raise SystemExit(exit_codes.TERMINATED)

    before = {number: signal.signal(number, exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
