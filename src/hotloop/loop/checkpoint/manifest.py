"""The manifest of a checkpoint: which files belong to it, how long they are, and their checksums.

`manifest.json` is written last. Its first line holds a checksum of all the lines below it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint.foreign import describe_foreign

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "check_sizes",
    "dump_manifest",
    "parse_manifest",
]

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_FORMAT = "hotloop checkpoint"
_FIRST = '{"checksum": "'


@dataclass(frozen=True)
class FileEntry:
    """One file: what it holds ("tensors" or "object"), its name, its length, and its pieces' CRC-32."""

    file: str
    kind: str
    name: str
    size_bytes: int
    pieces: list[list[int]]


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without reading its tensors.

    Attributes:
        step: the snapshot's step.
        number: counts the saves into a folder; the newest checkpoint has the highest, whatever its step.
        meta: the snapshot's meta.
        files: the files beside the manifest, in the order of the snapshot.
    """

    step: int
    number: int
    meta: dict[str, Any]
    files: list[FileEntry] = field(default_factory=list)


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    content = {"format": _FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    # The opening brace moves to the line that carries the checksum of what follows.
    rest = json.dumps(content, indent=1).encode()[1:]
    return f'{_FIRST}{_digest(rest)}",'.encode() + rest


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in `data`, which was read from `path`.

    Raises:
        CheckpointError: it is empty, altered, of another program, or of a newer version.
    """
    if not data:
        raise CheckpointError(f"{path} is truncated: it is empty")
    head = f'{_FIRST}{"0" * 32}",'
    mark = head.encode()[: len(_FIRST)]
    if not data.startswith(mark):
        if _looks_like_ours(data):
            raise CheckpointError(f"{path} is altered: its first line does not hold its checksum")
        raise CheckpointError(f"{path} is no manifest of a hotloop checkpoint: another program's, or altered")
    found, rest = data[len(mark) : len(mark) + 32], data[len(head) :]
    expected = _digest(rest)
    if found != expected.encode() or data[len(mark) + 32 : len(head)] != b'",':
        raise CheckpointError(f"{path} is altered or truncated: its own checksum does not fit its content")
    content = json.loads(b"{" + rest)
    if content["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {content['format_version']}; this hotloop reads versions up to "
            f"{FORMAT_VERSION}: upgrade hotloop"
        )
    files = [FileEntry(**entry) for entry in content["files"]]
    return Manifest(content["step"], content["number"], content["meta"], files)


def check_sizes(manifest: Manifest, handle: int, folder: Path) -> None:
    """Compare every file's length with the manifest, in the folder open as `handle`.

    Raises:
        CheckpointError: a file is missing, too short or too long; names the first such file.
    """
    for entry in manifest.files:
        path = folder / entry.file
        try:
            size_bytes = os.stat(entry.file, dir_fd=handle).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        if size_bytes < entry.size_bytes:
            raise CheckpointError(f"{path} is truncated: has {size_bytes:,} of {entry.size_bytes:,} bytes")
        if size_bytes > entry.size_bytes:
            raise CheckpointError(
                f"{path} is altered: has {size_bytes:,} bytes, the manifest says {entry.size_bytes:,}"
                + describe_foreign(path, prefix="; it looks like ")
            )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _looks_like_ours(data: bytes) -> bool:
    return _FORMAT.encode() in data
