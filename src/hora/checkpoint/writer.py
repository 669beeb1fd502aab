"""Writer: puts a checkpoint on disk so that, whenever it is killed, the newest valid one is the old or the new.

1. check    nothing is written unless everything can be written and every value is finite
2. draft    a hidden directory beside: every file synced, the manifest last, then the directory
3. put      the draft is renamed to step-N; one that is there already waits as step-N.old, which readers know too
4. tidy     all but the newest valid ones go, and what killed writers left; a failure here costs disk space only

A directory is removed in two moves, hidden first, so that no half of one is ever taken for a checkpoint.
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
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import HoraError
from .manifest import MANIFEST, OLD, STATE, STATE_LIMIT_BYTES, STEM, TENSORS, Damaged, Manifest, ManifestEntry, places
from .reader import verified
from .tensorfile import TensorFile

log = logging.getLogger(__name__)

LEFTOVER_AGE_S = 3600.0

_HIDDEN = re.compile(r"\.step-[0-9]{1,18}\.([1-9][0-9]{0,6})\.[0-9a-f]{16}")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_Content = Iterable[bytes | memoryview]


def save(
    directory: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    record: dict[str, Any],
    keep: int = 2,
    infinite: Collection[str] = (),
) -> Path:
    """Writes `directory`/step-`step`, prunes all but the `keep` newest valid ones up to it, and returns its path.

    When it returns, the checkpoint outlasts a power cut. When it raises, nothing half-written is left and the older
    ones are untouched: ValueError for what a checkpoint cannot hold, HoraError for values that are not finite and for
    what the disk refused. `tensors` maps a file's stem to named tensors, on any device, with any strides, sharing
    memory or not; those named in `infinite` need not be finite. `record` is what JSON can hold. Newer checkpoints are
    left alone. One writer at a time per directory; blocks until the disk has everything, and reads `keep` - 1 older
    checkpoints to know that they are valid.
    """
    if keep < 2:
        raise ValueError(f"keep={keep}: at least two checkpoints are kept, since the newest may turn out damaged")
    if not 0 <= step < 10**18:
        raise ValueError(f"step={step}: a checkpoint's step is a number from 0")
    contents = _check(tensors, record, infinite)
    path = Path(os.path.abspath(directory)) / f"step-{step}"
    try:
        _make_directory(path.parent)
        draft = _hidden(path)
        try:
            _draft(draft, step, contents)
            _put(draft, path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise HoraError(
            f"checkpoint {path} could not be written: {error.strerror or error}; older ones are untouched"
        ) from error
    try:
        _tidy(path, step, keep)
    except OSError as error:
        log.warning("%s is written, but what it replaces could not be removed: %s", path, error)
    return path


def _check(
    tensors: Mapping[str, Mapping[str, Tensor]], record: dict[str, Any], infinite: Collection[str]
) -> dict[str, _Content]:
    """What every file will hold; nothing is copied yet."""
    files = []
    for stem, named in tensors.items():
        if not re.fullmatch(STEM, stem):
            raise ValueError(f"{stem!r} cannot be the name of a checkpoint's file: use letters, digits, '_' and '-'")
        files.append(TensorFile(stem + TENSORS, named))
    try:
        state = json.dumps(record, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a checkpoint's record must be plain JSON ({error}); encode() makes it so") from None
    if len(state) > STATE_LIMIT_BYTES:
        raise ValueError(f"a checkpoint's record has {len(state)} bytes, at most {STATE_LIMIT_BYTES} can be read back")
    for file in files:
        file.check_finite(infinite)
    return {**{file.name: file.pieces() for file in files}, STATE: [state]}


def _draft(draft: Path, step: int, contents: Mapping[str, _Content]) -> None:
    os.mkdir(draft)
    folder = os.open(draft, _FOLDER | os.O_NOFOLLOW)
    try:
        entries = {name: _write(folder, name, content) for name, content in contents.items()}
        _write(folder, MANIFEST, [Manifest(format=1, step=step, files=entries).to_json()])
        _sync(folder)
    finally:
        os.close(folder)


def _write(folder: int, name: str, content: _Content) -> ManifestEntry:
    digest, num_bytes = hashlib.sha256(), 0
    file = os.open(name, _NEW_FILE, 0o666, dir_fd=folder)
    try:
        for piece in content:
            rest = memoryview(piece)
            digest.update(rest)
            num_bytes += len(rest)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return ManifestEntry(sha256=digest.hexdigest(), num_bytes=num_bytes)


def _put(draft: Path, path: Path) -> None:
    if os.path.lexists(path):
        old = path.with_name(path.name + OLD)
        if not _is_valid(path, int(path.name.removeprefix("step-"))):
            _discard(path)  # `old` stays where it is: it may be the valid one
        else:
            if os.path.lexists(old):
                _discard(old)
            os.rename(path, old)
    os.rename(draft, path)


def _tidy(path: Path, step: int, keep: int) -> None:
    valid = {step}
    for place in places(path.parent):
        if place.step > step or place.path == path:
            continue
        if place.step in valid or len(valid) == keep:
            _discard(place.path)
        elif _is_valid(place.path, place.step):
            valid.add(place.step)
    for left in list(path.parent.iterdir()):
        match = _HIDDEN.fullmatch(left.name)
        if match and (_is_gone(int(match[1])) or time.time() - left.lstat().st_mtime > LEFTOVER_AGE_S):
            _remove(left)


def _is_valid(path: Path, step: int) -> bool:
    try:
        verified(path, step)
    except Damaged:
        return False
    return True


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _hidden(path: Path) -> Path:
    """A new name beside `path` that readers pass over and that tells who made it."""
    return path.with_name(f".{path.name.removesuffix(OLD)}.{os.getpid()}.{secrets.token_hex(8)}")


def _discard(path: Path) -> None:
    hidden = _hidden(path)
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
    with contextlib.suppress(FileExistsError):  # by another, just now; or a file, which opening it as a directory tells
        os.mkdir(directory)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    folder = os.open(directory, _FOLDER)
    try:
        _sync(folder)
    finally:
        os.close(folder)


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync a directory say so like this
            raise
