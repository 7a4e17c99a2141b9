"""accelerate itself, where it is loaded beside hotloop: libraries that ask it for ranks get the same answers.

transformers, diffusers, peft and accelerate's own test helpers import accelerate and ask its shared state which
process this is. When a script has moved to hotloop nobody else fills that state.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["forget_state", "share_state"]

_FILLED: list[dict[str, Any]] = []


def share_state(partial: dict[str, Any], mixed_precision: str | None) -> None:
    """Fill accelerate's shared state, if that package is loaded and its state empty, with what holds here.

    Args:
        partial: the shared state of `PartialState`.
        mixed_precision: fill its AcceleratorState too, with this precision.
    """
    module: Any = sys.modules.get("accelerate.state")
    if module is None:
        return
    names = ("_cpu", "backend", "debug", "device", "num_processes", "process_index", "local_process_index")
    shared = {name: partial[name] for name in names}
    shared["distributed_type"] = module.DistributedType(partial["distributed_type"].value)
    shared["fork_launched"] = partial.get("fork_launched", False)
    wanted = [(module.PartialState._shared_state, shared)]
    if mixed_precision is not None:
        plugins = ("deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "device_mesh")
        more = dict.fromkeys((*plugins, "parallelism_config", "dynamo_plugin"))
        wanted.append(
            (module.AcceleratorState._shared_state, {**shared, **more, "_mixed_precision": mixed_precision})
        )
    for theirs, values in wanted:
        if not theirs:
            theirs.update(values)
            _FILLED.append(theirs)


def forget_state() -> None:
    """Empty what `share_state` filled."""
    for theirs in _FILLED:
        theirs.clear()
    _FILLED.clear()
