"""The gradients of an optimizer: collected, measured, and clipped with one factor."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

_DTYPE = operator.attrgetter("dtype")

__all__ = ["as_real_dense", "clip_coefficient", "gradients_of", "total_norm"]


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of `parameters` that have one, as real dense tensors sharing the gradients' memory.

    Sparse gradients give their values (uncoalesced duplicates included: they are summed later, which keeps
    scaling right), complex ones a real view.
    """
    return [as_real_dense(g) for p in parameters if (g := p.grad) is not None]


def as_real_dense(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of one gradient as a real dense tensor that shares its memory."""
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def total_norm(gradients: list[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all gradients as one vector, 0-d, on their device: the value of torch's `get_total_norm`."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, norm_type, dtype=_wide_enough(gradients))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _wide_enough(gradients: list[torch.Tensor]) -> torch.dtype | None:
    """float32 if some are of 16 bits, whose norm would lose most of its digits; None for their own dtype."""
    dtypes = set(map(_DTYPE, gradients))
    return torch.float32 if dtypes & {torch.bfloat16, torch.float16} and torch.float64 not in dtypes else None


def clip_coefficient(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (total + 1e-6)), 0-d: the factor of torch's `clip_grad_norm_`, to the bit."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)
