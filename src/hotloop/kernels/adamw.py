"""AdamW over all tensors of a group in one launch: clipped, skipped and counted on the device, with a 16-bit copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotloop.kernels.tables import Tables, beside_capture

__all__ = ["adamw_eager", "adamw_runs_on", "fused_adamw"]

# Elements a program updates. Measured on an H200 over 10.6 million parameters, see docs/kernels.md.
_SIZE = 1024
_WARPS = 4
_constants: dict[tuple[torch.device, float], torch.Tensor] = {}
_recorded: dict[int, torch.Tensor] = {}
Scalar = float | torch.Tensor


def fused_adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    coefficient: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    shadows: Sequence[torch.Tensor] | None = None,
    decoupled: bool = True,
    tables: Tables | None = None,
) -> None:
    """One update of every tensor, in place, in one launch (Loshchilov and Hutter 2019; Kingma and Ba 2015).

    With g = grad * coefficient, per element in float32:
    `m += (1 - beta1) (g - m)`, `v += (1 - beta2) (g² - v)`,
    `p = p (1 - lr wd) - lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps)`; t = step + 1. Then step += 1 and
    shadow = p. It can be recorded into a CUDA graph; nothing is read back.

    Args:
        params: master weights, float32 (16-bit ones are updated in place with float32 arithmetic); all of one dtype.
        grads: float32, bfloat16 or float16, all of one dtype; not changed.
        exp_avgs, exp_avg_sqs: moments, all of one dtype.
        steps: float32 0-d, updates made so far; several tensors may share one.
        lr, beta1, beta2, eps, weight_decay: floats, or 0-d tensors on the device (float32 or float64) that are read
            when the launch runs.
        coefficient: 0-d float32 on the device that gradients are multiplied by (clipping, unscaling).
        skip: 0-d float32 on the device; if it is not 0, nothing at all is written.
        shadows: 16-bit copies of `params` that are written too.
        decoupled: False gives Adam, where the decay is added to the gradient.
        tables: what remembers the tensors' addresses; the owner of the tensors keeps it. None: looked up anew, which
            must not be done while a graph is recorded.

    All tensors must be dense (any strides, the same for the tensors of one parameter) and on one device.
    """
    if not params:
        return
    device = params[0].device
    if not adamw_runs_on(device):
        adamw_eager(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            coefficient=coefficient,
            skip=skip,
            shadows=shadows,
            decoupled=decoupled,
        )
        return
    from hotloop.kernels.language import tl
    from hotloop.kernels.programs.many import adamw

    tables = tables or Tables()
    blocks = tables.blocks(params, _SIZE)
    if not blocks.count:
        return
    roles = [params, grads, exp_avgs, exp_avg_sqs, steps]
    if shadows is not None:
        roles.append(shadows)
    table = tables.table(roles)
    counted = list(dict.fromkeys(map(torch.Tensor.data_ptr, steps)))
    by_address = {s.data_ptr(): s for s in steps}
    step_table = tables.table([[by_address[address] for address in counted]])
    aligned = tables.table([r for i, r in enumerate(roles) if i != 4]).aligned if not table.aligned else True
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    adamw[(blocks.count,)](
        blocks.extents,
        table.pointers,
        step_table.pointers,
        _on_device(lr, device),
        _on_device(beta1, device),
        _on_device(beta2, device),
        _on_device(eps, device),
        _on_device(weight_decay, device),
        coefficient if coefficient is not None else steps[0],
        skip if skip is not None else steps[0],
        tables.counter(device),
        blocks.count,
        len(params),
        len(counted),
        master_type=types[params[0].dtype],
        gradient_type=types[grads[0].dtype],
        moment_type=types[exp_avgs[0].dtype],
        shadow_type=types[shadows[0].dtype] if shadows is not None else tl.float32,
        has_shadow=shadows is not None,
        has_coefficient=coefficient is not None,
        has_refuse=skip is not None,
        decoupled=decoupled,
        aligned=aligned,
        size=_SIZE,
        steps_size=128,
        num_warps=_WARPS,
    )


def adamw_eager(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    coefficient: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    shadows: Sequence[torch.Tensor] | None = None,
    decoupled: bool = True,
) -> None:
    """The twin of `fused_adamw`: the same values by plain tensor arithmetic, for any device; see there.

    float64 tensors are computed in float64.
    """
    device = params[0].device
    rate, b1, b2, epsilon, decay = (
        _on_device(x, device).double() for x in (lr, beta1, beta2, eps, weight_decay)
    )
    keep = skip != 0 if skip is not None else None
    done: dict[int, torch.Tensor] = {}
    for i, (p, g, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        kind = torch.float64 if p.dtype == torch.float64 else torch.float32
        t = step.double() + 1.0
        root = (1.0 - b2**t).sqrt().to(kind)
        rate_now = (rate / (1.0 - b1**t)).to(kind)
        old_p, g = p.detach().to(kind), g.to(kind)
        if coefficient is not None:
            g = g * coefficient.to(kind)
        if decoupled:
            new_p = old_p * (1.0 - rate * decay).to(kind)
        else:
            new_p, g = old_p, g + decay.to(kind) * old_p
        new_m = m.to(kind) + (1.0 - b1).to(kind) * (g - m.to(kind))
        new_v = v.to(kind) + (1.0 - b2).to(kind) * (g * g - v.to(kind))
        new_p = new_p - rate_now * (new_m / (new_v.sqrt() / root + epsilon.to(kind)))
        written = [(p.detach(), new_p), (m, new_m), (v, new_v)]
        if shadows is not None:
            written.append((shadows[i], new_p))
        for place, value in written:
            # selected, not multiplied: what is refused may be NaN
            place.copy_(value if keep is None else torch.where(keep, place.to(kind), value))
        done[step.data_ptr()] = step
    for step in done.values():
        step += 1.0 if keep is None else (~keep).to(step.dtype)


def adamw_runs_on(device: torch.device) -> bool:
    """Whether `fused_adamw` is one launch on `device`; elsewhere its twin computes the same."""
    if device.type not in ("cuda", "cpu"):
        return False
    from hotloop.kernels.language import runs_on

    return runs_on(device)


def _on_device(value: Scalar, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    found = _constants.get((device, value))
    if found is None:
        with beside_capture(device):
            found = torch.full((), value, dtype=torch.float64, device=device)
        if len(_constants) > 4096:
            # a rate that a schedule changes on the host; graphs hold theirs in `_recorded`
            _constants.clear()
        _constants[(device, value)] = found
    if capturing:
        _recorded[id(found)] = found
    return found
