"""Writer: saves a checkpoint so that, if it is killed at any point, the newest valid one is the old or the new one.

1. check     everything can be written, and every value is finite
2. draft     write to a hidden directory: every file synced, the manifest last, then the directory
3. publish   rename the draft to step-N; an existing step-N is moved to step-N.old, which readers know too
4. prune     remove all but the newest valid checkpoints, and what killed writers left; a failure here is only logged

A directory is renamed to a hidden name before it is removed, so that a partial one is never taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import HoraError
from .manifest import MANIFEST, OLD, STATE, STATE_LIMIT_BYTES, STEM, TENSORS, Manifest, ManifestEntry, list_checkpoints
from .reader import is_valid
from .tensor_file import TensorFile

log = logging.getLogger(__name__)

LEFTOVER_AGE_S = 3600.0

_HIDDEN = re.compile(r"\.step-[0-9]{1,18}\.([1-9][0-9]{0,6})\.[0-9a-f]{16}")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_Content = Iterable[bytes | memoryview]


def save(
    directory: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    record: dict[str, Any],
    keep: int = 2,
    infinite: Collection[str] = (),
) -> Path:
    """Write `directory`/step-`step`, prune all but the `keep` newest valid ones up to it, and return its path.

    When it returns, the checkpoint survives a power failure. When it raises, nothing partial is left and older ones are
    untouched: ValueError for what a checkpoint cannot hold, HoraError for values that are not finite and for errors of
    the disk. `tensors` maps a file's stem to named tensors, on any device, with any strides, shared memory or not;
    those named in `infinite` need not be finite. `record` is JSON data. Newer checkpoints are left alone. One writer at
    a time per directory. Blocks until everything is on disk, and reads `keep` - 1 older checkpoints to verify them.
    """
    if keep < 2:
        raise ValueError(f"keep={keep}: at least 2 checkpoints are kept, since the newest may turn out damaged")
    if not 0 <= step < 10**18:
        raise ValueError(f"step={step}: must be at least 0 and below 10**18")
    contents = _check(tensors, record, infinite)
    path = Path(os.path.abspath(directory)) / f"step-{step}"
    try:
        _make_directory(path.parent)
        draft = _hidden_name(path)
        try:
            _write_draft(draft, step, contents)
            _publish(draft, path, step)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise HoraError(
            f"checkpoint {path} could not be written: {error.strerror or error}; older ones are untouched"
        ) from error
    try:
        _prune(path, step, keep)
    except OSError as error:
        log.warning("%s is written, but older checkpoints could not be removed: %s", path, error)
    return path


def _check(
    tensors: Mapping[str, Mapping[str, Tensor]], record: dict[str, Any], infinite: Collection[str]
) -> dict[str, _Content]:
    """The content of every file; nothing is copied yet."""
    files = []
    for stem, named in tensors.items():
        if not re.fullmatch(STEM, stem):
            raise ValueError(f"{stem!r} is not a valid file name in a checkpoint: use letters, digits, '_' and '-'")
        files.append(TensorFile(stem + TENSORS, named))
    try:
        state = json.dumps(record, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a checkpoint's record must be JSON data ({error}); encode() converts it") from None
    if len(state) > STATE_LIMIT_BYTES:
        raise ValueError(f"a checkpoint's record has {len(state)} bytes; the limit is {STATE_LIMIT_BYTES}")
    for file in files:
        file.check_finite(infinite)
    return {**{file.name: file.pieces() for file in files}, STATE: [state]}


def _write_draft(draft: Path, step: int, contents: Mapping[str, _Content]) -> None:
    os.mkdir(draft)
    with _open(draft, _DIRECTORY | os.O_NOFOLLOW) as directory:
        entries = {name: _write(directory, name, content) for name, content in contents.items()}
        _write(directory, MANIFEST, [Manifest(format=1, step=step, files=entries).to_json()])
        _sync(directory)


def _write(directory: int, name: str, content: _Content) -> ManifestEntry:
    digest, num_bytes = hashlib.sha256(), 0
    with _open(name, _NEW_FILE, directory) as file:
        for piece in content:
            rest = memoryview(piece)
            digest.update(rest)
            num_bytes += len(rest)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    return ManifestEntry(sha256=digest.hexdigest(), num_bytes=num_bytes)


def _publish(draft: Path, path: Path, step: int) -> None:
    if os.path.lexists(path):
        old = path.with_name(path.name + OLD)
        if not is_valid(path, step):
            _discard(path)  # `old` stays: it may be the valid one
        else:
            if os.path.lexists(old):
                _discard(old)
            os.rename(path, old)
    os.rename(draft, path)


def _prune(path: Path, step: int, keep: int) -> None:
    valid = {step}
    for other_step, other in list_checkpoints(path.parent):
        if other_step > step or other == path:
            continue
        if other_step in valid or len(valid) == keep:
            _discard(other)
        elif is_valid(other, other_step):
            valid.add(other_step)
    for leftover in list(path.parent.iterdir()):
        match = _HIDDEN.fullmatch(leftover.name)
        if match and (not _is_alive(int(match[1])) or time.time() - leftover.lstat().st_mtime > LEFTOVER_AGE_S):
            _remove(leftover)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):  # a process of another user
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _hidden_name(path: Path) -> Path:
    """A new name beside `path` that readers ignore, with the pid of this process."""
    return path.with_name(f".{path.name.removesuffix(OLD)}.{os.getpid()}.{secrets.token_hex(8)}")


def _discard(path: Path) -> None:
    hidden = _hidden_name(path)
    os.rename(path, hidden)
    _remove(hidden)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):  # made by another process, or a file, which _sync_directory reports
        os.mkdir(directory)
    _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    with _open(path, _DIRECTORY) as directory:
        _sync(directory)


def _sync(directory: int) -> None:
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot sync directories
            raise


@contextlib.contextmanager
def _open(path: str | Path, flags: int, directory: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
