"""Tests that need a GPU. Ranks share the one that there is; where they go through NCCL each says that it is a host of
its own, which NCCL then believes: a facility of tests."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from hora.launch.forkserver.client import shared

HEAD = """
import hashlib, os, sys, torch, hora
from torch.nn import functional as F
job = hora.init({init})
os.environ["NCCL_HOSTID"] = f"test-{{job.rank}}"
device = job.device
assert device.type == "cuda" or job.role == "server"
"""

Run = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if pathlib.Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[dict[str, str]]:
    with shared(os.environ) as path:
        yield {**os.environ, "HORA_FORKSERVER": path}


@pytest.fixture
def run(tmp_path: pathlib.Path, fork_server: dict[str, str]) -> Run:
    def launch(
        script: str, strategy: str = "shared", size: int = 2, init: str = "", code: int = 0, servers: str = ""
    ) -> str:
        """The output of a script under `hora run`. It begins after HEAD."""
        path = tmp_path / "script.py"
        path.write_text(HEAD.format(init=init) + script)
        options = ["-n", str(size), "--strategy", strategy, *(["--servers", servers] if servers else [])]
        done = subprocess.run(
            [sys.executable, "-m", "hora.cli.main", "run", *options, str(path)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=fork_server,
        )
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        return output

    return launch
