"""A whole Muon step of matrices of whole tiles, whose Newton-Schulz iteration runs on Gram matrices.

Every X that the iteration X <- (a I + b G + c G²) X passes through is Q X₀ with a polynomial Q of the first Gram matrix
G₀, and the next Gram matrix is P G P with P = a I + b G + c G². So only the first product and the last one see the long
side of a matrix; those between are small, and for matrices of 64 rows one program does them all. The norm that X₀ is
divided by is applied where G₀ and the result are written, and the weights are moved there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.kernels.adamw import _on_device, adamw_runs_on
from hotloop.kernels.muon import Scalar, muon_apply_eager, muon_gather_eager, newton_schulz_eager
from hotloop.kernels.tables import Tables, beside_capture

__all__ = ["muon_step", "muon_step_eager", "muon_step_takes"]

_SIDE = 64
_MOST_SIDE = 512
# Elements that a program gathers: whole tiles of 64 x 32 are whole blocks.
_BLOCK = 2048
_MOST_BLOCKS = 1024


def muon_step_takes(weight: Tensor, gradient: Tensor, mean: Tensor, dtype: torch.dtype) -> bool:
    """Whether `muon_step` knows such a matrix: wide, of whole tiles of 64 x 32, up to 512 rows, all of it float16.

    Directions are kept unscaled in float16 there, which only float16 gradients are sure to fit. Below 6e-5 they have
    fewer digits; but then so have the means, and from the second update on those decide.
    """
    rows = len(weight)
    columns = weight.numel() // max(rows, 1)
    return (
        dtype == gradient.dtype == mean.dtype == torch.float16
        and rows % _SIDE == 0
        and columns % 32 == 0
        and 0 < rows <= min(columns, _MOST_SIDE)
        and rows * columns <= _BLOCK * _MOST_BLOCKS
        and all(t.data_ptr() % 16 == 0 for t in (weight, gradient, mean))
    )


def muon_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    *,
    lr: Scalar,
    momentum: Scalar,
    weight_decay: Scalar = 0.0,
    nesterov: bool = True,
    eps: float = 1e-7,
    steps: int = 5,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    scales: Sequence[float] | None = None,
    norms: Sequence[float] | None = None,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
    shadows: Sequence[Tensor] | None = None,
    tables: Tables | None = None,
) -> None:
    """One update of weights of any such shapes, in 3 launches for those of 64 rows, and 3 steps + 2 for the rest.

    With u and x as `muon_gather` and `newton_schulz` have them: `w <- w (norm / |w|) (1 - lr wd) - lr scale x`.

    Args:
        weights: float32, bfloat16 or float16, of one dtype; `muon_step_takes` each of them. Changed in place.
        gradients, means: float16, laid out as the weights are; means are changed in place.
        lr, momentum, weight_decay: floats, or 0-d tensors on the device that are read when the launch runs.
        eps: added to the Frobenius norm of a direction.
        steps, coefficients: of the iteration; at least one step.
        scales: one factor for each; None for 1.
        norms: what each weight's Frobenius norm is made before it is moved, unless it is 0; None to leave it.
        coefficient: 0-d float32 on the device that gradients are multiplied by.
        skip: 0-d float32 on the device; if it is not 0, nothing is written.
        shadows: 16-bit copies of the weights that are written too.
        tables: what remembers the tensors' addresses; see `hotloop.kernels.fused_adamw`.
    """
    device = weights[0].device
    if not adamw_runs_on(device):
        muon_step_eager(
            weights, gradients, means, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov,
            eps=eps, steps=steps, coefficients=coefficients, scales=scales, norms=norms, coefficient=coefficient,
            skip=skip, shadows=shadows,
        )  # fmt: skip
        return
    from hotloop.kernels.language import tl
    from hotloop.kernels.programs import gram as programs

    tables = tables or Tables()
    count = len(weights)
    plan = _plan(
        tuple((len(w), w.numel() // len(w)) for w in weights),
        tuple(scales or [1.0] * count),
        tuple(norms or [1.0] * count),
        device,
    )
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    roles = [weights, gradients, means]
    table = tables.table(roles if shadows is None else [*roles, shadows])
    stack = torch.empty(plan.elements, dtype=torch.float16, device=device)
    partials = torch.empty(2, count, plan.blocks, dtype=torch.float32, device=device)
    flag = skip if skip is not None else partials
    size = max(16, 1 << (plan.blocks - 1).bit_length())
    programs.gather[(plan.blocks, count)](
        table.pointers,
        plan.extents,
        stack,
        partials,
        _on_device(momentum, device),
        coefficient if coefficient is not None else partials,
        flag,
        count,
        plan.blocks,
        weight_type=types[weights[0].dtype],
        gradient_type=types[gradients[0].dtype],
        mean_type=types[means[0].dtype],
        has_coefficient=coefficient is not None,
        has_refuse=skip is not None,
        has_norms=norms is not None,
        nesterov=nesterov,
        size=_BLOCK,
        num_warps=8,
    )
    factor = _iterate(plan, stack, partials, eps, steps, coefficients, size)
    programs.finish[(plan.tiles, count)](
        table.pointers,
        plan.extents,
        plan.scales,
        stack,
        partials,
        factor,
        _on_device(lr, device),
        _on_device(weight_decay, device),
        flag,
        eps,
        count,
        plan.blocks,
        weight_type=types[weights[0].dtype],
        shadow_type=types[shadows[0].dtype] if shadows is not None else tl.float32,
        has_shadow=shadows is not None,
        has_refuse=skip is not None,
        has_norms=norms is not None,
        block=_BLOCK,
        partials_size=size,
        side=_SIDE,
        width=plan.width,
        num_warps=4,
    )


def muon_step_eager(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    *,
    lr: Scalar,
    momentum: Scalar,
    weight_decay: Scalar = 0.0,
    nesterov: bool = True,
    eps: float = 1e-7,
    steps: int = 5,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    scales: Sequence[float] | None = None,
    norms: Sequence[float] | None = None,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
    shadows: Sequence[Tensor] | None = None,
) -> None:
    """The twin of `muon_step`, product by product in float32; float64 tensors in float64."""
    for i, (weight, gradient, mean) in enumerate(zip(weights, gradients, means, strict=True)):
        kind = torch.float64 if weight.dtype == torch.float64 else torch.float32
        x = muon_gather_eager(
            [gradient], [mean], momentum=momentum, nesterov=nesterov, eps=eps, dtype=kind,
            coefficient=coefficient, skip=skip,
        )  # fmt: skip
        flat = weight.detach()
        if norms is not None:
            wide = flat.to(kind)
            norm = torch.linalg.vector_norm(wide)
            scaled = wide * torch.where(norm == 0, 1.0, norms[i] / norm)
            flat.copy_(scaled if skip is None else torch.where(skip != 0, wide, scaled))
        muon_apply_eager(
            [weight], newton_schulz_eager(x, steps, coefficients), lr=lr, weight_decay=weight_decay,
            scale=1.0 if scales is None else scales[i], skip=skip,
            shadows=None if shadows is None else [shadows[i]],
        )  # fmt: skip


def _iterate(
    plan: _Plan,
    stack: Tensor,
    partials: Tensor,
    eps: float,
    steps: int,
    coefficients: tuple[float, float, float],
    partials_size: int,
) -> Tensor:
    """What each direction, divided by its norm, is to be multiplied by: float16, as `plan` lays Gram matrices out."""
    from hotloop.kernels.programs import gram as programs

    a, b, c = coefficients
    count = partials.shape[1]
    results = stack.new_empty(5, plan.squares)
    if plan.small:
        programs.iterate_small[(count,)](
            plan.extents, stack, partials, results, eps, a, b, c, count, plan.blocks, steps=steps, block=_BLOCK,
            partials_size=partials_size, side=_SIDE, depth=plan.width, num_warps=4,
        )  # fmt: skip
        return results
    square, power, half, first, second = results.unbind()
    programs.gram[(plan.sides, count)](
        plan.extents, stack, partials, square, eps, count, plan.blocks, block=_BLOCK,
        partials_size=partials_size, side=_SIDE, depth=plan.width, num_warps=4,
    )  # fmt: skip

    def product(
        left: Tensor, rights: list[Tensor], outs: list[Tensor], shares: tuple[float, ...] | None = None
    ) -> None:
        alpha, beta, gamma = shares or (1.0, 0.0, 0.0)
        programs.gram_product[(plan.sides, count, len(rights))](
            plan.extents, left, rights[0], rights[-1], left, outs[0], outs[-1], count, alpha, beta, gamma,
            has_c=shares is not None, side=_SIDE, depth=_SIDE, num_warps=4,
        )  # fmt: skip

    whole, spare = first, second  # the product of all polynomials so far, and where the next one goes
    for i in range(steps):
        last = i + 1 == steps
        polynomial = power if i else whole
        product(square, [square], [polynomial], (c, b, a))
        if last and i:
            product(power, [whole], [spare])
        elif i:
            product(power, [square, whole], [half, spare])
        elif not last:
            product(whole, [square], [half])
        if not last:
            product(half, [polynomial], [square])
        if i:
            whole, spare = spare, whole
    return whole


@dataclass
class _Plan:
    """Where matrices of these shapes lie in buffers of all, and how many programs they take.

    Attributes:
        extents: int64 [4, matrices] on the device; see `hotloop.kernels.programs.gram`.
        scales: float32 [2, matrices] on the device: of updates, and norms of weights.
        elements, squares: of all matrices, and of all their Gram matrices.
        blocks, sides, tiles: of the largest: blocks to gather, tiles of its Gram matrix, tiles of itself.
        width: columns of a tile.
        small: all have 64 rows.
    """

    extents: Tensor
    scales: Tensor
    elements: int
    squares: int
    blocks: int
    sides: int
    tiles: int
    width: int
    small: bool


@functools.cache
def _plan(
    shapes: tuple[tuple[int, int], ...],
    scales: tuple[float, ...],
    norms: tuple[float, ...],
    device: torch.device,
) -> _Plan:
    """Kept for ever, since graphs read what it has on the device."""
    width = 64 if math.gcd(*(columns for _, columns in shapes)) % 64 == 0 else 32
    elements = squares = 0
    with beside_capture(device):
        extents = torch.empty(4, len(shapes), dtype=torch.int64, device=device)
        factors = torch.empty(2, len(shapes), dtype=torch.float32, device=device)
        # kernels take the values along: no host memory is read, and nothing is waited for
        for i, (rows, columns) in enumerate(shapes):
            for place, value in zip(extents[:, i], (rows, columns, elements, squares), strict=True):
                place.fill_(value)
            factors[0, i].fill_(scales[i])
            factors[1, i].fill_(norms[i])
            elements += rows * columns
            squares += rows * rows
    return _Plan(
        extents,
        factors,
        elements,
        squares,
        max(r * c for r, c in shapes) // _BLOCK,
        max((r // _SIDE) ** 2 for r, _ in shapes),
        max((r // _SIDE) * (c // width) for r, c in shapes),
        width,
        all(r == _SIDE for r, _ in shapes),
    )
