"""Weights in files: sizes, shards, loading into a module. Placing parts of a model on several devices is not here."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hotloop.accelerate.filenames import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from hotloop.accelerate.files import load
from hotloop.accelerate.unsupported import refuse, unsupported_function
from hotloop.errors import CheckpointError, SettingError

__all__ = [
    "calculate_maximum_sizes",
    "check_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_into",
    "load_state_dict",
    "named_module_tensors",
    "set_module_tensor_to_device",
    "split_into_shards",
]

_UNITS = {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as "5MB" or "1GiB" (a lower-case b means bits).

    Raises:
        SettingError: it is no size.
    """
    if isinstance(size, int):
        return size
    text = size.strip()
    factor = _UNITS.get(text[-3:].upper()) or _UNITS.get(text[-2:].upper())
    digits = text[:-3] if text[-3:].upper() in _UNITS else text[:-2]
    try:
        number = float(digits) if factor else float(text)
    except ValueError:
        raise SettingError(
            f"`size` {size!r} is not in a valid format; write bytes, or e.g. '5GB', '200MiB'"
        ) from None
    if number < 0:
        raise SettingError(f"`size` {size!r} is negative")
    total = int(number * (factor or 1))
    return total // 8 if factor and text.endswith("b") else total


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Bytes of one element; an eighth for bool, as it is stored in files of weights."""
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What tells tensors of different memory apart: device, address, size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: torch.nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Any:
    """Names and parameters of `module`, then names and buffers."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        kept = set(module.state_dict()) if remove_non_persistent else None
        for name, buffer in module.named_buffers(recurse=recurse):
            if kept is None or name in kept:
                yield name, buffer


def compute_module_sizes(
    model: torch.nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every tensor and submodule by name, of the whole under "".

    Args:
        model: measured.
        dtype: size as if converted to it, where the tensor's own is larger.
        special_dtypes: dtype by tensor name.
        buffers_only: leave parameters out.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        width = dtype_byte_size(tensor.dtype)
        if special_dtypes is not None and name in special_dtypes:
            width = dtype_byte_size(special_dtypes[name])
        elif wanted is not None and (tensor.is_floating_point() or tensor.is_complex()):
            width = min(width, dtype_byte_size(wanted))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += int(tensor.numel() * width)
    return dict(sizes)


def calculate_maximum_sizes(model: torch.nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and of its largest leaf module with its name."""
    sizes = compute_module_sizes(model)
    leaves = [name for name, part in model.named_modules() if not any(part.children())]
    largest = max((sizes.get(name, 0) for name in leaves), default=0)
    return sizes.get("", 0), (largest, [name for name in leaves if sizes.get(name, 0) == largest])


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names that are one and the same parameter."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def is_peft_model(model: Any) -> bool:
    """Whether the module is one of peft's."""
    from hotloop.accelerate.installed import _is_package_available
    from hotloop.accelerate.models import extract_model_from_parallel

    if not _is_package_available("peft"):
        return False
    import peft  # type: ignore[import-not-found]

    return isinstance(extract_model_from_parallel(model), peft.PeftModel)


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> dict[str, Any]:
    """Tensors of one file of weights, safetensors or torch's format, on the CPU.

    Raises:
        CheckpointError: the file is damaged; names it and the fault.
    """
    if device_map is not None:
        refuse("device_map", "load on the CPU and let prepare move the model")
    if not str(checkpoint_file).endswith(".safetensors"):
        state: dict[str, Any] = load(checkpoint_file, map_location="cpu")
        return state
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(checkpoint_file)
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint_file}: cannot be loaded, it is damaged: {error}") from error


def load_into(model: torch.nn.Module, state: Mapping[str, Any], where: Any, strict: bool = True) -> None:
    """`load_state_dict` for tensors from a file that keeps shared memory under one name only.

    Raises:
        CheckpointError: names are missing or left over, or shapes differ; `where` names the file.
    """
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{where}: does not fit the model: {error}") from error
    if not strict:
        return
    own = model.state_dict()
    loaded = {id_tensor_storage(own[name]) for name in state if name in own}
    # a name that shares its memory with a loaded one has its values already
    missing = [name for name in missing if id_tensor_storage(own[name]) not in loaded]
    if missing or unexpected:
        raise CheckpointError(
            f"{where}: does not fit the model: missing {sorted(missing) or 'nothing'}, left over "
            f"{sorted(unexpected) or 'nothing'}"
        )


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    strict: bool = False,
    **kwargs: Any,
) -> None:
    """Load weights from a file, an index of shards, or a folder that holds one of them.

    Raises:
        CheckpointError: there are none, or they do not fit (`strict`).
        UnsupportedError: a device map or another option of placement is given.
    """
    if device_map is not None:
        refuse("device_map", "load on the CPU and let prepare move the model")
    if wrong := [name for name, value in kwargs.items() if value not in (None, False)]:
        refuse(
            f"load_checkpoint_in_model({', '.join(wrong)}=...)",
            "load plainly, then convert or move the model",
        )
    path = Path(checkpoint)
    if path.is_dir():
        names = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME)
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"{path}: has none of {', '.join(names)}")
        path = found[0]
    files = [path]
    if path.name.endswith(".index.json"):
        weight_map = json.loads(path.read_text())["weight_map"]
        files = [path.parent / name for name in sorted(set(weight_map.values()))]
    state: dict[str, Any] = {}
    for file in files:
        state.update(load_state_dict(file))
    load_into(model, state, path, strict=strict)


def split_into_shards(
    state: Mapping[str, torch.Tensor], max_shard_size: int | str, safe: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file name: one file, or as many of at most `max_shard_size` as it takes (a tensor is never cut)."""
    limit = convert_file_size_to_int(max_shard_size)
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    if len(shards) == 1:
        return {SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME: shards[0]}
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    return {
        pattern.format(suffix=f"-{number + 1:05d}-of-{len(shards):05d}"): shard
        for number, shard in enumerate(shards)
    }


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """False: parameters are never offloaded here."""
    return False


def get_mixed_precision_context_manager(native_amp: bool = False, autocast_kwargs: Any = None) -> Any:
    """A torch.autocast in the run's precision, or a context that changes nothing."""
    from hotloop.accelerate.state import AcceleratorState

    state = AcceleratorState()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(state.mixed_precision)
    enabled = autocast_kwargs is None or autocast_kwargs.enabled
    if not native_amp or dtype is None or not enabled:
        return contextlib.nullcontext()
    return torch.autocast(state.device.type, dtype)


_PLACING = "a model has to fit on the device of its process; spreading one model over devices is not built"
infer_auto_device_map = unsupported_function("infer_auto_device_map", _PLACING)
get_balanced_memory = unsupported_function("get_balanced_memory", _PLACING)
get_max_memory = unsupported_function("get_max_memory", _PLACING)
check_device_map = unsupported_function("check_device_map", _PLACING)
set_module_tensor_to_device = unsupported_function("set_module_tensor_to_device", _PLACING)
