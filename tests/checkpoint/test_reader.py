"""newest: damage of any kind is found, named and passed over, and nothing outside of the directory is opened."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hora.checkpoint import newest, save
from hora.checkpoint.manifest import MANIFEST_LIMIT_BYTES, STATE_LIMIT_BYTES
from hora.errors import HoraError

Damage = Callable[[pathlib.Path], Any]


@pytest.fixture
def two(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with step-100 and step-120, and a secret beside it."""
    (tmp_path / "secret").write_text("{}")
    for step in (100, 120):
        save(tmp_path / "runs", step, {"model": {"w": torch.full((64,), float(step))}}, {"step": step})
    return tmp_path / "runs"


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def vouch(path: pathlib.Path, name: str, data: bytes) -> None:
    """Writes a file and puts its true size and hash into the manifest, as an attacker would."""
    (path / name).write_bytes(data)
    edit(path, lambda manifest: manifest["files"].update({name: facts_of(data)}))


def facts_of(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def edit(path: pathlib.Path, change: Callable[[Any], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def replace_by_link(path: pathlib.Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def replace_by_pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def link_the_folder(path: pathlib.Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def name_outside(name: str) -> Damage:
    return lambda path: edit(path, lambda manifest: manifest["files"].update({name: facts_of(b"{}")}))


def grow(path: pathlib.Path, num_bytes: int) -> None:
    with open(path, "ab") as file:
        file.truncate(num_bytes)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "flipped": (lambda p: flip(p / "model.safetensors"), "model.safetensors does not match its hash"),
    "truncated": (lambda p: os.truncate(p / "model.safetensors", 50), "model.safetensors has 50 bytes instead of"),
    "appended": (lambda p: grow(p / "model.safetensors", 5000), "model.safetensors has 5000 bytes instead of"),
    "missing": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "record flipped": (lambda p: flip(p / "state.json"), "state.json does not match its hash"),
    "record missing": (lambda p: (p / "state.json").unlink(), "state.json is missing"),
    "record no json": (lambda p: vouch(p, "state.json", b"{"), "state.json is not JSON"),
    "record nan": (lambda p: vouch(p, "state.json", b'{"a": NaN}'), "state.json is not JSON"),
    "record deep": (lambda p: vouch(p, "state.json", b"[" * 1000000), "state.json is not JSON"),
    "record digits": (lambda p: vouch(p, "state.json", b'{"a": ' + b"1" * 10000 + b"}"), "state.json is not JSON"),
    "record bytes": (lambda p: vouch(p, "state.json", b"\xff\xfe\xff"), "state.json is not JSON"),
    "record list": (lambda p: vouch(p, "state.json", b"[]"), "state.json is not an object"),
    "record huge": (
        lambda p: (
            grow(p / "state.json", STATE_LIMIT_BYTES + 1),
            edit(p, lambda m: m["files"]["state.json"].update(bytes=STATE_LIMIT_BYTES + 1)),
        ),
        f"state.json has {STATE_LIMIT_BYTES + 1} bytes; the limit is",
    ),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), "manifest.json is not a manifest"),
    "manifest deep": (lambda p: (p / "manifest.json").write_text('{"a":' * 100000), "manifest.json is not a manifest"),
    "manifest bytes": (lambda p: (p / "manifest.json").write_bytes(b'{"\xff": 1}'), "manifest.json is not a manifest"),
    "manifest huge": (lambda p: grow(p / "manifest.json", 1 << 40), f"the limit is {MANIFEST_LIMIT_BYTES}"),
    "manifest of another step": (lambda p: edit(p, lambda m: m.update(step=90)), "manifest.json is of step 90"),
    "manifest of another format": (lambda p: edit(p, lambda m: m.update(format=2)), "manifest.json is not a manifest"),
    "manifest without format": (lambda p: edit(p, lambda m: m.pop("format")), "manifest.json is not a manifest"),
    "manifest without record": (
        lambda p: edit(p, lambda m: m["files"].pop("state.json")),
        "manifest.json does not list state.json",
    ),
    "size of text": (
        lambda p: edit(p, lambda m: m["files"]["state.json"].update(bytes="9")),
        "manifest.json is not a manifest",
    ),
    "size below zero": (
        lambda p: edit(p, lambda m: m["files"]["state.json"].update(bytes=-1)),
        "manifest.json is not a manifest",
    ),
    "hash of another kind": (
        lambda p: edit(p, lambda m: m["files"]["state.json"].update(sha256="00")),
        "manifest.json is not a manifest",
    ),
    "name above": (name_outside("../../secret"), "manifest.json is not a manifest"),
    "name above, with ending": (name_outside("../x.safetensors"), "manifest.json is not a manifest"),
    "name absolute": (name_outside("/etc/passwd"), "manifest.json is not a manifest"),
    "name with newline": (name_outside("x.safetensors\n"), "manifest.json is not a manifest"),
    "name hidden": (name_outside(".x.safetensors"), "manifest.json is not a manifest"),
    "file is a link": (lambda p: replace_by_link(p / "model.safetensors"), "model.safetensors is a symbolic link"),
    "record is a link": (lambda p: replace_by_link(p / "state.json"), "state.json is a symbolic link"),
    "manifest is a link": (lambda p: replace_by_link(p / "manifest.json"), "manifest.json is a symbolic link"),
    "file is a pipe": (lambda p: replace_by_pipe(p / "model.safetensors"), "model.safetensors is not a file"),
    "file is a folder": (lambda p: replace_by_folder(p / "model.safetensors"), "model.safetensors"),
    "folder is a link": (link_the_folder, "it cannot be opened as a directory"),
    "folder is a file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "it cannot be opened as a directory"),
    "folder is empty": (lambda p: (shutil.rmtree(p), p.mkdir()), "manifest.json is missing"),
}


@pytest.mark.parametrize("word", DAMAGES)
def test_damage_is_named_once_and_the_next_older_is_taken(
    word: str, two: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm, reason = DAMAGES[word]
    harm(two / "step-120")
    with caplog.at_level(logging.WARNING):
        found = newest(two)
    assert found is not None and found.step == 100 and found.record == {"step": 100}
    assert torch.equal(found.tensors("model")["w"], torch.full((64,), 100.0))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("step-120 is damaged: ") and warning.endswith("; trying step-100")
    assert reason in warning


def test_all_damaged_is_an_error_that_names_each(two: pathlib.Path) -> None:
    flip(two / "step-120" / "model.safetensors")
    (two / "step-100" / "manifest.json").unlink()
    with pytest.raises(HoraError) as raised:
        newest(two)
    assert str(raised.value) == (
        f"no checkpoint in {two} is valid: step-120 is damaged: model.safetensors does not match its hash; "
        "step-100 is damaged: manifest.json is missing"
    )


def test_no_directory_or_no_checkpoint_in_it_is_none(tmp_path: pathlib.Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    for name in ("step-", "step-01", "step--1", "step-1x", ".step-5.1.0123456789abcdef", "step-1.old.old", "other"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) is None


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HoraError, match="cannot be read: Not a directory"):
        newest(tmp_path / "file")


def test_steps_are_compared_as_numbers(tmp_path: pathlib.Path) -> None:
    for step in (0, 9, 10):
        save(tmp_path, step, {}, {}, keep=3)
    found = newest(str(tmp_path))
    assert found is not None and found.step == 10 and found.names() == []


def test_one_that_was_moved_aside_counts_as_its_step(two: pathlib.Path) -> None:
    (two / "step-120").rename(two / "step-120.old")
    found = newest(two)
    assert found is not None and found.step == 120
    shutil.copytree(two / "step-120.old", two / "step-120")
    flip(two / "step-120" / "state.json")
    found = newest(two)
    assert found is not None and found.path.name == "step-120.old"


def test_a_directory_may_itself_be_reached_through_a_link(two: pathlib.Path) -> None:
    (two.parent / "link").symlink_to(two)
    found = newest(two.parent / "link")
    assert found is not None and found.step == 120


def test_what_is_damaged_after_it_was_found_is_refused_when_read(two: pathlib.Path) -> None:
    found = newest(two)
    assert found is not None
    flip(two / "step-120" / "model.safetensors")
    with pytest.raises(HoraError, match=r"step-120 is damaged: model.safetensors does not match its hash"):
        found.tensors("model")
    shutil.rmtree(two / "step-120")
    with pytest.raises(HoraError, match="step-120 is damaged: it cannot be opened as a directory"):
        found.read("model")


def test_a_stem_that_is_not_there_is_the_callers_mistake(two: pathlib.Path) -> None:
    found = newest(two)
    assert found is not None
    for stem in ("ema", "../step-100/model", "state.json"):
        with pytest.raises(ValueError, match=r"has no .*, only model"):
            found.read(stem)


HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
NOT_SAFETENSORS = {
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "empty": b"",
    "huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    "too short": len(HEADER).to_bytes(8, "little") + HEADER + b"\0" * 8,
    "unknown dtype": len(HEADER).to_bytes(8, "little") + HEADER.replace(b"F32", b"X32") + b"\0" * 16,
    "overflowing shape": (len(HEADER) + 18).to_bytes(8, "little")
    + HEADER.replace(b"[4]", b"[4611686018427387904]")
    + b"\0" * 16,
}


@pytest.mark.parametrize("word", NOT_SAFETENSORS)
def test_bytes_that_are_vouched_for_but_no_safetensors_are_refused(word: str, two: pathlib.Path) -> None:
    vouch(two / "step-120", "model.safetensors", NOT_SAFETENSORS[word])
    found = newest(two)
    assert found is not None and found.read("model") == NOT_SAFETENSORS[word]
    with pytest.raises(HoraError, match=r"model.safetensors is not a safetensors file"):
        found.tensors("model")
