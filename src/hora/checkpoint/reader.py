"""Reader: finds the newest valid checkpoint, and returns only bytes that match its manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
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
    list_checkpoints,
    step_of,
)  # fmt: skip
from .tensor_file import parse

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not block
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A valid checkpoint. Its tensors stay on disk, and are compared with the manifest again when they are read."""

    path: Path
    step: int
    record: dict[str, Any] = dataclasses.field(repr=False)
    files: Mapping[str, ManifestEntry] = dataclasses.field(repr=False)

    def names(self) -> list[str]:
        """The stems that `read` and `tensors` take, sorted."""
        return sorted(name.removesuffix(TENSORS) for name in self.files if name.endswith(TENSORS))

    def read(self, stem: str) -> bytes:
        """The bytes of one safetensors file; HoraError if they no longer match the manifest."""
        if stem not in self.names():
            raise ValueError(f"{self.path} has no {stem!r}, only {', '.join(self.names()) or 'its record'}")
        name = stem + TENSORS
        try:
            with _open_directory(self.path) as directory:
                return _read(directory, name, self.files[name])
        except Damaged as damage:
            raise HoraError(f"{self.path} is damaged: {damage}") from None

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of one file by name, on the CPU, without shared memory."""
        return parse(self.read(stem), f"{self.path}: {stem}{TENSORS}")


def newest(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest valid checkpoint in `directory`, with every size and hash compared. None if there is no checkpoint.

    Damaged checkpoints are logged and skipped; HoraError if all are damaged. Opens nothing outside of the directory.
    Blocks while it reads one checkpoint, or more if some are damaged.
    """
    directory = Path(directory)
    try:
        found = list_checkpoints(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HoraError(f"checkpoints in {directory} cannot be read: {error.strerror}") from error
    damages: list[str] = []
    for number, (step, path) in enumerate(found, start=1):
        try:
            return verify(path, step)
        except Damaged as damage:
            damages.append(f"{path.name} is damaged: {damage}")
            if number < len(found):
                log.warning("%s; trying %s", damages[-1], found[number][1].name)
    if damages:
        raise HoraError(f"no checkpoint in {directory} is valid: {'; '.join(damages)}")
    return None


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at `path`, or else the newest one in that directory. HoraError if there is no valid one."""
    path = Path(path)
    step = step_of(path.name)
    if step is not None and (path / MANIFEST).exists():
        try:
            return verify(path, step)
        except Damaged as damage:
            raise HoraError(f"{path} is damaged: {damage}") from None
    found = newest(path)
    if found is None:
        raise HoraError(f"there is no checkpoint in {path}")
    return found


def verify(path: Path, step: int) -> Checkpoint:
    """Read the whole checkpoint at `path` and compare it with its manifest. Raises Damaged."""
    with _open_directory(path) as directory:
        with _open_file(directory, MANIFEST, limit_bytes=MANIFEST_LIMIT_BYTES) as file:
            manifest = Manifest.parse(file.read(MANIFEST_LIMIT_BYTES))
        if manifest.step != step:
            raise Damaged(f"{MANIFEST} is of step {manifest.step}")
        record = _parse_record(_read(directory, STATE, manifest.files[STATE], STATE_LIMIT_BYTES))
        for name, entry in manifest.files.items():
            if name == STATE:
                continue
            digest = hashlib.sha256()
            with _open_file(directory, name, entry) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            _check_hash(name, digest.hexdigest(), entry)
    return Checkpoint(path=path, step=step, record=record, files=manifest.files)


def is_valid(path: Path, step: int) -> bool:
    with contextlib.suppress(Damaged):
        verify(path, step)
        return True
    return False


def _parse_record(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{STATE} is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise Damaged(f"{STATE} is not an object")
    return record


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(constant)


@contextlib.contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    """A descriptor under which the files are opened. Damaged for a symbolic link."""
    try:
        directory = os.open(path, _DIRECTORY_FLAGS)
    except OSError as error:
        raise Damaged(f"it cannot be opened as a directory ({error.strerror})") from None
    try:
        yield directory
    finally:
        os.close(directory)


@contextlib.contextmanager
def _open_file(
    directory: int, name: str, entry: ManifestEntry | None = None, limit_bytes: int | None = None
) -> Iterator[BinaryIO]:
    """Damaged for links, pipes, another size than the entry's, a size above the limit, and errors while reading."""
    try:
        with os.fdopen(os.open(name, _FILE_FLAGS, dir_fd=directory), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{name} is not a file")
            if limit_bytes is not None and status.st_size > limit_bytes:
                raise Damaged(f"{name} has {status.st_size} bytes; the limit is {limit_bytes}")
            if entry is not None and status.st_size != entry.num_bytes:
                raise Damaged(f"{name} has {status.st_size} bytes instead of {entry.num_bytes}")
            yield file
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise Damaged(f"{name} {what}") from None


def _read(directory: int, name: str, entry: ManifestEntry, limit_bytes: int | None = None) -> bytes:
    with _open_file(directory, name, entry, limit_bytes) as file:
        data = file.read(entry.num_bytes)
    _check_hash(name, hashlib.sha256(data).hexdigest(), entry)
    return data


def _check_hash(name: str, sha256: str, entry: ManifestEntry) -> None:
    if sha256 != entry.sha256:
        raise Damaged(f"{name} does not match its hash")
