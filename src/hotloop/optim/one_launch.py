"""The step of torch's Adam or AdamW made by hotloop's kernel: clipped, refused, counted and rounded in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from hotloop.optim.masters import MasterPairs, masters_of

__all__ = ["OneLaunch"]


@dataclass
class _Batch:
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    shadows: list[Tensor] = field(default_factory=list)


class OneLaunch:
    """Steps of `optimizer`, a torch Adam or AdamW, on its own state: what it saves and loads stays torch's.

    The values differ from torch's fused kernel by rounding (a few units in the last place); the 16-bit parameters of
    masters are written in the same pass, and gradients are multiplied there by a clipping factor.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        from hotloop.kernels import Tables

        self.optimizer = optimizer
        self.tables = Tables()

    @classmethod
    def of(cls, optimizer: Optimizer) -> OneLaunch | None:
        """For an optimizer whose every setting the kernel knows, on a device where it runs; None for others."""
        if type(optimizer) not in (Adam, AdamW):
            return None
        for group in optimizer.param_groups:
            if any(group.get(name) for name in ("amsgrad", "maximize", "differentiable")):
                return None
            if not group.get("fused") or any(p.device.type != "cuda" for p in group["params"]):
                return None
        device = next((p.device for g in optimizer.param_groups for p in g["params"]), None)
        if device is None:
            return None
        from hotloop.kernels import adamw_runs_on

        return cls(optimizer) if adamw_runs_on(device) else None

    def ready(self) -> bool:
        """Whether the next step can be made here: state exists; gradients and it are dense and of known types."""
        from hotloop.kernels.tables import is_dense, order_of

        masters = masters_of(self.optimizer)
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.device.type != "cuda":
                return False
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                state = self.optimizer.state.get(p)
                weight = _weight(p, masters)
                if not state or weight.dtype != torch.float32:
                    return False
                step = state.get("step")
                if not isinstance(step, Tensor) or step.device != p.device or step.dtype != torch.float32:
                    return False
                order = order_of(weight)
                if g.is_sparse or not is_dense(weight) or order_of(g) != order or order_of(p) != order:
                    return False
                if any(
                    state[name].dtype != torch.float32 or order_of(state[name]) != order
                    for name in ("exp_avg", "exp_avg_sq")
                ):
                    return False
        return True

    @torch.no_grad()
    def __call__(self, coefficient: Tensor | None, refuse: Tensor | None) -> None:
        """One step with gradients times `coefficient` (0-d float32), unless `refuse` (0-d float32) is not 0."""
        from hotloop.kernels import fused_adamw

        optimizer = self.optimizer
        masters = masters_of(optimizer)
        if masters is not None:
            masters.refresh()
        self._run_hooks("pre", masters)
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for batch in self._batches(group, masters):
                fused_adamw(
                    batch.weights,
                    batch.gradients,
                    batch.means,
                    batch.squares,
                    batch.steps,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    coefficient=coefficient,
                    skip=refuse,
                    shadows=batch.shadows or None,
                    decoupled=type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
                    tables=self.tables,
                )
        if masters is not None:
            masters.note_written()
        self._run_hooks("post", masters)

    def _batches(self, group: dict[str, Any], masters: MasterPairs | None) -> list[_Batch]:
        """Parameters with a gradient, by the gradient's type and by whether they are rounded from a master."""
        found: dict[Any, _Batch] = {}
        for p in group["params"]:
            g = p.grad
            if g is None:
                continue
            weight, state = _weight(p, masters), self.optimizer.state[p]
            batch = found.setdefault((g.dtype, None if weight is p else p.dtype), _Batch())
            batch.weights.append(weight.detach())
            batch.gradients.append(g)
            batch.means.append(state["exp_avg"])
            batch.squares.append(state["exp_avg_sq"])
            batch.steps.append(state["step"])
            if weight is not p:
                batch.shadows.append(p.detach())
        return list(found.values())

    def _run_hooks(self, when: str, masters: MasterPairs | None) -> None:
        """Hooks that others put on steps; those of the masters would do by copies what the kernel does."""
        everyones: dict[int, Any] = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks")
        own: dict[int, Any] = getattr(self.optimizer, f"_optimizer_step_{when}_hooks")
        for hook in list(chain(everyones.values(), own.values())):
            if masters is None or getattr(hook, "__self__", None) is not masters:
                hook(self.optimizer, (self.optimizer,), {})


def _weight(p: Tensor, masters: MasterPairs | None) -> Tensor:
    master = None if masters is None else masters.get(p)
    return p if master is None else master
