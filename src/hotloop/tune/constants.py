"""Numbers that a script chose and no rung may change: those of optimizers (weight decay, momenta, …) and of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["DROPOUT_NAMES", "read_layers", "read_optimizers"]

Constants = dict[str, float]

DROPOUT_NAMES = ("dropout", "dropout_p", "attn_dropout", "p_dropout")
_LAYER_NAMES = ("p", "eps", "momentum", "negative_slope", *DROPOUT_NAMES)
# how a step is computed, or what was right before a schedule began
_NOT_CHOSEN = frozenset({"params", "fused", "foreach", "capturable", "differentiable", "initial_lr"})


def read_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> Constants:
    """Numbers in all groups, by a name such as "weight_decay" or, of the second group, "weight_decay of group 2".

    Switches count as 0 and 1; tensors on a device, whose value would have to be waited for, are left out.
    """
    found: Constants = {}
    for i, optimizer in enumerate(optimizers, 1):
        for j, group in enumerate(optimizer.param_groups, 1):
            where = (f" of group {j}" if j > 1 else "") + (f" of optimizer {i}" if i > 1 else "")
            for name, value in group.items():
                if name in _NOT_CHOSEN:
                    continue
                parts = value if isinstance(value, tuple | list) else (value,)
                for k, part in enumerate(parts):
                    number = _number(part)
                    if number is not None:
                        found[name + (f"[{k}]" if len(parts) > 1 else "") + where] = number
    return found


def read_layers(modules: Iterable[nn.Module]) -> Constants:
    """Rates of dropout, momenta and epsilons of norms, slopes, by a name such as "p of 8"."""
    return {
        f"{attribute} of {name or type(part).__name__}": float(value)
        for module in modules
        for name, part in module.named_modules()
        for attribute in _LAYER_NAMES
        if isinstance(value := part.__dict__.get(attribute), float)
    }


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return float(value) if isinstance(value, bool | int | float) else None
