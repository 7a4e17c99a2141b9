"""Cells of recurrent networks in plain operators: torch has them fused for devices only, and not for the CPU.

LSTM (Hochreiter & Schmidhuber 1997, with forget gates) in the gate order i, f, g, o, and GRU (Cho et al. 2014) in the
order r, z, n, both with their derivatives. Shapes: gates [batch, 4 or 3 x hidden], states [batch, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CELLS"]

Tensor = torch.Tensor


def _gates(
    inner: Tensor, hidden: Tensor, bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return (
        inner if bias is None else inner + bias,
        hidden if hidden_bias is None else hidden + hidden_bias,
    )


def _lstm(
    inner: Tensor, hidden: Tensor, cx: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    a, b = _gates(inner, hidden, bias, hidden_bias)
    i, f, g, o = (a + b).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = kept.chunk(4, 1)
    t = cy.tanh()
    dh = torch.zeros_like(cy) if grad_hy is None else grad_hy
    dc = dh * o * (1 - t * t) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat(
        [dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)], 1
    )
    return gates, dc * f, gates.sum(0) if has_bias else None


def _gru(
    inner: Tensor, hidden: Tensor, hx: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    a, b = _gates(inner, hidden, bias, hidden_bias)
    ar, az, an = a.chunk(3, 1)
    br, bz, bn = b.chunk(3, 1)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, bn], 1)


def _gru_backward(
    grad_hy: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, n, hx, bn = kept.chunk(5, 1)
    dn = grad_hy * (1 - z) * (1 - n * n)
    dz = grad_hy * (hx - n) * z * (1 - z)
    dr = dn * bn * r * (1 - r)
    inner, hidden = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    sums = (inner.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inner, hidden, grad_hy * z, *sums


# operator of torch -> what it computes
CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}
