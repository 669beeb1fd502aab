"""Manifest: which files make a checkpoint, how large they are and their SHA-256; and how checkpoints are named.

DIR/step-N/manifest.json                written last: {"format": 1, "step": N, "files": {name: {"sha256", "bytes"}}}
DIR/step-N/state.json                   the record
DIR/step-N/<stem>.safetensors           named tensors
DIR/step-N.old                          the one before of the same step, while another takes its place
DIR/.step-N.<pid>.<random>              being written or being removed; never read
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
OLD = ".old"
MANIFEST_LIMIT_BYTES = 1 << 20
STATE_LIMIT_BYTES = 64 << 20

STEM = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"
_FILE = rf"\A(?:{STEM}\.safetensors|state\.json)\Z"
_PLACE = re.compile(r"step-(0|[1-9][0-9]{0,17})(\.old)?")


class Damaged(Exception):
    """Why a directory is not a valid checkpoint, in words that follow "is damaged:"."""


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its SHA-256 in hexadecimal and its size."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    num_bytes: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="bytes")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of one checkpoint but the manifest itself. Names are plain: no separators, no dots in front."""

    format: Literal[1]
    step: Annotated[int, msgspec.Meta(ge=0)]
    files: dict[Annotated[str, msgspec.Meta(pattern=_FILE)], ManifestEntry]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @staticmethod
    def parse(raw: bytes) -> Manifest:
        """Damaged for anything but a manifest of this format that names the record among its files."""
        try:
            manifest = msgspec.json.decode(raw, type=Manifest)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Damaged(f"{MANIFEST} is no manifest ({str(error)[:200]})") from None
        if STATE not in manifest.files:
            raise Damaged(f"{MANIFEST} names no {STATE}")
        return manifest


class CheckpointPlace(NamedTuple):
    """A directory that by its name is a checkpoint."""

    step: int
    path: Path


def places(directory: Path) -> list[CheckpointPlace]:
    """Everything in `directory` that is named as a checkpoint, the newest first. Raises OSError."""
    found = []
    for path in directory.iterdir():
        match = _PLACE.fullmatch(path.name)
        if match:
            found.append((int(match[1]), match[2] is None, path))
    return [CheckpointPlace(step, path) for step, _, path in sorted(found, reverse=True)]
