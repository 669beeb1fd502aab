"""Claims launch runs: all of them are forked from one process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forks(forkserver: str) -> None:
    pass
