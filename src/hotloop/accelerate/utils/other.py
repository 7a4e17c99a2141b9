"""Saving and loading single files, unwrapping models, and small odds and ends that scripts import."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotloop.accelerate.state import PartialState
from hotloop.errors import CheckpointError

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
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


def is_compiled_module(module: Any) -> bool:
    """Whether it is what `torch.compile(module)` returns."""
    dynamo: Any = getattr(torch, "_dynamo", None)
    if dynamo is None or not hasattr(module, "_orig_mod"):
        return False
    return isinstance(module, dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Whether some submodule is compiled by itself."""
    return any(is_compiled_module(part) for part in module.modules() if part is not module)


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile repeated blocks (elements of ModuleLists) each by itself, in place; without any, the whole module."""
    found = False
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList) and len({type(block) for block in part}) == 1:
            for block in part:
                block.compile(**compile_kwargs)
            found = True
    if not found:
        module.compile(**compile_kwargs)
    return module


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The user's module below wrappers of torch's own; one that was prepared is the user's module already.

    Args:
        model: a module, maybe in DistributedDataParallel, DataParallel or what torch.compile returns.
        keep_fp32_wrapper: False: its calls no longer go through autocast.
        keep_torch_compile: put what torch.compile made around the result again.
        recursive: unwrap submodules too.
    """
    from hotloop.loop.modules import binding_of

    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    compiled = model if is_compiled_module(model) else None
    if compiled is not None:
        model = compiled._orig_mod
    while isinstance(model, wrappers):
        model = model.module
    if recursive:
        for part in model.modules():
            for name, child in list(part.named_children()):
                if isinstance(child, wrappers):
                    setattr(part, name, child.module)
    binding = binding_of(model)
    if binding is not None and not keep_fp32_wrapper:
        binding.dtype = None
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model


def wait_for_everyone() -> None:
    """Return once every process has arrived."""
    PartialState().wait_for_everyone()


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """`destination` with everything of `source` in it, dicts merged key by key."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`getattr` along a dotted path."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something listens on `port` (29500) of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """A port of this machine that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def convert_bytes(size: float) -> str:
    """`size` in bytes as text in the largest unit that keeps it above 1."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def check_os_kernel() -> None:
    """Nothing: no kernel that runs this Python is known to hang."""


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Whether some parameter is a DTensor."""
    import sys

    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(p, module.DTensor) for p in model.parameters())


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """All submodules, children before their parents, `model` itself last; with their names if so asked."""
    by_depth: dict[int, list[tuple[str, torch.nn.Module]]] = defaultdict(list)
    for name, part in model.named_modules():
        by_depth[name.count(".") + 1 if name else 0].append((name, part))
    ordered = [pair for depth in sorted(by_depth, reverse=True) for pair in by_depth[depth]]
    return ordered if return_fqns else [part for _, part in ordered]
