"""Adam and AdamW whose every number may live on the device: rate, betas, decay, counter and whether to step at all.

Kingma & Ba (2015), "Adam: A Method for Stochastic Optimization"; Loshchilov & Hutter (2019), "Decoupled Weight Decay
Regularization"; Reddi et al. (2018), "On the Convergence of Adam and Beyond" (`amsgrad`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hotloop.kernels.selection import chosen, kernels_wanted
from hotloop.optim.batch import Batch, Number, as_number, is_tensor, to_dtype
from hotloop.optim.resident import ResidentOptimizer, check_settings

if TYPE_CHECKING:
    from hotloop.kernels import Tables

__all__ = ["Adam", "AdamW", "adam_state_names", "kernels_run_on", "update_adam"]


class Adam(ResidentOptimizer):
    """Adam with L2 penalty, as `torch.optim.Adam`.

    On the CPU the trajectory is that of `torch.optim.Adam` to the bit. On a CUDA device one launch of hotloop's kernel
    updates all tensors, masters and their 16-bit parameters included.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate; a number or a 0-d tensor.
        betas: decay of the running means of gradient and squared gradient; numbers or 0-d tensors.
        eps: added to the root of the squared mean.
        weight_decay: L2 penalty (AdamW: decoupled decay, times lr); a number or a 0-d tensor.
        amsgrad: divide by the largest squared mean so far.
        maximize: climb instead of descend.
        fused: None for hotloop's kernel on a CUDA device (torch's for what that does not know: amsgrad, float64, 16
            bits without masters); True for torch's fused one where it can do the work, also on the CPU; False for
            neither.
        master: keep float32 masters of 16-bit parameters; None (and True) keep them, False does not.

    Raises:
        OptimizerError: a setting out of its range.
    """

    device_settings: ClassVar[frozenset[str]] = frozenset({"lr", "betas", "weight_decay"})
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        master: bool | None = None,
    ) -> None:
        check_settings(type(self).__name__, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "fused": fused,
                "master": master,
            },
        )

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See `ResidentOptimizer.state_names`."""
        return adam_state_names(group)

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        """See `ResidentOptimizer.update`."""
        update_adam(batch, group, decoupled=self.decoupled, tables=self.tables_of)


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`; see `Adam` for arguments and where what computes."""

    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        master: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused, master=master
        )


def adam_state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """The running means that Adam keeps of each weight."""
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group.get("amsgrad") else ("exp_avg", "exp_avg_sq")


def update_adam(
    batch: Batch, group: dict[str, Any], *, decoupled: bool, tables: Callable[[dict[str, Any]], Tables]
) -> None:
    """One Adam update of `batch` by `group`'s settings.

    On a CUDA device hotloop's kernel, for what it knows, or torch's fused one; elsewhere multi-tensor kernels, by
    numbers of the host or of the device.
    """
    fused = group.get("fused")
    wanted = batch.device.type == "cuda" if fused is None else fused
    on_device = is_tensor(*group["betas"], group["weight_decay"])
    torchs = fused and not (on_device or batch.has_masters or chosen())
    if wanted and not torchs and _kernel_takes(batch, group):
        _update_by_kernel(batch, group, decoupled, tables(group))
    elif wanted and not on_device:
        _update_fused(batch, group, decoupled)
    elif batch.on_host:
        _update_on_host(batch, group, decoupled)
    else:
        _update_on_device(batch, group, decoupled)


def _kernel_takes(batch: Batch, group: dict[str, Any]) -> bool:
    """Whether hotloop's kernel runs there and knows tensors such as these."""
    return (
        not group.get("amsgrad")
        and batch.dtype == torch.float32
        and kernels_run_on(batch.device)
        and batch.is_uniform()
    )


def kernels_run_on(device: torch.device) -> bool:
    """Whether hotloop's kernels are launched on `device`: CUDA, unless `HOTLOOP_KERNELS=0` is in the environment."""
    if device.type != "cuda" or not kernels_wanted():
        return False
    from hotloop.kernels import adamw_runs_on

    return adamw_runs_on(device)


def _update_by_kernel(batch: Batch, group: dict[str, Any], decoupled: bool, tables: Tables) -> None:
    from hotloop.kernels import fused_adamw

    assert batch.step is not None
    beta1, beta2 = group["betas"]
    fused_adamw(
        batch.weights,
        batch.gradients,
        batch.state["exp_avg"],
        batch.state["exp_avg_sq"],
        [batch.step] * len(batch.weights),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        coefficient=batch.factor(maximize=group.get("maximize", False)),
        skip=batch.refuse,
        shadows=batch.parameters if batch.has_masters else None,
        decoupled=decoupled,
        tables=tables,
    )
    batch.rounded = True


def _update_fused(batch: Batch, group: dict[str, Any], decoupled: bool) -> None:
    step = batch.advance()
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.to(batch.device, non_blocking=True)
    kernel(
        batch.weights,
        batch.cast_gradients(),
        batch.state["exp_avg"],
        batch.state["exp_avg_sq"],
        batch.state.get("max_exp_avg_sq", []),
        [step] * len(batch.weights),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group.get("amsgrad", False),
        maximize=group.get("maximize", False),
        grad_scale=batch.scale,
        found_inf=batch.refuse,
    )


def _update_on_host(batch: Batch, group: dict[str, Any], decoupled: bool) -> None:
    """The operations of torch's own Adam in its order, each over several tensors at once."""
    lr, decay = as_number(group["lr"]), as_number(group["weight_decay"])
    beta1, beta2 = map(as_number, group["betas"])
    count = batch.advance().item()
    for part in batch.pieces():
        weights, means, squares = part.weights, part.state["exp_avg"], part.state["exp_avg_sq"]
        gradients = part.true_gradients(maximize=group.get("maximize", False))
        if decay != 0.0:
            if decoupled:
                torch._foreach_mul_(weights, 1 - lr * decay)
            else:
                gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = _roots(part, group)
        torch._foreach_div_(roots, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(weights, means, roots, -(lr / (1 - beta1**count)))


def _update_on_device(batch: Batch, group: dict[str, Any], decoupled: bool) -> None:
    """The same formula with every coefficient a 0-d tensor; refused, each multiplies by 1 or adds 0."""
    batch.advance()
    lr, decay = group["lr"], group["weight_decay"]
    beta1, beta2 = group["betas"]
    count, dtype = batch.count(), batch.dtype
    weights, means, squares = batch.weights, batch.state["exp_avg"], batch.state["exp_avg_sq"]
    gradients = batch.true_gradients(maximize=group.get("maximize", False))
    if is_tensor(decay) or decay != 0.0:
        if decoupled:
            torch._foreach_mul_(weights, to_dtype(1 - batch.gate(lr * decay, 0.0), dtype))
        else:
            penalty = torch._foreach_mul(weights, to_dtype(batch.gate(decay, 0.0), dtype))
            torch._foreach_add_(penalty, gradients)
            gradients = list(penalty)
    torch._foreach_mul_(means, to_dtype(batch.gate(beta1, 1.0), dtype))
    torch._foreach_add_(means, torch._foreach_mul(gradients, to_dtype(1 - beta1, dtype)))
    torch._foreach_mul_(squares, to_dtype(batch.gate(beta2, 1.0), dtype))
    torch._foreach_addcmul_(squares, torch._foreach_mul(gradients, to_dtype(1 - beta2, dtype)), gradients)
    roots = _roots(batch, group)
    torch._foreach_div_(roots, to_dtype((1 - beta2**count).sqrt(), dtype))
    # refused before there is any state, and without eps, it would be 0 / 0
    torch._foreach_add_(roots, group["eps"] or to_dtype(batch.gate(0.0, 1.0), dtype))
    updates = torch._foreach_div(means, roots)
    torch._foreach_mul_(updates, to_dtype(batch.gate(-(lr / (1 - beta1**count)), 0.0), dtype))
    torch._foreach_add_(weights, updates)


def _roots(batch: Batch, group: dict[str, Any]) -> list[Tensor]:
    squares = batch.state["exp_avg_sq"]
    if group.get("amsgrad"):
        torch._foreach_maximum_(batch.state["max_exp_avg_sq"], squares)
        squares = batch.state["max_exp_avg_sq"]
    return list(torch._foreach_sqrt(squares))
