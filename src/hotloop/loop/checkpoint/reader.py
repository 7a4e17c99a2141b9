"""Reads checkpoints: finds the newest whole one, checks every byte, and says what is wrong with others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint.folder import Entry, list_entries, read_manifest, resolve, step_of
from hotloop.loop.checkpoint.foreign import describe_foreign
from hotloop.loop.checkpoint.layout import Place, read_layout, restore, view_bytes
from hotloop.loop.checkpoint.manifest import MANIFEST, FileEntry
from hotloop.loop.checkpoint.plain import decode
from hotloop.loop.checkpoint.snapshot import Snapshot
from hotloop.loop.checkpoint.stream import check_pieces, read_pieces

__all__ = ["load", "read_checkpoint"]

# A run that saves meanwhile may delete or rename what was just listed.
_TRIES = 5


def load(path: str | os.PathLike[str]) -> Snapshot | None:
    """The newest whole checkpoint in the folder `path`, or the one that `path` is; None if there is none.

    A damaged checkpoint is passed over for the newest older one that is whole, with a line on stderr.

    Raises:
        CheckpointError: there are only damaged ones, `path` is a damaged one, or it is something else: a
            file, or a folder that another program wrote. Names the file and the fault.
    """
    folder = resolve(path)
    if not os.path.lexists(folder):
        _check_missing(folder)
        return None
    if not folder.is_dir():
        looks = describe_foreign(folder, prefix="; it looks like ")
        fault = (
            "is a broken symlink" if not folder.exists() else f"is a file, not a folder of checkpoints{looks}"
        )
        raise CheckpointError(f"{folder} {fault}; {_ADVICE}")
    if step_of(folder) is not None or (folder / MANIFEST).exists():
        return _read_one(folder)
    return _read_newest(folder)


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint in the folder `path`, every byte checked; tensors are on the CPU and own their memory.

    Raises:
        CheckpointError: names the file and the fault.
        FileNotFoundError: it is gone.
    """
    handle, manifest = read_manifest(path)
    try:
        tensors: dict[str, dict[str, Tensor]] = {}
        objects: dict[str, Any] = {}
        for entry in manifest.files:
            file = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=handle)
            try:
                if entry.kind == "tensors":
                    tensors[entry.name] = _read_tensors(file, entry, path / entry.file)
                else:
                    objects[entry.name] = _read_object(file, entry, path / entry.file)
            finally:
                os.close(file)
        known = {MANIFEST, *(entry.file for entry in manifest.files)}
        extra = sorted(name for name in os.listdir(handle) if name not in known and not name.startswith("."))
    finally:
        os.close(handle)
    for name in extra:
        _say(f"{path / name} is not part of this checkpoint (its manifest does not list it); ignored")
    return Snapshot(manifest.step, tensors, objects, manifest.meta)


_ADVICE = (
    "hotloop loads folders that `save_state` wrote; restore it from a copy, give another path, "
    "or remove it to start afresh"
)


def _check_missing(folder: Path) -> None:
    """A missing folder is no checkpoint yet; a missing step beside others is a mistake in the name."""
    if step_of(folder) is not None:
        others = [entry.path.name for entry in list_entries(folder.parent)]
        if others:
            raise CheckpointError(f"{folder} does not exist; {folder.parent} has {', '.join(sorted(others))}")


def _read_one(path: Path) -> Snapshot:
    try:
        return read_checkpoint(path)
    except CheckpointError as fault:
        looks = ""
        if not (path / MANIFEST).exists():
            looks = describe_foreign(path, prefix="; the folder looks like ")
        raise CheckpointError(f"{fault}{looks}; {_ADVICE}") from fault
    except OSError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault.strerror or fault}") from fault


def _read_newest(folder: Path) -> Snapshot | None:
    for _ in range(_TRIES):
        try:
            entries = list_entries(folder)
            if not entries:
                break
            return _first_whole(folder, entries)
        except FileNotFoundError:
            continue
        except OSError as fault:
            raise CheckpointError(f"{folder} cannot be read: {fault.strerror or fault}") from fault
    else:
        raise CheckpointError(f"the checkpoints in {folder} were deleted while they were being read")
    looks = describe_foreign(folder, prefix="looks like ")
    if looks:
        raise CheckpointError(f"{folder} has no hotloop checkpoint and {looks}; {_ADVICE}")
    return None


def _first_whole(folder: Path, entries: list[Entry]) -> Snapshot:
    faults: list[str] = []
    for entry in reversed(entries):
        fault = entry.fault
        if not fault:
            try:
                snapshot = read_checkpoint(entry.path)
            except CheckpointError as error:
                fault = str(error)
            else:
                for line in faults:
                    _say(f"{line}; passed over for {entry.path.name}")
                return snapshot
        faults.append(fault)
    listed = "; ".join(faults)
    raise CheckpointError(f"no checkpoint in {folder} is whole: {listed}; {_ADVICE}")


def _read_tensors(file: int, entry: FileEntry, path: Path) -> dict[str, Tensor]:
    header_bytes = entry.pieces[0][0]
    header = bytearray(header_bytes)
    read_pieces(file, entry.pieces[:1], 0, [memoryview(header)], path)
    places, notes = read_layout(bytes(header))
    stored = {name: _allocate(place) for name, place in places.items()}
    views = [view_bytes(tensor) for tensor in stored.values()]
    read_pieces(file, entry.pieces[1:], header_bytes, [view for view in views if len(view)], path)
    return restore(stored, notes)


def _read_object(file: int, entry: FileEntry, path: Path) -> Any:
    check_pieces(file, entry.pieces, path)
    with os.fdopen(os.dup(file), "rb") as stream:
        tree = torch.load(stream, weights_only=True, map_location="cpu")
    try:
        return decode(tree)
    except CheckpointError as fault:
        raise CheckpointError(f"{path} {fault}") from fault


def _allocate(place: Place) -> Tensor:
    size_bytes = place.stop - place.start
    if size_bytes == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.empty(size_bytes, dtype=torch.uint8).view(place.dtype).view(place.shape)


def _say(text: str) -> None:
    print(f"hotloop: {text}", file=sys.stderr, flush=True)
