"""The nearest semi-orthogonal matrices to a stack of matrices, by matrix products alone.

Newton-Schulz iteration with the quintic of Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural
networks": X <- a X + b (X X^T) X + c (X X^T)^2 X drives every singular value towards 1. Its coefficients are chosen for
speed near 0, so that five steps leave singular values in about [0.7, 1.2], not at 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["QUINTIC", "orthogonalise"]

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(
    matrices: Tensor,
    steps: int = 5,
    *,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """U V^T, approximately, of each matrix U S V^T in a stack; all zeros stay all zeros.

    Args:
        matrices: [..., rows, columns], floating; fewest operations with rows <= columns.
        steps: iterations.
        coefficients: (a, b, c) of the quintic.
        eps: added to the Frobenius norm that every matrix is divided by first.
        dtype: of the products; None for bfloat16 on a CUDA device and that of `matrices` elsewhere.

    Returns:
        [..., rows, columns] in `dtype`.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrices.device.type == "cuda" else matrices.dtype
    rows, columns = matrices.shape[-2:]
    # the smaller Gram matrix has the same singular values
    wide = matrices if rows <= columns else matrices.mT
    lead = wide.shape[:-2]
    wide = wide.reshape(-1, *wide.shape[-2:])
    if wide.dtype in (torch.bfloat16, torch.float16):
        # float16 ends at 65504, and eps is nothing in either
        wide = wide.float()
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    x = (wide / (norms + eps)).to(dtype)
    a, b, c = coefficients
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.reshape(*lead, *x.shape[-2:])
    return x if rows <= columns else x.mT
