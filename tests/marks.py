"""Marks: tests that not every run of the suite pays for."""

from __future__ import annotations

import os

import pytest

large = pytest.mark.skipif(
    os.environ.get("TEST_HOSTS") != "all", reason="takes minutes; TEST_HOSTS=all runs every test on several machines"
)
