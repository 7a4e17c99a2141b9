"""Single files: written whole or not at all, loaded without running code."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotloop.accelerate.state import PartialState
from hotloop.errors import CheckpointError

__all__ = [
    "clean_state_dict_for_safetensors",
    "load",
    "save",
    "write_whole",
]


@contextlib.contextmanager
def write_whole(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name beside `path` to write to; after the block it is on disk and takes the name `path`.

    If the block raises, the temporary file is removed and what was at `path` stays.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent or ".")
    os.close(handle)
    try:
        yield name
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write `obj` to the path or open file `f`, in one process of the run (or of each node).

    Args:
        obj: what is saved; with `safe_serialization` a state dict of tensors.
        f: a path is written whole or not at all.
        save_on_each_node: one process of each node writes.
        safe_serialization: as safetensors instead of torch's format.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, str | os.PathLike):
        torch.save(obj, f)
        return
    with write_whole(f) as name:
        if safe_serialization:
            from safetensors.torch import save_file

            tensors = clean_state_dict_for_safetensors(obj)
            save_file(tensors, name, metadata={"format": "pt"})
        else:
            torch.save(obj, name)


# what numpy arrays are made of when they are loaded without running code
_NUMPY_SAFE = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
]


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load` that runs no code from the file (`weights_only=True` unless given); numpy arrays are allowed.

    Raises:
        CheckpointError: a path cannot be read; names it and the fault.
    """
    kwargs.setdefault("weights_only", True)
    import _codecs

    try:
        with torch.serialization.safe_globals([*_NUMPY_SAFE, _codecs.encode]):
            return torch.load(f, map_location=map_location, **kwargs)
    except FileNotFoundError:
        raise
    except Exception as error:
        if not isinstance(f, str | os.PathLike):
            raise
        raise CheckpointError(f"{f}: cannot be loaded, it is damaged or of another kind: {error}") from error


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, each memory once: of names that share one, the first stays (the file cannot share)."""
    kept: dict[str, torch.Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        if tensor.numel() and tensor.device.type != "meta" and place in seen:
            first = kept[seen[place]]
            if (
                tensor.shape == first.shape
                and tensor.storage_offset() == state_dict[seen[place]].storage_offset()
            ):
                continue
            tensor = tensor.clone()
        seen.setdefault(place, name)
        kept[name] = tensor.detach().contiguous()
    return kept
