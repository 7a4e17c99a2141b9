"""From one projection to attention: queries and keys normed and rotated, all three in the layout of heads, in one pass.

Between a projection and attention stand a norm over each head (Henry et al. 2020, "Query-Key Normalization"), the
rotation by its position (Su et al. 2021, "RoFormer") and a transposition. Stock kernels make some twenty passes of it,
forwards and back, several of them at a tenth of the memory's speed because heads are short rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotloop.errors import KernelError

__all__ = ["rotary_tables", "split_heads", "split_heads_eager"]

# Elements of one half of the heads that a program works on.
_SIZE = 2048


def rotary_tables(
    times: int, head: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of the angles t / base^(i / (head / 2)): float32 [times, head / 2] each."""
    powers = torch.arange(head // 2, dtype=torch.float64) / (head // 2)
    angles = torch.arange(times, dtype=torch.float64)[:, None] * base**-powers
    return angles.cos().float().to(device), angles.sin().float().to(device)


def split_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    *,
    norm: bool = True,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [B, heads, T, D] for `scaled_dot_product_attention`, out of `qkv` [B, T, 3 * heads * D].

    Each head of queries and keys is divided by the root of its mean square (with `norm`), and its halves (a, b) are
    rotated to (a cos - b sin, b cos + a sin) by the angles of its time. Computed in float32.

    Args:
        qkv: all queries, then all keys, then all values of a token; heads of even size.
        cos, sin: [at least T, D / 2].
        eps: added to the mean square.
    """
    width = qkv.shape[-1]
    if qkv.dim() != 3 or width % (6 * heads):
        raise KernelError(f"split_heads: qkv {tuple(qkv.shape)} is no [B, T, 3 * {heads} * D] with an even D")
    half = width // (6 * heads)
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != half or len(cos) < qkv.shape[1]:
        raise KernelError(
            f"split_heads: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [T, D / 2], here at least "
            f"[{qkv.shape[1]}, {half}]"
        )
    parts = _forward(qkv, cos, sin, heads, norm, eps)
    return parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2)


def split_heads_eager(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    *,
    norm: bool = True,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The twin of `split_heads` by torch's own functions; float64 is computed in float64."""
    q, k, v = _twin(qkv, cos, sin, heads, norm, eps)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _twin(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, norm: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, width = qkv.shape
    kind = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    parts = qkv.reshape(B, T, 3, heads, width // (3 * heads))
    x = parts[:, :, :2].to(kind)
    if norm:
        x = F.rms_norm(x, x.shape[-1:], eps=eps)
    c, s = (t[:T, None, None].to(kind) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    turned = torch.cat((a * c - b * s, b * c + a * s), -1).to(qkv.dtype)
    return turned[:, :, 0].contiguous(), turned[:, :, 1].contiguous(), parts[:, :, 2].contiguous()


def _back(
    for_q: torch.Tensor,
    for_k: torch.Tensor,
    for_v: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    norm: bool,
    eps: float,
) -> torch.Tensor:
    """The gradient of `qkv`, written out: inside an operator there is no autograd."""
    B, T, width = qkv.shape
    kind = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    x = qkv.reshape(B, T, 3, heads, width // (3 * heads))[:, :, :2].to(kind)
    c, s = (t[:T, None, None].to(kind) for t in (cos, sin))
    f, g = torch.stack((for_q, for_k), 2).to(kind).chunk(2, -1)
    slope = torch.cat((f * c + g * s, g * c - f * s), -1)
    if norm:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x * scale
        slope = scale * (slope - x * (slope * x).mean(-1, keepdim=True))
    return torch.cat((slope.to(qkv.dtype), for_v[:, :, None]), 2).reshape(B, T, width)


def _by_kernel(qkv: torch.Tensor) -> bool:
    from hotloop.kernels.language import runs_on

    return runs_on(qkv.device) and qkv.dtype != torch.float64 and qkv.numel() > 0


def _sizes(qkv: torch.Tensor, heads: int) -> dict[str, int]:
    from hotloop.kernels.language import triton

    half = qkv.shape[-1] // (6 * heads)
    columns = triton.next_power_of_2(half)
    return {"HEADS": heads, "HALF": half, "COLUMNS": columns, "ROWS": max(_SIZE // columns, 1)}


@torch.library.custom_op("hotloop::split_heads", mutates_args=())
def _forward(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, norm: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _by_kernel(qkv):
        return _twin(qkv, cos, sin, heads, norm, eps)
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.heads import split_heads as program

    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    B, T, width = qkv.shape
    q, k, v = (qkv.new_empty(B, T, heads, width // (3 * heads)) for _ in range(3))
    sizes = _sizes(qkv, heads)
    n = B * T * heads
    program[(triton.cdiv(n, sizes["ROWS"]), 3)](
        qkv, cos, sin, q, k, v, n, T, eps, NORM=norm, num_warps=4, **sizes
    )
    return q, k, v


@_forward.register_fake
def _(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, norm: bool, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, width = qkv.shape
    head = width // (3 * heads)
    return tuple(qkv.new_empty(B, T, heads, head) for _ in range(3))  # type: ignore[return-value]


@torch.library.custom_op("hotloop::join_heads", mutates_args=())
def _backward(
    for_q: torch.Tensor,
    for_k: torch.Tensor,
    for_v: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    norm: bool,
    eps: float,
) -> torch.Tensor:
    if not _by_kernel(qkv):
        return _back(for_q, for_k, for_v, qkv, cos, sin, heads, norm, eps)
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.heads import join_heads as program

    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    slope = torch.empty_like(qkv)
    sizes = _sizes(qkv, heads)
    n = qkv.shape[0] * qkv.shape[1] * heads
    program[(triton.cdiv(n, sizes["ROWS"]), 3)](
        for_q.contiguous(), for_k.contiguous(), for_v.contiguous(), qkv, cos, sin, slope, n, qkv.shape[1], eps,
        NORM=norm, num_warps=4, **sizes,
    )  # fmt: skip
    return slope


@_backward.register_fake
def _(
    for_q: torch.Tensor,
    for_k: torch.Tensor,
    for_v: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    norm: bool,
    eps: float,
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    qkv, cos, sin, ctx.heads, ctx.norm, ctx.eps = inputs
    ctx.save_for_backward(qkv, cos, sin)


def _differentiate(ctx: Any, for_q: Any, for_k: Any, for_v: Any) -> tuple[Any, ...]:
    qkv, cos, sin = ctx.saved_tensors
    slope = _backward(for_q, for_k, for_v, qkv, cos, sin, ctx.heads, ctx.norm, ctx.eps)
    return slope, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
