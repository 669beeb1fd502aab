"""One run through the real launcher, whose workers leave a result: `hora run … -m MODULE RESULT ARGUMENTS…`.

The first argument of the worker is the path of a file, into which one of its ranks writes JSON before it ends. What
Hora keeps of the run goes into a folder that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
) -> Any:
    """The result of `worker`, a script or ("-m", module), with `size` workers; one thread each.

    `options` are more flags of `hora run`. `hear` gets each line of output; those it returns True for are not kept for
    the complaint. RuntimeError with the last lines if the run fails. An interruption ends the run before it goes on.
    """
    with tempfile.TemporaryDirectory(prefix="hora-run-", ignore_cleanup_errors=True) as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", "hora.launch.cli", "run", "-n", str(size), "--strategy", strategy, *options]
        command += ["--run-dir", f"{folder}/run", *worker, str(path), *map(str, arguments)]
        said: list[str] = []
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        ) as launcher:
            assert launcher.stdout is not None
            try:
                said += (line for line in launcher.stdout if not hear(line))
            except BaseException:  # interrupted: the launcher ends its ranks, which takes it a moment
                launcher.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(LEAVE_S)
                raise
        if launcher.returncode:
            tail = "".join(f"  {line}" for line in said[-TAIL_LINES:]).rstrip()
            raise RuntimeError(f"{strategy} with {size} ended with exit code {launcher.returncode}:\n{tail}")
        return json.loads(path.read_text())
