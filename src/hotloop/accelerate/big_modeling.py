"""Models without memory, and names of what spreads one model over devices, which is not built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hotloop.accelerate.unsupported import unsupported_function

__all__ = [
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]


@contextlib.contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Within the block modules are made on `device`: their parameters, and their buffers too if so asked."""
    target = torch.device(device)
    if include_buffers:
        with target:
            yield
        return
    register = torch.nn.Module.register_parameter

    def register_there(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            kept = dict(param.__dict__)
            kind = type(param)
            moved = kind(param.to(target), requires_grad=param.requires_grad)
            moved.__dict__.update(kept)
            module._parameters[name] = moved

    torch.nn.Module.register_parameter = register_there  # type: ignore
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore


def init_empty_weights(include_buffers: bool | None = None) -> contextlib.AbstractContextManager[None]:
    """Within the block modules are made without memory, on the meta device."""
    return init_on_device("meta", include_buffers=include_buffers)


_PLACING = "a model has to fit on the device of its process; spreading one model over devices is not built"
cpu_offload = unsupported_function("cpu_offload", _PLACING)
cpu_offload_with_hook = unsupported_function("cpu_offload_with_hook", _PLACING)
disk_offload = unsupported_function("disk_offload", _PLACING)
dispatch_model = unsupported_function("dispatch_model", _PLACING)
load_checkpoint_and_dispatch = unsupported_function("load_checkpoint_and_dispatch", _PLACING)
