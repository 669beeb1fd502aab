"""One torch thread per rank, as in a real run; `ranks` can be imported by every test."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
torch.set_num_threads(1)
for name in [name for name in os.environ if name.startswith(("HORA_", "OMPI_COMM_", "SLURM_", "TORCHELASTIC_"))]:
    del os.environ[name]

TRANSPORTS = ("memory", "shm", "tcp", "engine")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport: a new one joins the suites by a word in TRANSPORTS."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> object:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not {name for name in after - before if "hora" in name}


@pytest.fixture(autouse=True)
def _trainings_end() -> Iterator[None]:
    yield
    used = sys.modules.get("trainings")
    if used is not None:
        used.close_all()
