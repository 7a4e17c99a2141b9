"""Refusing an update without asking the host: which way an optimizer allows, and the masked way.

Checked on torch 2.11 to 2.13: fused Adam, AdamW and SGD obey a device flag (`found_inf`, exactly 0. or 1.).
Fused SGD with momentum keeps an uninitialised buffer when its very first step is refused, so its buffers are
made beforehand. Everything else is masked: state is saved before the step and selected back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from hotloop.errors import OptimizerError
from hotloop.optim.masters import masters_of

__all__ = [
    "MaskedStep",
    "choose_route",
    "device_settings",
    "make_momentum_buffers",
    "prefer_fused",
    "takes_device_rate",
]


def prefer_fused(optimizer: Optimizer) -> bool:
    """Let torch's fused kernel run where the user left the implementation to torch; True if so changed.

    Adam, AdamW and SGD take `fused=None, foreach=None` as "whichever is best"; on an accelerator that is the
    fused kernel, and it is the one that can be refused an update by a flag on the device.
    """
    if type(optimizer) not in (Adam, AdamW, SGD) or optimizer.state:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable"):
            return False
        if any(p.device.type != "cuda" or not p.is_floating_point() for p in group["params"]):
            return False
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def choose_route(optimizer: Optimizer, nonfinite: str, *, scaled: bool = False) -> str:
    """How updates of `optimizer` are refused on the device: "fused", "masked", or "none".

    Args:
        optimizer: any.
        nonfinite: what a loop was asked to do about non-finite values.
        scaled: losses are scaled, as in fp16: overflows are skipped, whatever `nonfinite` is.

    Raises:
        OptimizerError: an update may have to be skipped, and the optimizer allows neither; the text names it.
    """
    if nonfinite == "ignore" and not scaled:
        return "none"
    if device_settings(optimizer):
        # hotloop's own obey the flag whichever kernels compute
        return "fused"
    fused = getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused", True) for group in optimizer.param_groups
    )
    if fused and not any(group.get("dampening") for group in optimizer.param_groups):
        make_momentum_buffers(optimizer)
        return "fused"
    reason = _why_not_masked(optimizer)
    if reason is None:
        return "masked"
    if scaled or nonfinite == "skip":
        name = type(optimizer).__name__
        cures = [f"hotloop.optim.{name}", "fused=True"] if type(optimizer) in (Adam, AdamW) else []
        if "capturable" in optimizer.defaults and _on_accelerator(optimizer):
            cures.append("capturable=True")
        cures.append('precision="bf16"' if scaled else 'nonfinite="stop"')
        raise OptimizerError(
            f"{name} cannot skip an update on the device{', as fp16 may have to' if scaled else ''}: {reason}; use "
            + " or ".join(cures)
        )
    return "none"


def device_settings(optimizer: Optimizer) -> frozenset[str]:
    """Names of group settings that the optimizer says it reads where they lie, as 0-d tensors on the device."""
    return frozenset(getattr(optimizer, "device_settings", ()))


def takes_device_rate(optimizer: Optimizer) -> bool:
    """Whether a learning rate that is a tensor on the device is used there, and not read back by the step."""
    if "lr" in device_settings(optimizer):
        return True
    return all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def make_momentum_buffers(optimizer: Optimizer) -> None:
    """Zero momentum buffers before a first step of torch's SGD: m * 0 + g equals its first-step copy of g."""
    if not isinstance(optimizer, SGD):
        return
    masters = masters_of(optimizer)
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for p in group["params"]:
            if (p.requires_grad or p.grad is not None) and optimizer.state[p].get("momentum_buffer") is None:
                master = None if masters is None else masters.get(p)
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p if master is None else master)


def _why_not_masked(optimizer: Optimizer) -> str | None:
    """Why state of `optimizer` cannot be selected back on the device, or None if it can."""
    counts_on_host = isinstance(
        optimizer, Adam | AdamW | torch.optim.NAdam | torch.optim.RAdam | torch.optim.Adamax
    )
    if counts_on_host and not all(group.get("capturable") for group in optimizer.param_groups):
        return "it counts its steps on the host"
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                if value.device.type == "cpu" and value.numel() == 1 and _on_accelerator(optimizer):
                    return f"its state {name!r} lies on the host"
            elif isinstance(value, int | float):
                return f"its state {name!r} is a Python number"
    return None


def _on_accelerator(optimizer: Optimizer) -> bool:
    return any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"])


class MaskedStep:
    """Runs an optimizer's step and selects the old state back where a device flag says so.

    Costs a copy of parameters and optimizer state in memory, and reading and writing both once more per step.
    A step that makes state, as the first one of each parameter does, is made under a flag that the host reads: what
    was not there before cannot be selected back.
    """

    def __init__(
        self, optimizer: Optimizer, step: Callable[[], Any], nonfinite: str, *, scaled: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._step = step
        self._skips = nonfinite == "skip" or scaled
        self._saved: list[torch.Tensor] = []
        self._started = bool(optimizer.state)

    def __call__(self, refuse: torch.Tensor) -> Any:
        """Make the step unless `refuse` (float32 0-d, 0. or 1.) is set.

        Raises:
            OptimizerError: the step shows that it keeps state where no flag on the device reaches it.
        """
        if not self._started and refuse.item() != 0.0:
            return None
        self._started = True
        held = {p: dict(entries) for p, entries in self._optimizer.state.items()}
        live = self._live(held)
        if len(self._saved) != len(live) or any(
            s.shape != t.shape or s.dtype != t.dtype for s, t in zip(self._saved, live, strict=True)
        ):
            self._saved = [torch.empty_like(t) for t in live]
        if live:
            torch._foreach_copy_(self._saved, live)
        result = self._step()
        flag = refuse.bool()
        for saved, tensor in zip(self._saved, live, strict=True):
            # where, not a product: NaN times zero would still be NaN
            torch.where(flag, saved, tensor, out=tensor)
        if self._select_replaced(held, flag):
            self._settle_made(held, refuse)
        return result

    def _live(self, held: dict[Any, dict[str, Any]]) -> list[torch.Tensor]:
        tensors = [
            p.detach()
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        for entries in held.values():
            tensors += [v for v in entries.values() if isinstance(v, torch.Tensor)]
        masters = masters_of(self._optimizer)
        return tensors if masters is None else tensors + masters.tensors()

    def _select_replaced(self, held: dict[Any, dict[str, Any]], flag: torch.Tensor) -> bool:
        """Select back in tensors that the step has put in the place of others; True if it has made further ones."""
        made = False
        for p, entries in self._optimizer.state.items():
            before = held.get(p, {})
            for name, value in entries.items():
                old = before.get(name)
                if old is value and name in before:
                    continue
                if not isinstance(old, torch.Tensor) or not isinstance(value, torch.Tensor):
                    made = made or name not in before
                elif old.shape == value.shape:
                    # by now the old one is again what it was, where that matters
                    entries[name] = torch.where(flag, old.to(value.dtype), value)
                else:
                    made = True
        return made

    def _settle_made(self, held: dict[Any, dict[str, Any]], refuse: torch.Tensor) -> None:
        """Forget state that a refused step has made; waits for the device."""
        reason = _why_not_masked(self._optimizer)
        if reason is not None and self._skips:
            raise OptimizerError(
                f"{type(self._optimizer).__name__} cannot skip an update on the device: {reason}; use an optimizer "
                'whose state lies on the device, or nonfinite="stop"'
            )
        if refuse.item() == 0.0:
            return
        state = self._optimizer.state
        for p in list(state):
            if p not in held:
                del state[p]
                continue
            entries, before = state[p], held[p]
            for name in [n for n in entries if n not in before]:
                del entries[name]
            # tensors that were replaced by such of another shape
            entries.update({n: v for n, v in before.items() if _shape(v) != _shape(entries[n])})


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
