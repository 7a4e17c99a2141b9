"""The norm of many tensors as one vector, and the factor that clips by it, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotloop.kernels.tables import KINDS, Tables, is_dense

__all__ = ["clip_norm", "clip_norm_eager", "scale_all"]

_SIZE = 4096
_WARPS = 8
# Programs of the launch: enough to fill an H200's 132 multiprocessors four times over.
_MOST_PROGRAMS = 528


def clip_norm(
    tensors: Sequence[torch.Tensor],
    max_norm: float,
    *,
    inverse: torch.Tensor | None = None,
    tables: Tables | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Euclidean norm of all tensors as one vector, and what clips them to `max_norm`: two float32 0-d tensors.

    The factor is min(1, max_norm / (norm + 1e-6)), that of torch's `clip_grad_norm_`. One launch; the sums are added
    in one fixed order, so equal tensors give equal bits. Squares are summed in float32, the sums of programs in
    float64.

    Args:
        tensors: float32, bfloat16 or float16, mixed as they come, dense, on one device.
        max_norm: infinity only measures.
        inverse: 0-d on the device: tensors are to be multiplied by it first (loss scale, token factor); the norm is
            that of the product, and the factor contains it.
        tables: see `fused_adamw`.
    """
    device = tensors[0].device
    from hotloop.kernels.language import runs_on

    if not runs_on(device) or not _known(tensors):
        return clip_norm_eager(tensors, max_norm, inverse=inverse)
    from hotloop.kernels.programs.many import square_sums

    tables = tables or Tables()
    blocks = tables.blocks(tensors, _SIZE)
    if not blocks.count:
        return clip_norm_eager(tensors, max_norm, inverse=inverse)
    table = tables.table([tensors])
    results = torch.empty(2 + _MOST_PROGRAMS, dtype=torch.float32, device=device)
    programs = min(blocks.count, _MOST_PROGRAMS)
    square_sums[(programs,)](
        blocks.extents,
        table.pointers,
        results[2:],
        tables.counter(device),
        results[0],
        results[1],
        inverse if inverse is not None else results,
        blocks.count,
        programs,
        float(max_norm),
        has_inverse=inverse is not None,
        aligned=table.aligned,
        size=_SIZE,
        partials_size=512,
        num_warps=_WARPS,
    )
    return results[0], results[1]


def clip_norm_eager(
    tensors: Sequence[torch.Tensor], max_norm: float, *, inverse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `clip_norm`, for any device and dtype; see there."""
    sums = [t.detach().float().square().sum(dtype=torch.float64) for t in tensors]
    norm = torch.stack(sums).sum().sqrt().float()
    if inverse is not None:
        norm = norm * inverse
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return norm, factor * inverse if inverse is not None else factor


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor, *, tables: Tables | None = None) -> None:
    """Multiply every tensor by `factor` (0-d, on the device), in place, in one launch; torch's foreach elsewhere."""
    if not tensors:
        return
    device = tensors[0].device
    from hotloop.kernels.language import runs_on

    if not runs_on(device) or not _known(tensors):
        torch._foreach_mul_(list(tensors), factor)
        return
    from hotloop.kernels.programs.many import scale

    tables = tables or Tables()
    blocks = tables.blocks(tensors, _SIZE)
    table = tables.table([tensors])
    if blocks.count:
        scale[(blocks.count,)](
            blocks.extents,
            table.pointers,
            factor,
            blocks.count,
            aligned=table.aligned,
            size=_SIZE,
            num_warps=_WARPS,
        )


def _known(tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.dtype in KINDS and is_dense(t) for t in tensors)
