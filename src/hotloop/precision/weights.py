"""Parameters stored in bf16, in place: the same Parameter objects, with what they were rounded from kept for masters.

Parameters of normalisation layers stay in fp32, as do all buffers: batch-norm statistics are running sums, torch's
kernels want a norm's parameters in the dtype of its statistics, and they are a thousandth of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hotloop.errors import PrepareError

__all__ = ["StoredWeights", "needs_masters", "restore_weights", "store_in_bf16", "take_originals"]

# Parameters that were made bf16 -> whether fp32 masters were asked for.
_STORED: Any = WeakIdKeyDictionary()
# Parameters whose masters no optimizer has begun yet -> their fp32 values.
_ORIGINALS: Any = WeakIdKeyDictionary()
_WATCHED: list[Any] = []


class StoredWeights:
    """What `store_in_bf16` did.

    Attributes:
        stored: names of parameters that are bf16 now.
        kept: names of those that stay in fp32.
    """

    def __init__(self, stored: list[str], kept: list[str]) -> None:
        self.stored = stored
        self.kept = kept

    def __str__(self) -> str:
        text = f"{len(self.stored)} parameters stored in bf16"
        return f"{text}, {len(self.kept)} of normalisation layers in fp32" if self.kept else text


def store_in_bf16(module: nn.Module, *, masters: bool, wide_gradients: bool = False) -> StoredWeights:
    """Round the float32 parameters of `module` to bf16, in place, but for those of normalisation layers.

    Args:
        module: any module; its class, keys and Parameter objects stay.
        masters: keep float32 values until an optimizer begins masters at them, and refuse optimizers without masters.
        wide_gradients: `p.grad` stays float32, so that a sum over micro-batches keeps its digits.
    """
    stored: list[str] = []
    kept: list[str] = []
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, p in owner._parameters.items():
            if p is None or p.dtype != torch.float32 or id(p) in seen:
                continue
            seen.add(id(p))
            full = f"{path}.{name}" if path else name
            # torch's bilinear kernel, too, mixes no dtypes
            if "norm" in type(owner).__name__.lower() or isinstance(owner, nn.Bilinear):
                kept.append(full)
                continue
            _round(p, masters=masters, wide_gradient=wide_gradients)
            stored.append(full)
    if masters:
        _watch_optimizers()
    return StoredWeights(stored, kept)


def _round(p: nn.Parameter, *, masters: bool, wide_gradient: bool) -> None:
    value, gradient = p.data, p.grad
    p.grad = None
    p.data = value.to(torch.bfloat16)
    if wide_gradient:
        p.grad_dtype = torch.float32
    if gradient is not None:
        p.grad = gradient if wide_gradient else gradient.to(torch.bfloat16)
    _STORED[p] = masters
    if masters and p.requires_grad:
        _ORIGINALS[p] = value


def restore_weights(module: nn.Module, masters: Mapping[Tensor, Tensor] | None = None) -> None:
    """Make parameters that were stored in bf16 float32 again, for export or another precision.

    Args:
        module: one that `store_in_bf16` or a loop with 16-bit weights has changed.
        masters: parameter -> float32 value, `dict(hotloop.optim.masters_of(optimizer).items())`; default the values
            that the parameters have.
    """
    for p in module.parameters():
        if p in _STORED:
            gradient = p.grad
            p.grad = None
            full = None if masters is None else masters.get(p)
            p.data = p.data.float() if full is None else full.detach().to(torch.float32, copy=True)
            if hasattr(p, "grad_dtype"):
                p.grad_dtype = torch.float32
            p.grad = None if gradient is None else gradient.float()
            del _STORED[p]
            _ORIGINALS.pop(p, None)


def needs_masters(parameters: Iterable[Tensor]) -> bool:
    """Whether one of `parameters` is stored in bf16 with fp32 masters asked for."""
    return any(_STORED.get(p, False) for p in parameters)


def take_originals(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """The float32 values that `parameters` were rounded from, each handed out once, as masters begin at them."""
    return {p: _ORIGINALS.pop(p) for p in parameters if p in _ORIGINALS}


def _watch_optimizers() -> None:
    if not _WATCHED:
        _WATCHED.append(register_optimizer_step_pre_hook(_refuse_without_masters))


def _refuse_without_masters(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A step that would forget what bf16 cannot hold, and leave masters elsewhere behind, is an error."""
    if "_hotloop_masters" in optimizer.__dict__:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if needs_masters(parameters):
        name = type(optimizer).__name__
        raise PrepareError(
            f"{name}.step: it updates parameters that are stored in bf16 and whose fp32 masters an optimizer is to "
            f"keep, but this {name} is not prepared: pass it to loop.prepare, in any order with the model; or train "
            'without masters, precision=Precision("bf16-true", master="none")'
        )
