"""One torch thread per rank, as in a real run; `ranks` can be imported by every test."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

import tiers
from hora.launch.forkserver.client import shared
from launching import LEAVE_S, Launcher, command_of, environment

torch.set_num_threads(1)
# Processes that tests start inherit ignored signals: SIGINT where the suite runs in the background, SIGHUP under nohup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # still ignored here; a handler, unlike SIG_IGN, is not inherited
for name in [name for name in os.environ if name.startswith(("HORA_", "OMPI_COMM_", "SLURM_", "TORCHELASTIC_"))]:
    del os.environ[name]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.assign(items)


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


@pytest.fixture(scope="session")
def forkserver() -> Iterator[str]:
    """One process that has imported torch, of which the ranks of all launches are forked."""
    with shared(environment() | {"OMP_NUM_THREADS": "1"}) as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORA_FORKSERVER", path)  # also of launches without the fixture `launcher`
        yield path


@pytest.fixture
def launcher(tmp_path: pathlib.Path, forkserver: str) -> Iterator[Launcher]:
    """The real `hora`; a test after which anything of it is left fails."""
    launcher = Launcher(tmp_path, forkserver)
    shared_before = {name for name in os.listdir("/dev/shm") if "hora" in name}
    yield launcher
    alive = {pid: command_of(pid) for pid in launcher.wait_until_nobody(LEAVE_S)}
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not alive, "processes of the run were left"
    assert {name for name in os.listdir("/dev/shm") if "hora" in name} <= shared_before
    left = [name for name in os.listdir(launcher.tmp) if not name.startswith("torchinductor")]  # torch's own
    shutil.rmtree(launcher.tmp, ignore_errors=True)
    assert left == []
    assert list(launcher.state.rglob("control")) == []


@pytest.fixture(autouse=True)
def _trainings_end() -> Iterator[None]:
    yield
    used = sys.modules.get("trainings")
    if used is not None:
        used.close_all()
