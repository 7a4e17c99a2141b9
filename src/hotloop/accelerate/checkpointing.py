"""A run's state in a folder of the layout that accelerate's users know, published whole.

Files are those of accelerate (model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl, …), so its
checkpoints can be read and tools that look into them keep working. They are written into a hidden folder beside
the wanted one, listed with their checksums in `hotloop.json`, and take the wanted name together.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotloop.accelerate.filenames import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from hotloop.accelerate.files import load, save, write_whole
from hotloop.accelerate.state import PartialState
from hotloop.accelerate.weights import load_into, load_state_dict
from hotloop.errors import CheckpointError
from hotloop.seeds import rng_state, set_rng_state

__all__ = [
    "check_folder",
    "count_custom_states",
    "find_folder",
    "load_accelerator_state",
    "load_custom_state",
    "publish_folder",
    "save_accelerator_state",
    "save_custom_state",
]

LISTING = "hotloop.json"
_CHUNK_BYTES = 1 << 22


def _numbered(stem: str, number: int, ending: str) -> str:
    return f"{stem}{ending}" if number == 0 else f"{stem}_{number}{ending}"


@contextlib.contextmanager
def publish_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden folder to write a checkpoint into; after the block it is at `path`, in place of what was there.

    Collective. Foreign files in an older folder at `path` stay. If a rank raises or dies, `path` is untouched; if
    it dies between the last two renames, `find_folder` still finds the older one.

    Raises:
        CheckpointError: the folder cannot be written, or another rank failed.
    """
    processes = PartialState().processes
    target = Path(os.path.abspath(os.path.expanduser(path)))
    hidden = target.parent / f".{target.name}.saving"
    # ranks may save to folders of their own, and one path may be another folder on each node
    targets = processes.gather_object(str(target))
    owner = targets.index(str(target)) == processes.rank
    if owner or processes.is_local_main:
        shutil.rmtree(hidden, ignore_errors=True)
    processes.barrier()
    failure: BaseException | None = None
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        yield hidden
    except Exception as error:
        failure = error
    faults = processes.gather_object(None if failure is None else repr(failure))
    for turn in (owner, processes.is_local_main and not owner):
        if turn and not any(faults) and hidden.exists():
            try:
                _list_files(hidden)
                _take_place(hidden, target)
            except OSError as error:
                failure = error
        processes.barrier()
    faults = processes.gather_object(None if failure is None else repr(failure))
    if failure is None and not any(faults):
        return
    if owner or processes.is_local_main:
        shutil.rmtree(hidden, ignore_errors=True)
    if isinstance(failure, OSError):
        raise CheckpointError(
            f"cannot save to {target}: {failure}; what was there before is untouched"
        ) from failure
    if failure is not None:
        raise failure
    broken = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    raise CheckpointError(f"nothing was saved to {target}, since {'; '.join(broken)}")


def _list_files(folder: Path) -> None:
    """Bring every file to the disk, then write the list of them with their sizes and CRC-32."""
    listing: dict[str, dict[str, int]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        listing[str(file.relative_to(folder))] = {"size_bytes": file.stat().st_size, "crc32": _checksum(file)}
    with write_whole(folder / LISTING) as name:
        Path(name).write_text(
            json.dumps({"format": "hotloop.accelerate 1", "files": listing}, indent=1) + "\n"
        )


def _checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def _take_place(hidden: Path, target: Path) -> None:
    if not target.exists():
        os.rename(hidden, target)
        return
    previous = target.parent / f".{target.name}.previous"
    shutil.rmtree(previous, ignore_errors=True)
    known = _read_listing(target)
    os.rename(target, previous)
    os.rename(hidden, target)
    for entry in list(previous.iterdir()):
        name = entry.name
        ours = name == LISTING or any(part == name or part.startswith(name + "/") for part in known)
        if not ours and not _is_state_file(name) and not (target / name).exists():
            os.rename(entry, target / name)
    shutil.rmtree(previous, ignore_errors=True)


def _is_state_file(name: str) -> bool:
    """Whether the name is one that a checkpoint of either program has."""
    stems = (
        SAFE_MODEL_NAME,
        MODEL_NAME,
        OPTIMIZER_NAME,
        SCHEDULER_NAME,
        SAMPLER_NAME,
        "scaler",
        "dl_state_dict",
    )
    pattern = rf"({'|'.join(stems)})(_\d+)?\.(bin|safetensors|pt)|(random_states|custom_checkpoint)_\d+\.pkl"
    return re.fullmatch(pattern, name) is not None


def _read_listing(folder: Path) -> dict[str, dict[str, int]]:
    try:
        files: dict[str, dict[str, int]] = json.loads((folder / LISTING).read_text())["files"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / LISTING}: damaged: {error}") from error
    return files


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The folder at `path`; the one before it if a save died just before its last rename.

    Raises:
        CheckpointError: there is none.
    """
    target = Path(os.path.abspath(os.path.expanduser(path)))
    if target.is_dir():
        return target
    previous = target.parent / f".{target.name}.previous"
    if previous.is_dir():
        return previous
    raise CheckpointError(f"Tried to find {path} but folder does not exist")


def check_folder(folder: Path) -> None:
    """Compare every listed file with its size and checksum. A folder without a list (accelerate's) passes.

    Raises:
        CheckpointError: a file is missing, truncated or altered; names it and the fault.
    """
    for name, expected in _read_listing(folder).items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing from this checkpoint")
        size = file.stat().st_size
        if size != expected["size_bytes"]:
            raise CheckpointError(f"{file}: holds {size} bytes where {expected['size_bytes']} were saved")
        if _checksum(file) != expected["crc32"]:
            raise CheckpointError(f"{file}: altered since it was saved (its checksum differs)")


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
    gradients: Sequence[dict[str, torch.Tensor]] = (),
) -> Path:
    """Write the files of one checkpoint into a folder that exists; every rank writes its own random states.

    `gradients` are those of each model by parameter name, where they wait for the rest of a window.
    """
    folder = Path(output_dir)
    stem, ending = (SAFE_MODEL_NAME, ".safetensors") if safe_serialization else (MODEL_NAME, ".bin")
    for i, weights in enumerate(model_states):
        save(weights, folder / _numbered(stem, i, ending), save_on_each_node, safe_serialization)
    for i, optimizer in enumerate(optimizers):
        save(
            _plain_rates(optimizer.state_dict()),
            folder / _numbered(OPTIMIZER_NAME, i, ".bin"),
            save_on_each_node,
        )
    for i, scheduler in enumerate(schedulers):
        save(scheduler.state_dict(), folder / _numbered(SCHEDULER_NAME, i, ".bin"), save_on_each_node)
    if scaler is not None:
        save(scaler.state_dict(), folder / SCALER_NAME, save_on_each_node)
    mine = {
        "step": step,
        "hotloop": rng_state(PartialState().device),
        "gradients": list(gradients),
        "loaders": [loader.state_dict() if hasattr(loader, "state_dict") else None for loader in dataloaders],
    }
    with write_whole(folder / f"{RNG_STATE_NAME}_{process_index}.pkl") as name:
        torch.save(mine, name)
    return folder


def _plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Learning rates as numbers, where they are views into a table on the device."""
    groups = [
        {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items()}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read a checkpoint, of this module or of accelerate's, into the objects; returns what else to set.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit; names it and the fault.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise _LocationError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or `'on_device'`"
        )
    folder = Path(input_dir)
    place = PartialState().device if map_location == "on_device" else "cpu"
    options = load_kwargs or {}
    for i, model in enumerate(models):
        file = folder / _numbered(SAFE_MODEL_NAME, i, ".safetensors")
        if not file.exists():
            file = folder / _numbered(MODEL_NAME, i, ".bin")
        if not file.exists():
            raise CheckpointError(
                f"{folder}: has no weights for model {i} ({type(model).__name__}): no {file.name}"
            )
        load_into(model, load_state_dict(file), file, strict=load_model_func_kwargs.get("strict", True))
    for kind, things in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, schedulers)):
        for i, thing in enumerate(things):
            file = folder / _numbered(kind, i, ".bin")
            if not file.exists():
                raise CheckpointError(f"{folder}: has no state for {kind} {i}: no {file.name}")
            where = place if kind == OPTIMIZER_NAME else None
            with _fitting(file):
                thing.load_state_dict(load(file, map_location=where, **options))
    if scaler is not None:
        scaler.load_state_dict(load(folder / SCALER_NAME, **options))
    return _load_rank(folder, models, dataloaders, process_index)


class _LocationError(CheckpointError, TypeError):
    """A map_location that does not exist."""


@contextlib.contextmanager
def _fitting(file: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file}: does not fit: {error}") from error


def _load_rank(
    folder: Path, models: Sequence[Any], dataloaders: Sequence[Any], process_index: int
) -> dict[str, Any]:
    """This rank's random states, positions and waiting gradients; without its file (more ranks now) none."""
    file = folder / f"{RNG_STATE_NAME}_{process_index}.pkl"
    if not file.exists():
        return {}
    states = load(file)
    if "hotloop" in states:
        set_rng_state(states["hotloop"], PartialState().device)
        for model, gradients in zip(models, states.get("gradients", []), strict=False):
            for name, parameter in model.named_parameters():
                grad = gradients.get(name)
                parameter.grad = None if grad is None else grad.to(parameter.device)
        saved = states.get("loaders", [])
        for loader, position in zip(dataloaders, saved, strict=False):
            if position is None:
                continue
            if getattr(loader, "use_stateful_dataloader", False):
                loader.load_state_dict(position)
            elif hasattr(loader, "repeat_epoch"):
                loader.repeat_epoch(position)
    else:
        _set_their_rng(states)
    return {"step": states["step"]} if "step" in states else {}


def _set_their_rng(states: dict[str, Any]) -> None:
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    device = PartialState().device
    rows = states.get(f"torch_{device.type}_manual_seed")
    if rows is not None:
        torch.get_device_module(device).set_rng_state_all(rows)


def save_custom_state(
    obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write the state of a registered object."""
    save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl", save_on_each_node)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Read the state of a registered object; nothing but plain values and tensors is made from the file."""
    file = Path(path) / f"custom_checkpoint_{index}.pkl"
    with _fitting(file):
        obj.load_state_dict(load(file, map_location="cpu"))


def count_custom_states(path: str | os.PathLike[str]) -> int:
    """How many registered objects the checkpoint holds."""
    return sum(re.fullmatch(r"custom_checkpoint_\d+\.pkl", name) is not None for name in os.listdir(path))
