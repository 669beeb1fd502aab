"""Saved: a predictor of a checkpoint, without a run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NoReturn

from hora.http.serve_config import ServeConfig

from ..launch.config import RunConfig
from ..rendezvous.environment import NAMES


def serve(serving: ServeConfig, command: tuple[str, ...], module: bool) -> NoReturn:
    """Turns this process into the script, which is captured in job.prepare; ValueError for what cannot be had.

    What a checkpoint holds is found out there, where the model is; that there is one, here."""
    config = RunConfig(command=command, module=module, serve=serving)
    if not os.path.isdir(serving.checkpoint):
        raise ValueError(f"there is no checkpoint {serving.checkpoint!r}: it is the directory that job.save wrote to")
    if not _is_one(Path(serving.checkpoint)) and not any(map(_is_one, Path(serving.checkpoint).iterdir())):
        raise ValueError(f"there is no checkpoint in {serving.checkpoint!r}: job.save would have written step-N there")
    serving.check_port()
    env = {key: value for key, value in os.environ.items() if key not in NAMES}
    argv = config.argv()
    os.execve(argv[0], argv, {**env, "HORA_SERVE": serving.to_json(), "PYTHONUNBUFFERED": "1"})


def _is_one(path: Path) -> bool:
    return re.fullmatch(r"step-\d+", path.name) is not None and (path / "manifest.json").exists()
