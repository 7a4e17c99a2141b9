"""Hooks that move parts of a model between devices: named only."""

from __future__ import annotations

from hotloop.accelerate.unsupported import unsupported_class, unsupported_function

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_REASON = "models are not spread over devices; torch's own module hooks do the rest"
AlignDevicesHook = unsupported_class("AlignDevicesHook", _REASON)
CpuOffload = unsupported_class("CpuOffload", _REASON)
ModelHook = unsupported_class("ModelHook", _REASON)
SequentialHook = unsupported_class("SequentialHook", _REASON)
UserCpuOffloadHook = unsupported_class("UserCpuOffloadHook", _REASON)
add_hook_to_module = unsupported_function("add_hook_to_module", _REASON)
attach_align_device_hook = unsupported_function("attach_align_device_hook", _REASON)
remove_hook_from_module = unsupported_function("remove_hook_from_module", _REASON)
remove_hook_from_submodules = unsupported_function("remove_hook_from_submodules", _REASON)
