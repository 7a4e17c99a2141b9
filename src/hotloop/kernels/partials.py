"""Sums that programs of a launch have left, each its part, added up in one order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["add_partials"]


def add_partials(partials: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Write each of up to three vectors [columns]: its sum over programs.

    Args:
        partials: float32 [programs, len(into), columns], dense.
        into: vectors, each of its own type.
    """
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.rows import sum_partials

    columns = into[0].numel()
    first, second, third = [*into, into[0], into[0]][:3]
    programs = partials.numel() // (columns * len(into))
    sum_partials[(triton.cdiv(columns, 8), len(into))](
        partials, first, second, third, programs, columns, N=len(into), PARTIALS=256, COLUMNS=8, num_warps=8
    )
