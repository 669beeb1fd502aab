"""save: what is written comes back bit for bit, enough of it is kept, and a refusal leaves everything as it was."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors
import torch

from hora.checkpoint import newest, save
from hora.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from hora.errors import HoraError

SHAPES = [(), (0,), (1,), (3, 0, 2), (5, 3), (2, 3, 4, 5)]


def names(directory: pathlib.Path) -> list[str]:
    return sorted(os.listdir(directory))


def put(directory: pathlib.Path, step: int, value: float | None = None, keep: int = 2) -> pathlib.Path:
    weight = torch.full((4,), float(step) if value is None else value)
    return save(directory, step, {"model": {"w": weight}}, {"step": step, "value": value}, keep=keep)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def back(directory: pathlib.Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save(directory, 0, {"model": tensors}, {})
    found = newest(directory)
    assert found is not None
    return found.tensors("model")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    made = {str(shape): torch.randint(0, 100, shape, generator=generator).to(dtype) for shape in SHAPES}
    got = back(tmp_path, made)
    assert got.keys() == made.keys()
    for name, tensor in made.items():
        assert (got[name].dtype, got[name].shape) == (dtype, tensor.shape)
        assert torch.equal(bits(got[name]), bits(tensor))


def test_tensors_that_share_memory_or_lie_scattered_come_back_each_on_its_own(tmp_path: pathlib.Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    made = {
        "a": base,
        "tied": base,
        "transposed": base.t(),
        "column": base[:, 1],
        "expanded": base[0, :1].expand(5),
        "negative": torch.complex(base, base).conj().imag,
        "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(base[1]),
        "name with 'quotes', ünïcode and a / b": base[2:, ::2],
    }
    got = back(tmp_path, made)
    assert all(torch.equal(got[name], tensor) for name, tensor in made.items())
    got["a"].zero_()
    assert torch.equal(got["tied"], base)


def test_tensors_larger_than_a_piece_come_back(tmp_path: pathlib.Path) -> None:
    made = {"odd": torch.arange(PIECE_BYTES // 4 + 3, dtype=torch.float32), "byte": torch.ones(3, dtype=torch.uint8)}
    got = back(tmp_path, made)
    assert all(torch.equal(got[name], tensor) for name, tensor in made.items())


def test_the_files_are_plain_safetensors_and_json_named_by_a_manifest(tmp_path: pathlib.Path) -> None:
    record = {"epoch": 3, "words": ["é", None, 0.1]}
    path = save(tmp_path / "new" / "dir", 7, {"model": {"w": torch.ones(2)}, "rng": {}}, record)
    assert path == tmp_path / "new" / "dir" / "step-7"
    assert names(path) == ["manifest.json", "model.safetensors", "rng.safetensors", "state.json"]
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.ones(2))
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 7)
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {
        name: (path / name).stat().st_size for name in names(path) if name != "manifest.json"
    }
    found = newest(path.parent)
    assert found is not None
    assert (found.path, found.step, found.record, found.names()) == (path, 7, record, ["model", "rng"])


def test_the_newest_are_kept_and_older_ones_go(tmp_path: pathlib.Path) -> None:
    for step in (1, 2, 9, 10, 11):
        put(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-10", "step-11", "step-9"]
    put(tmp_path, 12)
    assert names(tmp_path) == ["step-11", "step-12"]


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: pathlib.Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step, keep=3)
    (tmp_path / "step-3" / "model.safetensors").write_bytes(b"")
    put(tmp_path, 4)
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    put(tmp_path, 5)
    assert names(tmp_path) == ["step-4", "step-5"]


def test_going_back_to_an_older_step_never_prunes_what_was_just_written(tmp_path: pathlib.Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step, keep=3)
    put(tmp_path, 15)
    assert names(tmp_path) == ["step-10", "step-15", "step-20", "step-30"]


def test_a_second_save_at_the_same_step_replaces_the_first(tmp_path: pathlib.Path) -> None:
    put(tmp_path, 5, 1.0)
    put(tmp_path, 5, 2.0)
    found = newest(tmp_path)
    assert found is not None and found.record["value"] == 2.0
    assert names(tmp_path) == ["step-5"]


def test_a_save_replaces_a_damaged_one_of_its_step_whatever_it_is(tmp_path: pathlib.Path) -> None:
    (tmp_path / "step-1").write_text("a file")
    (tmp_path / "step-2").symlink_to(tmp_path)
    put(tmp_path, 3)
    (tmp_path / "step-3" / "manifest.json").unlink()
    for step in (1, 2, 3):
        put(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: pathlib.Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()

    def leave(pid: int, age_s: float) -> str:
        path = tmp_path / f".step-3.{pid}.{pid + age_s:016.0f}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
        stamp = path.stat().st_mtime - age_s
        os.utime(path, (stamp, stamp))
        return path.name

    leave(child.pid, 0)
    leave(os.getppid(), 7200)
    leave(os.getpid(), 7200)
    living = [leave(os.getppid(), 60), leave(os.getpid(), 60)]
    (tmp_path / ".step-notes").mkdir()
    put(tmp_path, 4)
    assert names(tmp_path) == sorted([*living, ".step-notes", "step-4"])


def test_keep_below_two_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="keep=1: at least 2"):
        put(tmp_path, 1, keep=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_name_and_count(
    dtype: torch.dtype, bad: float, tmp_path: pathlib.Path
) -> None:
    put(tmp_path, 1)
    values = torch.ones(4, 5)
    values[1, 1:3] = bad
    tensors = {"model": {"ok": torch.ones(2)}, "optimizer": {"state[0].exp_avg": values.to(dtype)}}
    with pytest.raises(
        HoraError, match=r"2 of 20 values of 'state\[0\].exp_avg' in optimizer.safetensors are not finite"
    ):
        save(tmp_path, 2, tensors, {})
    assert names(tmp_path) == ["step-1"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensors", "record", "words"),
    [
        ({"../x": {}}, {}, "'../x' is not a valid file name"),
        ({".hidden": {}}, {}, "'.hidden' is not a valid file name"),
        ({"a\n": {}}, {}, "is not a valid file name"),
        ({"m": {"w": torch.ones(2, dtype=torch.complex128)}}, {}, "'w' in m.safetensors has dtype torch.complex128"),
        ({"m": {"w": torch.eye(2).to_sparse()}}, {}, "'w' in m.safetensors has layout torch.sparse_coo"),
        ({"m": {"w": torch.ones(2, device="meta")}}, {}, "'w' in m.safetensors is on the meta device"),
        ({"m": {"w": 3}}, {}, "'w' in m.safetensors has type int, expected a tensor"),
        ({"m": {"__metadata__": torch.ones(2)}}, {}, "the tensor name '__metadata__' is reserved"),
        ({"m": {"\ud800": torch.ones(2)}}, {}, "surrogates not allowed"),
        ({}, {"a": {1, 2}}, "record must be JSON data"),
        ({}, {"a": math.nan}, "record must be JSON data"),
        ({}, {"a": "x" * (65 << 20)}, "the limit is"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_cannot_be_read_back_is_refused_before_anything_is_written(
    tensors: Any, record: Any, words: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError) as raised:
        save(tmp_path, 1, tensors, record)
    assert words in str(raised.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_no_name_can_carry_is_refused(step: int, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="step="):
        put(tmp_path, step)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_place_of_the_directory_is_one_sentence(below: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HoraError, match=r"checkpoint .*step-1 could not be written: Not a directory; older"):
        put(tmp_path / "file" / below, 1)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("verb", ["write", "fsync", "mkdir", "rename"])
def test_an_error_of_the_disk_is_one_sentence_and_leaves_nothing_behind(
    code: int, verb: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, verb, refuse)
        with pytest.raises(HoraError, match=f"{tmp_path}/step-2 could not be written: {os.strerror(code)}; older"):
            put(tmp_path, 2)
    assert names(tmp_path) == ["step-1"]
    put(tmp_path, 2)
    found = newest(tmp_path)
    assert found is not None and found.step == 2


def test_a_directory_that_cannot_be_synced_by_its_nature_is_no_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def only_files(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    monkeypatch.setattr(os, "fsync", only_files)
    put(tmp_path, 1)
    assert newest(tmp_path) is not None


def test_writes_that_take_only_a_part_are_continued(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 3)]))
    put(tmp_path, 1)
    monkeypatch.undo()
    found = newest(tmp_path)
    assert found is not None and torch.equal(found.tensors("model")["w"], torch.ones(4))


def test_what_cannot_be_pruned_costs_a_warning_only(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if str(source).endswith("step-1"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with caplog.at_level(logging.WARNING):
        put(tmp_path, 3)
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/step-3 is written, but older checkpoints could not be removed: [Errno 13] Permission denied"
    ]


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mount is not allowed here; the same is tested with errors made up")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_keeps_the_old_checkpoint_and_frees_what_it_took(small_disk: pathlib.Path) -> None:
    put(small_disk, 1)
    free = os.statvfs(small_disk).f_bfree
    with pytest.raises(HoraError, match="step-2 could not be written: No space left on device"):
        save(small_disk, 2, {"model": {"w": torch.ones(1 << 20)}}, {})
    assert names(small_disk) == ["step-1"] and os.statvfs(small_disk).f_bfree == free
    found = newest(small_disk)
    assert found is not None and found.step == 1
