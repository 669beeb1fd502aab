"""Manifest of a checkpoint: its files with their sizes and SHA-256. Also the names of everything on disk.

DIR/step-N/manifest.json         written last: {"format": 1, "step": N, "files": {name: {"sha256", "bytes"}}}
DIR/step-N/state.json            the record
DIR/step-N/<stem>.safetensors    named tensors
DIR/step-N.old                   the previous checkpoint of the same step, while it is replaced
DIR/.step-N.<pid>.<random>       being written or removed; never read
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
OLD = ".old"
MANIFEST_LIMIT_BYTES = 1 << 20
STATE_LIMIT_BYTES = 64 << 20

STEM = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"
_FILE = rf"\A(?:{STEM}\.safetensors|state\.json)\Z"
_DIRECTORY = re.compile(r"step-(0|[1-9][0-9]{0,17})(\.old)?")


class Damaged(Exception):
    """Why a directory is not a valid checkpoint, worded to follow "is damaged:"."""


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    num_bytes: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="bytes")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files but the manifest itself. Their names have no separators and no leading dots."""

    format: Literal[1]
    step: Annotated[int, msgspec.Meta(ge=0)]
    files: dict[Annotated[str, msgspec.Meta(pattern=_FILE)], ManifestEntry]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @staticmethod
    def parse(raw: bytes) -> Manifest:
        """Damaged for anything but a manifest of this format that lists the record."""
        try:
            manifest = msgspec.json.decode(raw, type=Manifest)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Damaged(f"{MANIFEST} is not a manifest ({str(error)[:200]})") from None
        if STATE not in manifest.files:
            raise Damaged(f"{MANIFEST} does not list {STATE}")
        return manifest


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory; None for any other name."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Step and path of everything in `directory` that has a checkpoint's name, the newest first. Raises OSError."""
    found = [(step, path) for path in directory.iterdir() if (step := step_of(path.name)) is not None]
    return sorted(found, key=lambda each: (each[0], each[1].suffix != OLD), reverse=True)
