"""Stochastic gradient descent over all tensors of a group in one launch, steered by numbers on the device.

torch's fused kernel takes momentum and decay as Python numbers, so that a schedule of momentum on the device is left to
a dozen multi-tensor kernels: 7 times as long for a small network (docs/optimizers.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotloop.kernels.adamw import adamw_runs_on
from hotloop.kernels.muon import scalar_on
from hotloop.kernels.tables import Tables

__all__ = ["fused_sgd", "sgd_eager"]

# Elements that a program updates.
_SIZE = 2048
_WARPS = 8
Scalar = float | Tensor


def fused_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor] | None,
    *,
    lr: Scalar,
    momentum: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    nesterov: bool = False,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
    shadows: Sequence[Tensor] | None = None,
    tables: Tables | None = None,
) -> None:
    """One update of every tensor, in place, in one launch, in float32.

    With g = grad * coefficient + wd p: `s = momentum s + g`, then p -= lr s, or with Nesterov's look ahead
    p -= lr (g + momentum s) (Sutskever et al. 2013); without `sums` p -= lr g. It can be recorded into a CUDA graph.

    Args:
        params: float32, bfloat16 or float16, all of one dtype.
        grads: likewise; not changed.
        sums: running sums of gradients, likewise; None for no momentum.
        lr, momentum, weight_decay: floats, or 0-d tensors on the device that are read when the launch runs.
        nesterov: look ahead.
        coefficient: 0-d float32 on the device that gradients are multiplied by.
        skip: 0-d float32 on the device; if it is not 0, nothing is written.
        shadows: 16-bit copies of `params` that are written too.
        tables: what remembers the tensors' addresses; see `hotloop.kernels.fused_adamw`.

    All tensors must be dense (any strides, the same for the tensors of one parameter) and on one device.
    """
    if not params:
        return
    device = params[0].device
    if not adamw_runs_on(device):
        sgd_eager(
            params,
            grads,
            sums,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            coefficient=coefficient,
            skip=skip,
            shadows=shadows,
        )
        return
    from hotloop.kernels.language import tl
    from hotloop.kernels.programs.sgd import sgd

    tables = tables or Tables()
    blocks = tables.blocks(params, _SIZE)
    if not blocks.count:
        return
    table = tables.table([role for role in (params, grads, sums, shadows) if role is not None])
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    rate = scalar_on(lr, device)
    sgd[(blocks.count,)](
        blocks.extents,
        table.pointers,
        rate,
        scalar_on(momentum, device),
        scalar_on(weight_decay, device),
        coefficient if coefficient is not None else rate,
        skip if skip is not None else rate,
        blocks.count,
        len(params),
        master_type=types[params[0].dtype],
        gradient_type=types[grads[0].dtype],
        sum_type=types[sums[0].dtype] if sums is not None else tl.float32,
        shadow_type=types[shadows[0].dtype] if shadows is not None else tl.float32,
        has_momentum=sums is not None,
        nesterov=nesterov,
        has_shadow=shadows is not None,
        has_coefficient=coefficient is not None,
        has_refuse=skip is not None,
        aligned=table.aligned,
        size=_SIZE,
        num_warps=_WARPS,
    )


def sgd_eager(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor] | None,
    *,
    lr: Scalar,
    momentum: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    nesterov: bool = False,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
    shadows: Sequence[Tensor] | None = None,
) -> None:
    """The twin of `fused_sgd`: the same values by plain tensor arithmetic; float64 tensors in float64."""
    rate, kept, decay = (scalar_on(x, params[0].device) for x in (lr, momentum, weight_decay))
    for i, (p, gradient) in enumerate(zip(params, grads, strict=True)):
        kind = torch.float64 if p.dtype == torch.float64 else torch.float32
        g = gradient.to(kind)
        if coefficient is not None:
            g = g * coefficient.to(kind)
        g = g + decay.to(kind) * p.detach().to(kind)
        places = [p.detach()]
        values = []
        if sums is not None:
            s = kept.to(kind) * sums[i].to(kind) + g
            g = g + kept.to(kind) * s if nesterov else s
            places.append(sums[i])
            values.append(s)
        values.insert(0, p.detach().to(kind) - rate.to(kind) * g)
        if shadows is not None:
            places.append(shadows[i].detach())
            values.append(values[0])
        for place, value in zip(places, values, strict=True):
            place.copy_(value if skip is None else torch.where(skip != 0, place.to(kind), value))
