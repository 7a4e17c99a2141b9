"""Sums of columns: the gradient of a bias, from the gradient of what it was added to."""

from __future__ import annotations

import torch

__all__ = ["column_sums", "column_sums_eager", "rows_each"]

_PROGRAMS = 1056


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums over the rows of `x` [n, columns], in its type: float32 sums in a fixed order, in two launches."""
    from hotloop.kernels.language import runs_on

    n, columns = x.shape
    if not runs_on(x.device) or x.dtype == torch.float64 or not x.numel():
        return column_sums_eager(x)
    from hotloop.kernels.language import triton
    from hotloop.kernels.partials import add_partials
    from hotloop.kernels.programs import rows as programs

    width = min(128, triton.next_power_of_2(columns))
    tall = max(1, 2048 // width)
    across = triton.cdiv(columns, width)
    each = rows_each(n, across, tall, _PROGRAMS)
    partials = torch.empty(triton.cdiv(n, each), columns, dtype=torch.float32, device=x.device)
    programs.column_sums[(partials.shape[0], across)](
        x.contiguous(), partials, n, each, columns, ROWS=tall, COLUMNS=width, num_warps=4
    )
    sums = x.new_empty(columns)
    add_partials(partials, [sums])
    return sums


def column_sums_eager(x: torch.Tensor) -> torch.Tensor:
    """The twin of `column_sums` by torch's own sum; float64 in float64."""
    return x.sum(0, dtype=x.dtype if x.dtype == torch.float64 else torch.float32).to(x.dtype)


def rows_each(n: int, across: int, tall: int, programs: int) -> int:
    """Rows per program, a multiple of its tile's, so that with `across` programs side by side there are `programs`."""
    wanted = max(1, programs // across)
    return max(tall, -(-n // (wanted * tall)) * tall)
