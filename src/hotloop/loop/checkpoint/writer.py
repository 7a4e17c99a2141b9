"""Writes one checkpoint: every file durable, the manifest last, then one rename."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint.folder import FolderLock, list_entries
from hotloop.loop.checkpoint.host import HostCopies
from hotloop.loop.checkpoint.layout import lay_out, view_bytes
from hotloop.loop.checkpoint.manifest import MANIFEST, FileEntry, Manifest, dump_manifest
from hotloop.loop.checkpoint.plain import encode
from hotloop.loop.checkpoint.snapshot import Snapshot
from hotloop.loop.checkpoint.stream import PieceWriter, sync_folder

__all__ = ["HeldSnapshot", "check_space", "hold", "write"]

# Room for headers, manifest and the file system's own tables.
_SLACK_BYTES = 1 << 20
_LONGEST_NAME = 100


@dataclass
class HeldSnapshot:
    """A snapshot in host memory that nothing changes any more, ready to be written."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    objects: dict[str, Any]
    meta: dict[str, Any]
    copies: HostCopies


def hold(snapshot: Snapshot, *, clone: bool) -> HeldSnapshot:
    """Copy `snapshot` to host memory (see `hotloop.loop.checkpoint.host`) and check that it can be written.

    Args:
        snapshot: what to save.
        clone: copy CPU tensors as well; False if the caller changes nothing until they are written.

    Raises:
        CheckpointError: something in it cannot be stored; names what and where.
    """
    snapshot.check()
    copies = HostCopies(clone=clone)
    with torch.no_grad():
        tensors = {
            part: {
                name: copies.take(_tensor(t, part, name), f"tensors[{part!r}][{name!r}]")
                for name, t in named.items()
            }
            for part, named in snapshot.tensors.items()
        }
        objects = {
            name: encode(value, f"objects[{name!r}]", copies.take) for name, value in snapshot.objects.items()
        }
    copies.seal()
    return HeldSnapshot(snapshot.step, tensors, objects, dict(snapshot.meta), copies)


def check_space(folder: Path, size_bytes: int) -> None:
    """Raise CheckpointError if `folder`'s file system has not `size_bytes` and a little more left."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes + _SLACK_BYTES:
        raise CheckpointError(
            f"cannot save into {folder}: the checkpoint takes {size_bytes:,} bytes and its file system has "
            f"{free_bytes:,} left; make room or choose another folder (what was saved before is untouched)"
        )


def write(lock: FolderLock, held: HeldSnapshot, keep: int | None) -> Path:
    """Write `held` into the locked folder, then delete older ones beyond `keep`; returns its path.

    Raises:
        CheckpointError: a file cannot be written; names the file and the fault. Nothing was replaced.
    """
    held.copies.wait()
    lock.clean()
    made: Path | None = None
    try:
        made = lock.new_folder(held.step)
        _write_files(made, held, _next_number(lock.folder))
        path = lock.publish(made, held.step)
    except OSError as fault:
        where = fault.filename or made or lock.folder
        raise CheckpointError(
            f"checkpoint of step {held.step} was not saved into {lock.folder}: {where}: "
            f"{fault.strerror or fault}; what was saved before is untouched"
        ) from fault
    finally:
        if made is not None and made.exists():
            shutil.rmtree(made, ignore_errors=True)
    if keep is not None:
        try:
            lock.prune(path, keep)
        except OSError as fault:
            raise CheckpointError(
                f"{path} is saved, but an older checkpoint cannot be deleted: "
                f"{fault.filename or lock.folder}: {fault.strerror or fault}"
            ) from fault
    return path


def _write_files(made: Path, held: HeldSnapshot, number: int) -> None:
    names = _FileNames()
    files = []
    for part, tensors in held.tensors.items():
        name = names.choose(part, ".safetensors")
        files.append(_entry(name, "tensors", part, _write_tensors(made / name, tensors)))
    for key, value in held.objects.items():
        name = names.choose(key, ".pt")
        files.append(_entry(name, "object", key, _write_object(made / name, key, value)))
    with PieceWriter(made / MANIFEST) as file:
        file.write(dump_manifest(Manifest(held.step, number, held.meta, files)))
        file.close()
    sync_folder(made)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> list[list[int]]:
    header, ordered = lay_out(tensors)
    with PieceWriter(path) as file:
        file.write_piece(header)
        for tensor in ordered:
            file.write(view_bytes(tensor.contiguous()))
        return file.close()


def _write_object(path: Path, name: str, value: Any) -> list[list[int]]:
    with PieceWriter(path, quiet=True) as file:
        torch.save(value, cast(IO[bytes], file))
        pieces = file.close()
    try:
        # The rename waits for proof that the file loads; mapped, so that no tensor is read.
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as fault:
        raise CheckpointError(f"objects[{name!r}] cannot be loaded again: {fault}") from fault
    return pieces


def _tensor(value: object, part: str, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        kind = type(value)
        raise CheckpointError(
            f"tensors[{part!r}][{name!r}] is a {kind.__module__}.{kind.__qualname__}, not a tensor; "
            "put it into Snapshot.objects"
        )
    return value


def _entry(file: str, kind: str, name: str, pieces: list[list[int]]) -> FileEntry:
    return FileEntry(file, kind, name, sum(size for size, _ in pieces), pieces)


def _next_number(folder: Path) -> int:
    numbers = [entry.manifest.number for entry in list_entries(folder) if entry.manifest is not None]
    return max(numbers, default=0) + 1


class _FileNames:
    """Turns any string into a file name that every file system takes, each name once."""

    def __init__(self) -> None:
        self._used = {MANIFEST}

    def choose(self, name: str, ending: str) -> str:
        encoded = name.encode("utf-8", "surrogatepass")
        safe = re.sub(rb"[^A-Za-z0-9._-]", lambda byte: b"%%%02X" % byte[0][0], encoded).decode()
        if safe.startswith(".") or not safe:
            safe = "%" + safe
        if len(safe) > _LONGEST_NAME:
            safe = safe[:_LONGEST_NAME] + "-" + hashlib.blake2b(encoded, digest_size=8).hexdigest()
        chosen, count = safe + ending, 1
        while chosen.casefold() in self._used:  # some file systems do not tell A from a
            count += 1
            chosen = f"{safe}~{count}{ending}"
        self._used.add(chosen.casefold())
        return chosen
