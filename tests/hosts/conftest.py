"""`machines(size)`: machines for one test; after it, nothing of a run may be left on any of them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .machines import SCRIPTS, Machines, obstacle

Make = Callable[..., Machines]
LEAVE_S = 20.0  # an agent that is no longer wanted may still be importing, on a busy machine


@pytest.fixture(scope="session")
def _possible() -> str:
    return obstacle()


@pytest.fixture
def machines(_possible: str, tmp_path: pathlib.Path) -> Iterator[Make]:
    """Makes machines, as `Machines` does; a test that leaves a process or a file on one of them fails."""
    if _possible:
        pytest.skip(_possible)
    made: list[Machines] = []
    with contextlib.ExitStack() as stack:

        def make(size: int = 2, **options: Any) -> Machines:
            made.append(stack.enter_context(Machines(tmp_path, size, **options)))
            return made[-1]

        yield make
        for those in made:
            assert not those.wait_until_nobody(limit_s=LEAVE_S), "processes of the run were left"
            assert not those.residue(), "files of the run were left"
            assert not list(those.state.rglob("control"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process on one machine makes of training.py."""
    folder = tmp_path_factory.mktemp("alone")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, SCRIPTS / "training.py", "--out", folder], env=env, check=True, timeout=60)
    (result,) = endings(folder)
    return result


def endings(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What the workers of training.py wrote, in order of rank."""
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda told: told["rank"])
