"""Torch's fused kernels for an optimizer that is already built, on or off."""

from __future__ import annotations

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

__all__ = ["set_fused"]

_ALL = ("cpu", "cuda", "mps", "xpu")
_DEVICES = {Adam: _ALL, AdamW: _ALL, SGD: _ALL, Adagrad: ("cpu",)}


def set_fused(optimizer: Optimizer, fused: bool) -> str | None:
    """Have `optimizer` update all its parameters with one fused kernel, or without; None if done, else why not.

    What the script asked for (`foreach`, `fused`) is replaced. The result differs in rounding alone.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in _DEVICES:
        return f"{name} has no fused kernel of torch's"
    if optimizer.state:
        return f"{name} has made steps already"
    for group in optimizer.param_groups:
        if fused and group.get("differentiable"):
            return f"{name} is differentiable"
        for p in group["params"]:
            if fused and (p.device.type not in _DEVICES[type(optimizer)] or not p.is_floating_point()):
                return f"{name} holds a parameter of {p.dtype} on {p.device}"
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"] = fused
        if fused:
            group["foreach"] = False
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
    return None
