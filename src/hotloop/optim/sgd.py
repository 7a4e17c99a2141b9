"""Stochastic gradient descent with momentum whose every number may live on the device.

Nesterov's form as Sutskever et al. (2013), "On the importance of initialization and momentum in deep learning", and
torch write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hotloop.errors import OptimizerError
from hotloop.kernels.selection import chosen
from hotloop.optim.adam import kernels_run_on
from hotloop.optim.batch import Batch, Number, as_number, is_tensor, to_dtype
from hotloop.optim.resident import ResidentOptimizer, check_settings

if TYPE_CHECKING:
    from hotloop.kernels import Tables

__all__ = ["SGD"]


_NO_DAMPENING = "hotloop.optim.SGD has no dampening; use torch.optim.SGD for it"


class SGD(ResidentOptimizer):
    """SGD with momentum, as `torch.optim.SGD` without dampening.

    On the CPU the trajectory is that of `torch.optim.SGD` to the bit. On a CUDA device torch's fused kernel computes;
    where momentum or weight decay are scheduled on the device, or masters are kept, hotloop's own does, in one launch.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate; a number or a 0-d tensor.
        momentum: decay of the running sum of gradients; a number or a 0-d tensor.
        dampening: in torch's place; only 0.
        weight_decay: L2 penalty; a number or a 0-d tensor.
        nesterov: look ahead along the momentum.
        maximize: climb instead of descend.
        fused: torch's fused kernel; None where it is on a device, True also on the CPU, False nowhere.
        master: keep float32 masters of 16-bit parameters; None (and True) keep them, False does not.

    Raises:
        OptimizerError: a setting out of its range, dampening, or Nesterov's form without momentum.
    """

    device_settings: ClassVar[frozenset[str]] = frozenset({"lr", "momentum", "weight_decay"})
    _counts: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        momentum: Number = 0.0,
        dampening: float = 0.0,
        weight_decay: Number = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        master: bool | None = None,
    ) -> None:
        if dampening:
            raise OptimizerError(_NO_DAMPENING)
        check_settings("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and not is_tensor(momentum) and momentum == 0.0:
            raise OptimizerError("SGD: nesterov=True looks ahead along a momentum: give momentum > 0")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": 0.0,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "fused": fused,
                "master": master,
            },
        )

    def _complete(self, group: dict[str, Any]) -> None:
        if group.get("dampening"):
            raise OptimizerError(_NO_DAMPENING)
        super()._complete(group)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See `ResidentOptimizer.state_names`. Zero momentum makes the first step what torch's is, a copy of it."""
        momentum = group["momentum"]
        return ("momentum_buffer",) if is_tensor(momentum) or momentum != 0.0 else ()

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        """See `ResidentOptimizer.update`."""
        fused = group["fused"]
        if fused is None:
            fused = batch.device.type == "cuda"
        on_device = is_tensor(group["momentum"], group["weight_decay"])
        own = fused and (on_device or batch.has_masters or chosen()) and batch.dtype != torch.float64
        if own and kernels_run_on(batch.device) and batch.is_uniform():
            _update_by_kernel(batch, group, self.tables_of(group))
        elif fused and not on_device:
            _update_fused(batch, group)
        elif batch.on_host:
            _update_on_host(batch, group)
        else:
            _update_on_device(batch, group)


def _update_by_kernel(batch: Batch, group: dict[str, Any], tables: Tables) -> None:
    from hotloop.kernels.sgd import fused_sgd

    fused_sgd(
        batch.weights,
        batch.gradients,
        batch.state.get("momentum_buffer"),
        lr=group["lr"],
        momentum=group["momentum"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        coefficient=batch.factor(maximize=group["maximize"]),
        skip=batch.refuse,
        shadows=batch.parameters if batch.has_masters else None,
        tables=tables,
    )
    batch.rounded = True


def _update_fused(batch: Batch, group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.to(batch.device, non_blocking=True)
    torch._fused_sgd_(
        batch.weights,
        batch.cast_gradients(),
        batch.state.get("momentum_buffer", []),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=lr,
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=batch.scale,
        found_inf=batch.refuse,
    )


def _update_on_host(batch: Batch, group: dict[str, Any]) -> None:
    """The operations of torch's own SGD in its order, each over several tensors at once."""
    lr, momentum, decay = (as_number(group[name]) for name in ("lr", "momentum", "weight_decay"))
    for part in batch.pieces():
        updates = part.true_gradients(maximize=group["maximize"])
        if decay != 0.0:
            updates = list(torch._foreach_add(updates, part.weights, alpha=decay))
        if momentum != 0.0:
            sums = part.state["momentum_buffer"]
            torch._foreach_mul_(sums, momentum)
            torch._foreach_add_(sums, updates)
            updates = list(torch._foreach_add(updates, sums, alpha=momentum)) if group["nesterov"] else sums
        torch._foreach_add_(part.weights, updates, alpha=-lr)


def _update_on_device(batch: Batch, group: dict[str, Any]) -> None:
    """The same formula with every coefficient a 0-d tensor; refused, each multiplies by 1 or adds 0."""
    lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
    dtype = batch.dtype
    updates = batch.true_gradients(maximize=group["maximize"])
    if is_tensor(decay) or decay != 0.0:
        penalty = torch._foreach_mul(batch.weights, to_dtype(batch.gate(decay, 0.0), dtype))
        torch._foreach_add_(penalty, updates)
        updates = list(penalty)
    if "momentum_buffer" in batch.state:
        sums = batch.state["momentum_buffer"]
        torch._foreach_mul_(sums, to_dtype(batch.gate(momentum, 1.0), dtype))
        torch._foreach_add_(sums, updates)
        if group["nesterov"]:
            ahead = torch._foreach_mul(sums, to_dtype(momentum, dtype))
            torch._foreach_add_(ahead, updates)
            updates = list(ahead)
        else:
            updates = sums
    torch._foreach_add_(batch.weights, torch._foreach_mul(updates, to_dtype(batch.gate(-lr, 0.0), dtype)))
