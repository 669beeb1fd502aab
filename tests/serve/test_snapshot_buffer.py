"""Snapshot buffers: a read is whole, whatever the writer does, and exactly what was written, whatever its strides."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hammer import entries, tensors

from hora.errors import Mismatch
from hora.serve.snapshot_buffer import ParameterVersion, SnapshotBuffer

HAMMER = Path(__file__).parent / "hammer.py"


def hammer(snapshot: SnapshotBuffer, *arguments: object) -> subprocess.Popen[bytes]:
    descriptor = snapshot.descriptor
    return subprocess.Popen([sys.executable, HAMMER, str(descriptor), *map(str, arguments)], pass_fds=(descriptor,))


def read_one(snapshot: SnapshotBuffer, at_least: int) -> ParameterVersion:
    """One reading of that step or later, every element of which must be of its step."""
    parameters, buffers = tensors()
    deadline = time.monotonic() + 50
    while True:
        version = snapshot.read(parameters, buffers)
        if version is not None:
            for tensor in (*parameters, *buffers.values()):
                assert bool((tensor == version.step).all()), f"torn: {version}"
            assert (version.round, version.local_step) == divmod(version.step, 10)
            if version.step >= at_least:
                return version
        assert time.monotonic() < deadline
        time.sleep(0)


@pytest.mark.full
def test_a_reader_never_sees_half_of_what_a_hammering_writer_publishes() -> None:
    snapshot = SnapshotBuffer.create(*tensors(), entries())
    writer = hammer(snapshot)
    try:
        steps = [read_one(snapshot, 1).step]
        deadline = time.monotonic() + 40
        while len(steps) < 3000 or (len(set(steps)) <= 100 and time.monotonic() < deadline):
            steps.append(read_one(snapshot, 0).step)
    finally:
        writer.kill()
        writer.wait()
    assert steps == sorted(steps) and len(set(steps)) > 100


@pytest.mark.cases(1)
@pytest.mark.parametrize("fatal", [1, 2, 7])
def test_a_writer_that_dies_half_way_leaves_the_step_before(fatal: int) -> None:
    snapshot = SnapshotBuffer.create(*tensors(), entries())
    assert hammer(snapshot, fatal).wait(50) != 0
    if fatal == 1:
        assert snapshot.newest() is None
    else:
        assert read_one(snapshot, 0).step == fatal - 1
    parameters, buffers = tensors()
    for tensor in (*parameters, *buffers.values()):
        tensor.fill_(50)
    snapshot.publish(parameters, buffers, ParameterVersion(50, round=5, local_step=0))
    assert read_one(snapshot, 50).step == 50, "one who comes after it goes on"


def test_what_is_read_is_what_was_written_for_every_type_and_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(4, 3, 5, 6, generator=generator)
    parameters = [
        image,
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2),
        torch.randn(20, 20, generator=generator)[::2, 1::3],  # with gaps
        image[0].to(torch.bfloat16),
        image[1].to(torch.float16),
        image[2].to(torch.float64),
        torch.randn(3, dtype=torch.complex64, generator=generator),
        torch.empty(0, 7),
        torch.tensor(3.5),
    ]
    buffers = {
        "mask": torch.tensor([True, False, True]),
        "turned": torch.arange(6).view(2, 3).t(),
        "count": torch.tensor(7),
        "empty": torch.empty(0),
        "infinite": torch.tensor([float("-inf"), 1.0]),
    }
    shown = SnapshotBuffer.create(parameters, buffers, entries())
    shown.publish(parameters, buffers, ParameterVersion(4))
    reader = SnapshotBuffer.open(os.dup(shown.descriptor), parameters, buffers, entries())
    assert shown.opened
    into = [torch.empty_like(parameter) for parameter in parameters]
    rest = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
    assert reader.read(into, rest) == ParameterVersion(4)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(into, parameters, strict=True))
    assert all(torch.equal(rest[name], buffer) for name, buffer in buffers.items())


def test_another_model_is_named_by_its_first_difference() -> None:
    parameters, buffers = tensors()
    mine = [["w", [2, 3], "float32", [3, 1], "trained"], ["b", [2], "float32", [1], "trained"]]
    theirs = [mine[0], ["b", [3], "float32", [1], "trained"], ["c", [1], "float32", [1], "trained"]]
    shown = SnapshotBuffer.create(parameters, buffers, theirs)
    with pytest.raises(Mismatch, match=r"the predictor has b \[2\] float32 where the workers have b \[3\] float32"):
        SnapshotBuffer.open(os.dup(shown.descriptor), parameters, buffers, mine)
    with pytest.raises(Mismatch, match=r"has nothing .* where the workers have c \[1\]"):
        SnapshotBuffer.open(os.dup(shown.descriptor), parameters, buffers, theirs[:2])


def test_a_buffer_of_another_shape_is_refused_and_the_newest_stays() -> None:
    parameters, buffers = tensors()
    snapshot = SnapshotBuffer.create(parameters, buffers, entries())
    snapshot.publish(parameters, buffers, ParameterVersion(0, round=0, local_step=0))
    with pytest.raises(ValueError, match="buffer mean has changed its shape"):
        snapshot.publish(parameters, {**buffers, "mean": torch.zeros(78)}, ParameterVersion(1))
    assert read_one(snapshot, 0).step == 0


def test_a_note_is_left_once() -> None:
    snapshot = SnapshotBuffer.create(*tensors(), entries())
    assert snapshot.signature == b""
    snapshot.set_signature(b"x" * 100_000)
    assert snapshot.signature == b"", "too long"
    snapshot.set_signature(b"first")
    snapshot.set_signature(b"second")
    assert snapshot.signature == b"first"
