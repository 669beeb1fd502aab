"""Reader: finds the newest checkpoint that is whole, and hands out only bytes that its manifest vouches for."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from torch import Tensor

from ..errors import HoraError
from .manifest import (
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    STATE_LIMIT_BYTES,
    TENSORS,
    Damaged,
    Manifest,
    ManifestEntry,
    places,
)
from .tensorfile import parse

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in a file's place must not block
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One valid checkpoint. It stays on disk: what is read later is compared with the manifest again."""

    path: Path
    step: int
    record: dict[str, Any] = dataclasses.field(repr=False)
    files: Mapping[str, ManifestEntry] = dataclasses.field(repr=False)

    def names(self) -> list[str]:
        """The stems that `read` and `tensors` take, sorted."""
        return sorted(name.removesuffix(TENSORS) for name in self.files if name.endswith(TENSORS))

    def read(self, stem: str) -> bytes:
        """The bytes of one safetensors file; HoraError if they are no longer those of the manifest."""
        if stem not in self.names():
            raise ValueError(f"{self.path} holds no {stem!r}, only {', '.join(self.names()) or 'its record'}")
        name = stem + TENSORS
        try:
            with _folder(self.path) as folder:
                return _read(folder, name, self.files[name])
        except Damaged as damage:
            raise HoraError(f"{self.path} is damaged: {damage}") from None

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of one file by name, on the CPU, each in memory of its own."""
        return parse(self.read(stem), f"{self.path}: {stem}{TENSORS}")


def newest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest valid checkpoint in `directory`: every size and hash was compared. None if there is no checkpoint.

    Damaged ones are named in a warning and passed over; HoraError if there are checkpoints and all are damaged. Opens
    nothing outside of the directory. May block as long as it takes to read one checkpoint, or more if some are damaged.
    """
    directory = Path(directory)
    try:
        found = places(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HoraError(f"checkpoints in {directory} cannot be read: {error.strerror}") from error
    damages: list[str] = []
    for number, (step, path) in enumerate(found, start=1):
        try:
            return verified(path, step)
        except Damaged as damage:
            damages.append(f"{path.name} is damaged: {damage}")
            if number < len(found):
                log.warning("%s; going back to %s", damages[-1], found[number].path.name)
    if damages:
        raise HoraError(f"no checkpoint in {directory} is valid: {'; '.join(damages)}")
    return None


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint that `path` is, or else the newest valid one in it. HoraError if there is none."""
    path = Path(path)
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match is not None and (path / MANIFEST).exists():
        try:
            return verified(path, int(match[1]))
        except Damaged as damage:
            raise HoraError(f"{path} is damaged: {damage}") from None
    found = newest(path)
    if found is None:
        raise HoraError(f"there is no checkpoint in {path}")
    return found


def verified(path: Path, step: int) -> Checkpoint:
    """The checkpoint at `path`, read as a whole and compared with its manifest; Damaged says what is wrong."""
    with _folder(path) as folder:
        manifest = Manifest.parse(_read_bounded(folder, MANIFEST, MANIFEST_LIMIT_BYTES))
        if manifest.step != step:
            raise Damaged(f"{MANIFEST} is of step {manifest.step}")
        state = manifest.files[STATE]
        if state.num_bytes > STATE_LIMIT_BYTES:
            raise Damaged(f"{STATE} has {state.num_bytes} bytes, at most {STATE_LIMIT_BYTES} are read")
        record = _parse_record(_read(folder, STATE, state))
        for name, entry in manifest.files.items():
            if name != STATE:
                _verify(folder, name, entry)
    return Checkpoint(path=path, step=step, record=record, files=manifest.files)


def _parse_record(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{STATE} is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise Damaged(f"{STATE} holds no object")
    return record


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(word)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """A descriptor of the directory, under which its files are opened; a link to one is refused."""
    try:
        folder = os.open(path, _FOLDER_FLAGS)
    except OSError as error:
        raise Damaged(f"it is no directory that can be opened ({error.strerror})") from None
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _file(folder: int, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file of the folder and its size. Damaged for links, pipes, and whatever goes wrong while it is read."""
    try:
        with os.fdopen(os.open(name, _FILE_FLAGS, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{name} is not a file")
            yield file, status.st_size
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise Damaged(f"{name} {what}") from None


def _read_bounded(folder: int, name: str, limit_bytes: int) -> bytes:
    with _file(folder, name) as (file, size):
        if size > limit_bytes:
            raise Damaged(f"{name} has {size} bytes, at most {limit_bytes} are read")
        return file.read(limit_bytes)


def _read(folder: int, name: str, entry: ManifestEntry) -> bytes:
    with _file(folder, name) as (file, size):
        _compare_size(name, size, entry)
        data = file.read(entry.num_bytes)
    _compare_hash(name, hashlib.sha256(data).hexdigest(), entry)
    return data


def _verify(folder: int, name: str, entry: ManifestEntry) -> None:
    digest = hashlib.sha256()
    with _file(folder, name) as (file, size):
        _compare_size(name, size, entry)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    _compare_hash(name, digest.hexdigest(), entry)


def _compare_size(name: str, size: int, entry: ManifestEntry) -> None:
    if size != entry.num_bytes:
        raise Damaged(f"{name} has {size} bytes instead of {entry.num_bytes}")


def _compare_hash(name: str, sha256: str, entry: ManifestEntry) -> None:
    if sha256 != entry.sha256:
        raise Damaged(f"{name} has another hash")
