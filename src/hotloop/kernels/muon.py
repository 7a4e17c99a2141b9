"""Muon's arithmetic for any number of matrices of one shape: three launches around its products, one for each product.

The polynomial a X + b G X + c G² X of a matrix and its Gram matrix is three products a step. cuBLAS adds to a copy of
what it is to add to, which is another kernel each; here it is read where the result is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotloop.kernels.adamw import _on_device, adamw_runs_on
from hotloop.kernels.tables import Tables

__all__ = [
    "muon_apply",
    "muon_apply_eager",
    "muon_gather",
    "muon_gather_eager",
    "newton_schulz",
    "newton_schulz_eager",
    "scalar_on",
]

# Elements that a program updates.
_SIZE = 2048
_WARPS = 8
_MOST_PARTIALS = 1024
# Up to this side of a Gram matrix the products here were measured to be faster than cuBLAS's.
_MOST_SIDE = 512
Scalar = float | Tensor


def muon_gather(
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    *,
    momentum: Scalar,
    nesterov: bool = True,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
    tables: Tables | None = None,
) -> Tensor:
    """Move running means by their gradients and return what is to be orthogonalised, each matrix of norm 1.

    With g = gradient * coefficient, in float32: `m = momentum m + (1 - momentum) g`; direction u = m, or with
    Nesterov's look ahead `momentum m + (1 - momentum) g` once more (Jordan et al. 2024); result u / (|u| + eps).

    Args:
        gradients: float32, bfloat16 or float16, all of one dtype, shape and layout; not changed.
        means: float32, bfloat16 or float16, the same layout, changed in place.
        momentum: a float, or a 0-d tensor on the device that is read when the launch runs.
        eps: added to the Frobenius norm.
        dtype: of the result.
        coefficient: 0-d float32 on the device that gradients are multiplied by.
        skip: 0-d float32 on the device; if it is not 0, means stay and the result is of no meaning.
        tables: what remembers the tensors' addresses; see `hotloop.kernels.fused_adamw`.

    Returns:
        [tensors, rows, columns]: rows is the first dimension of each tensor, columns all others, as they lie in memory.
    """
    device = means[0].device
    if not adamw_runs_on(device):
        return muon_gather_eager(
            gradients,
            means,
            momentum=momentum,
            nesterov=nesterov,
            eps=eps,
            dtype=dtype,
            coefficient=coefficient,
            skip=skip,
        )
    from hotloop.kernels.language import tl
    from hotloop.kernels.programs.muon import gather, normalise

    tables = tables or Tables()
    count, numel, rows = len(means), means[0].numel(), len(means[0])
    blocks = -(-numel // _SIZE)
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    stack = torch.empty(count, numel, dtype=torch.float32, device=device)
    partials = torch.empty(count, blocks, dtype=torch.float32, device=device)
    ready = torch.empty(count, rows, numel // rows, dtype=dtype, device=device)
    nothing = partials
    table = tables.table([gradients, means])
    whole = table.aligned and numel % _SIZE == 0
    gather[(count, blocks)](
        table.pointers,
        stack,
        partials,
        _on_device(momentum, device),
        coefficient if coefficient is not None else nothing,
        skip if skip is not None else nothing,
        numel,
        count,
        gradient_type=types[gradients[0].dtype],
        mean_type=types[means[0].dtype],
        has_coefficient=coefficient is not None,
        has_refuse=skip is not None,
        nesterov=nesterov,
        whole=whole,
        size=_SIZE,
        num_warps=_WARPS,
    )
    if blocks > _MOST_PARTIALS:
        # every program adds all sums of its matrix: for a large one that would be more reading than the matrix
        partials = partials.sum(1, keepdim=True)
    sums = partials.shape[1]
    normalise[(count, blocks)](
        stack,
        partials,
        ready,
        eps,
        numel,
        sums,
        partials_size=max(16, 1 << (sums - 1).bit_length()),
        whole=whole,
        size=_SIZE,
        num_warps=_WARPS,
    )
    return ready


def muon_gather_eager(
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    *,
    momentum: Scalar,
    nesterov: bool = True,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """The twin of `muon_gather`: the same values by plain tensor arithmetic; float64 means are moved in float64."""
    directions = []
    for gradient, mean in zip(gradients, means, strict=True):
        kind = torch.float64 if mean.dtype == torch.float64 else torch.float32
        g = gradient.to(kind)
        if coefficient is not None:
            g = g * coefficient.to(kind)
        kept = momentum.to(kind) if isinstance(momentum, Tensor) else momentum
        moved = kept * mean.to(kind) + (1.0 - kept) * g
        direction = kept * moved + (1.0 - kept) * g if nesterov else moved
        mean.copy_(moved if skip is None else torch.where(skip != 0, mean.to(kind), moved))
        directions.append(_as_in_memory(direction))
    stack = torch.stack(directions)
    return (stack / (torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True) + eps)).to(dtype)


def newton_schulz(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """`steps` times X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X of each matrix, with the smaller of its two Gram matrices.

    Matrices whose smaller side is above 512 are left to cuBLAS.

    Args:
        x: [matrices, rows, columns], bfloat16 or float16, contiguous; not changed. Sums are float32, what lies between
            two products is rounded to the dtype of `x`.
        steps: of the iteration.
        coefficients: (a, b, c).
    """
    if min(x.shape[-2:]) > _MOST_SIDE or not adamw_runs_on(x.device):
        return newton_schulz_eager(x, steps, coefficients)
    a, b, c = coefficients
    count, rows, columns = x.shape
    side = min(rows, columns)
    gram, polynomial = x.new_empty(count, side, side), x.new_empty(count, side, side)
    results = [torch.empty_like(x), torch.empty_like(x)]
    for i in range(steps):
        y = results[i % 2]
        if rows <= columns:
            _product(x, x.mT, gram)
            _product(gram, gram, polynomial, alpha=c, beta=b, add=gram)
            _product(polynomial, x, y, beta=a, add=x)
        else:
            _product(x.mT, x, gram)
            _product(gram, gram, polynomial, alpha=c, beta=b, add=gram)
            _product(x, polynomial, y, beta=a, add=x)
        x = y
    return x


def newton_schulz_eager(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """The twin of `newton_schulz` in torch's batched products, for any floating dtype."""
    a, b, c = coefficients
    wide = x.shape[-2] <= x.shape[-1]
    for _ in range(steps):
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a) if wide else torch.baddbmm(x, x, polynomial, beta=a)
    return x


def _product(
    a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0, add: Tensor | None = None
) -> None:
    """out = alpha a b + beta add, for [batch, m, k] and [batch, k, n] of any strides."""
    from hotloop.kernels.programs.muon import product

    count, m, k = a.shape
    n = b.shape[-1]
    # tall tiles where they fill a good part of the card, measured on an H200; else smaller ones
    large = -(-m // 128) * -(-n // 128) * count >= 48 and min(m, n) >= 128
    rows, columns = (128, 64) if large else (64, 64)
    depth = 64 if min(k, m, n) >= 64 else 32
    product[(-(-m // rows) * -(-n // columns), count)](
        a,
        b,
        out if add is None else add,
        out,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        alpha,
        beta,
        has_c=add is not None,
        whole=m % rows == 0 and n % columns == 0 and k % depth == 0,
        rows=rows,
        columns=columns,
        depth=depth,
        num_warps=4,
        num_stages=4,
    )


def muon_apply(
    weights: Sequence[Tensor],
    updates: Tensor,
    *,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    scale: float = 1.0,
    skip: Tensor | None = None,
    shadows: Sequence[Tensor] | None = None,
    tables: Tables | None = None,
) -> None:
    """`w = w (1 - lr wd) - lr scale x` in place, and its rounding into a 16-bit copy, in one launch.

    Args:
        weights: float32, bfloat16 or float16, all of one shape and layout, as `muon_gather` had them.
        updates: x, [tensors, rows, columns], contiguous.
        lr, weight_decay: floats, or 0-d tensors on the device that are read when the launch runs.
        scale: one factor for all.
        skip: 0-d float32 on the device; if it is not 0, nothing is written.
        shadows: 16-bit copies of the weights that are written too.
        tables: what remembers the tensors' addresses.
    """
    device = updates.device
    if not adamw_runs_on(device):
        muon_apply_eager(
            weights,
            updates,
            lr=lr,
            weight_decay=weight_decay,
            scale=scale,
            skip=skip,
            shadows=shadows,
        )
        return
    from hotloop.kernels.language import tl
    from hotloop.kernels.programs.muon import apply

    tables = tables or Tables()
    count, numel = len(weights), weights[0].numel()
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    table = tables.table([weights] if shadows is None else [weights, shadows])
    apply[(count, -(-numel // _SIZE))](
        table.pointers,
        updates,
        _on_device(lr, device),
        _on_device(weight_decay, device),
        skip if skip is not None else updates,
        scale,
        numel,
        count,
        weight_type=types[weights[0].dtype],
        shadow_type=types[shadows[0].dtype] if shadows is not None else tl.float32,
        has_shadow=shadows is not None,
        has_refuse=skip is not None,
        whole=table.aligned and numel % _SIZE == 0,
        size=_SIZE,
        num_warps=_WARPS,
    )


def muon_apply_eager(
    weights: Sequence[Tensor],
    updates: Tensor,
    *,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    scale: float = 1.0,
    skip: Tensor | None = None,
    shadows: Sequence[Tensor] | None = None,
) -> None:
    """The twin of `muon_apply`: the same values by plain tensor arithmetic; float64 weights in float64."""
    rate, decay = (_on_device(x, updates.device).double() for x in (lr, weight_decay))
    for i, (weight, update) in enumerate(zip(weights, updates, strict=True)):
        kind = torch.float64 if weight.dtype == torch.float64 else torch.float32
        flat = _as_in_memory(weight.detach())
        old = flat.to(kind)
        moved = old * (1.0 - rate * decay).to(kind) - (rate * scale).to(kind) * update.to(kind)
        flat.copy_(moved if skip is None else torch.where(skip != 0, old, moved))
        if shadows is not None:
            shadow = _as_in_memory(shadows[i].detach())
            rounded = flat.to(shadow.dtype)
            shadow.copy_(rounded if skip is None else torch.where(skip != 0, shadow, rounded))


def _as_in_memory(tensor: Tensor) -> Tensor:
    """[rows, columns] over the memory of a dense tensor whose first dimension is the outermost."""
    return tensor.as_strided((len(tensor), tensor.numel() // len(tensor)), (tensor.numel() // len(tensor), 1))


def scalar_on(value: Scalar, device: torch.device) -> Tensor:
    """A number as a 0-d tensor on `device`, for kernels that run beside each other: made before they part."""
    found: Tensor = _on_device(value, device)
    return found
