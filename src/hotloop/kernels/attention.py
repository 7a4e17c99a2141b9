"""Self-attention over short sequences with the linear layer before it: gradients of q, k and v leave packed.

Stock backward passes leave three tensors that are packed into one for the linear layer, and the bias's gradient is a
further pass over it; here both happen where the gradients are made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotloop.errors import KernelError
from hotloop.kernels.linear import products_beside

__all__ = ["LONGEST", "self_attention", "self_attention_eager"]

# Queries and keys are read once for each block of rows: beyond a few blocks stock kernels do better.
LONGEST = 512
_DEPTHS = (16, 32, 64, 128)
# Fastest of seven settings on an H200, 64 sequences of 256, 6 heads of 64: 78 us.
_BIG, _SMALL, _WARPS, _STAGES = 64, 32, 4, 1


def self_attention(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of `F.linear(x, weight, bias)`, whose last dimension holds q, k and v, each [heads, depth].

    Args:
        x: [batch, length, width].
        weight: [3 * heads * depth, width]. bias: [3 * heads * depth] or None.
        heads: number of heads.
        causal: a query sees no later key.
        scale: of the products; None: depth ** -0.5.

    Returns:
        [batch, length, heads, depth].
    """
    if x.dim() != 3 or weight.shape[0] % (3 * heads) or weight.shape[1] != x.shape[2]:
        raise KernelError(
            f"self_attention: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit {heads} heads: "
            "[batch, length, width], [3 * heads * depth, width]"
        )
    depth = weight.shape[0] // (3 * heads)
    out: torch.Tensor = _forward(x, weight, bias, heads, causal, depth**-0.5 if scale is None else scale)[0]
    return out


def self_attention_eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """The twin of `self_attention` by torch's own functions; see there."""
    packed = F.linear(x, weight, bias).unflatten(2, (3, heads, -1))
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)


def _by_kernel(x: torch.Tensor, depth: int) -> bool:
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.bfloat16, torch.float16)
        and depth in _DEPTHS
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


@torch.library.custom_op("hotloop::self_attention", mutates_args=())
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, _ = x.shape
    packed = F.linear(x, weight, bias).view(batch, length, 3, heads, -1)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    if not _by_kernel(x, packed.shape[-1]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)
        return out.contiguous(), packed, x.new_empty(0, dtype=torch.float32)
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    lse = result[1].reshape(batch, heads, length)
    return result[0].transpose(1, 2).contiguous(), packed, lse.contiguous()


@_forward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, _ = x.shape
    depth = weight.shape[0] // (3 * heads)
    lse = x.new_empty((batch, heads, length) if _by_kernel(x, depth) else (0,), dtype=torch.float32)
    return x.new_empty(batch, length, heads, depth), x.new_empty(batch, length, 3, heads, depth), lse


@torch.library.custom_op("hotloop::self_attention_backward", mutates_args=())
def _backward(
    slope: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, _, heads, depth = packed.shape
    columns = 3 * heads * depth
    for_bias = x.new_empty(columns if with_bias else 0)
    if not _by_kernel(x, depth):
        packed_slope = _backward_eager(slope, packed, causal, scale)
        if with_bias:
            for_bias.copy_(packed_slope.sum((0, 1)).reshape(columns))
        packed_slope = packed_slope.to(x.dtype)
    else:
        from hotloop.kernels.language import triton
        from hotloop.kernels.partials import add_partials
        from hotloop.kernels.programs.attention import attention_backward

        packed_slope = torch.empty_like(packed)
        blocks = triton.cdiv(length, _BIG)
        partials = torch.empty(batch * blocks, columns, dtype=torch.float32, device=x.device)
        attention_backward[(blocks, batch * heads)](
            packed,
            out,
            slope.contiguous(),
            lse,
            packed_slope,
            partials,
            length,
            heads,
            scale,
            DEPTH=depth,
            BIG=_BIG,
            SMALL=_SMALL,
            CAUSAL=causal,
            EVEN=length % _BIG == 0 and length % _SMALL == 0,
            HAS_BIAS=with_bias,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
        if with_bias:
            add_partials(partials, [for_bias])
    flat, rows = packed_slope.view(batch * length, columns), x.reshape(batch * length, -1)
    for_x, for_weight = products_beside(flat, rows.contiguous(), weight)
    return for_x.view(x.shape), for_weight, for_bias


@_backward.register_fake
def _(
    slope: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        x.new_empty(weight.shape[0] if with_bias else 0),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _, ctx.causal, ctx.scale = inputs
    ctx.with_bias = bias is not None
    ctx.save_for_backward(x, weight, output[1], output[0], output[2])


def _differentiate(ctx: Any, slope: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    for_x, for_weight, for_bias = _backward(slope, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.with_bias)
    return for_x, for_weight, for_bias if ctx.with_bias else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _backward_eager(slope: torch.Tensor, packed: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    kind = torch.float64 if packed.dtype == torch.float64 else torch.float32
    q, k, v = packed.to(kind).permute(2, 0, 3, 1, 4)
    g = slope.to(kind).transpose(1, 2)
    products = q @ k.transpose(-1, -2) * scale
    if causal:
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        products = products.masked_fill(later, float("-inf"))
    weights = products.softmax(-1)
    toward = g @ v.transpose(-1, -2)
    inner = weights * (toward - (toward * weights).sum(-1, keepdim=True))
    slopes = [inner @ k * scale, inner.transpose(-1, -2) @ q * scale, weights.transpose(-1, -2) @ g]
    return torch.stack(slopes).permute(1, 3, 0, 2, 4).contiguous()
