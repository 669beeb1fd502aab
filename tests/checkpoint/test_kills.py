"""A writer that fails or dies at any point: the newest valid checkpoint is the old or the new one, and it loads."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hora.checkpoint import newest, save
from hora.errors import HoraError

VERBS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for a SIGKILL: from here on nothing more is done on disk."""


class Hook:
    """Calls `strike` instead of every call from the `at`-th on (or only instead of that one) among VERBS."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, strike: Callable[[], Any], once: bool = False) -> None:
        self.num_calls = 0
        for verb in VERBS:
            patch.setattr(os, verb, self._hooked(getattr(os, verb), at, strike, once))

    def _hooked(self, real: Callable[..., Any], at: int, strike: Callable[[], Any], once: bool) -> Callable[..., Any]:
        def hooked(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == at or (self.num_calls > at and not once):
                strike()
            return real(*args, **kwargs)

        return hooked


def put(directory: pathlib.Path, step: int, value: float) -> None:
    save(directory, step, {"model": {"w": torch.full((8,), value)}, "rng": {"r": torch.ones(3)}}, {"value": value})


def value_in(directory: pathlib.Path) -> float:
    """What the newest valid checkpoint holds, in its record and in its tensors alike."""
    found = newest(directory)
    assert found is not None
    value = found.record["value"]
    assert torch.equal(found.tensors("model")["w"], torch.full((8,), value))
    return float(value)


# Before: what is on disk, as (step, value). Then (step, value) is saved. Each case passes through other write points.
CASES = {
    "a new step, pruning": ([(1, 1.0), (2, 2.0)], (3, 3.0)),
    "the same step again, alone": ([(5, 2.0)], (5, 3.0)),
    "the same step again, with an older": ([(4, 1.0), (5, 2.0)], (5, 3.0)),
}


def num_points(directory: pathlib.Path, word: str, monkeypatch: pytest.MonkeyPatch) -> int:
    before, after = CASES[word]
    for each in before:
        put(directory, *each)
    with monkeypatch.context() as patch:
        hook = Hook(patch, at=1 << 30, strike=lambda: None)
        put(directory, *after)
    assert value_in(directory) == after[1]
    return hook.num_calls


@pytest.mark.parametrize("word", CASES)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new(
    word: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = CASES[word]
    seen = []

    def strike() -> None:
        raise Killed

    total = num_points(tmp_path / "whole", word, monkeypatch)
    for k in range(1, total + 1):
        directory = tmp_path / str(k)
        for each in before:
            put(directory, *each)
        with monkeypatch.context() as patch:
            Hook(patch, at=k, strike=strike)
            with pytest.raises(Killed):
                put(directory, *after)
        seen.append(value_in(directory))
        put(directory, 9, 9.0)
        put(directory, 10, 10.0)
        left = [name for name in os.listdir(directory) if not name.startswith(".")]
        assert value_in(directory) == 10.0 and sorted(left) == ["step-10", "step-9"]
    old, new = before[-1][1], after[1]
    assert seen == sorted(seen) and set(seen) == {old, new}


@pytest.mark.parametrize("word", CASES)
def test_a_single_error_at_any_point_is_told_or_harmless_and_leaves_the_old_or_the_new(
    word: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = CASES[word]

    def strike() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    total = num_points(tmp_path / "whole", word, monkeypatch)
    for k in range(1, total + 1):
        directory = tmp_path / str(k)
        for each in before:
            put(directory, *each)
        failed = False
        with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
            Hook(patch, at=k, strike=strike, once=True)
            try:
                put(directory, *after)
            except HoraError as error:
                failed = True
                assert "could not be written: Input/output error" in str(error)
        got = value_in(directory)
        assert got in (before[-1][1], after[1])
        assert failed or got == after[1]
        if failed:
            assert not [name for name in os.listdir(directory) if name.startswith(".")]


SCRIPT = """
import os, pathlib, signal, sys
import torch
from hora.checkpoint import newest, save

torch.set_num_threads(1)
root, verbs = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")

def put(directory, step, value):
    save(directory, step, {"model": {"w": torch.full((8,), value)}}, {"value": value})

def die_at(k):
    calls = 0
    def hooked(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for verb in verbs:
        setattr(os, verb, hooked(getattr(os, verb)))

for k in range(1, 1000):
    directory = root / str(k)
    put(directory, 5, 1.0)
    pid = os.fork()
    if pid == 0:
        die_at(k)
        put(directory, 5, 2.0)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        assert status == 0
        break
    found = newest(directory)
    assert found.tensors("model")["w"].tolist() == [found.record["value"]] * 8
    assert found.record["value"] in (1.0, 2.0)
    put(directory, 6, 3.0)
    assert newest(directory).record["value"] == 3.0
    left = sorted(os.listdir(directory))
    assert left in (["step-5", "step-6"], ["step-5.old", "step-6"]), left
print("killed", k - 1)
"""


@pytest.mark.full
def test_a_process_killed_by_sigkill_at_any_point_leaves_the_old_or_the_new_and_no_residue(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), ",".join([*VERBS, "close"])],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20
