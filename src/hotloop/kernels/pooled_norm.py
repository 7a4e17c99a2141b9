"""Max-pool, batch norm and SiLU of channels-last images in two passes over memory each way.

PyTorch runs them as seven kernels that write 8-byte indices and every intermediate. Here the forward pass reads the
large image once (pooling it and adding up the statistics), then the pooled one; the backward pass reads the pooled
one twice and writes the large one once. The eager twin is torch's own operations, equal within rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hotloop.errors import KernelError

__all__ = [
    "PooledNormSiLU",
    "global_max",
    "pooled_norm_silu",
    "pooled_norm_silu_eager",
]


def pooled_norm_silu(
    x: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *,
    pool: bool,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    edge: bool = False,
    eager: bool = False,
) -> torch.Tensor:
    """silu(batch_norm(max_pool2d(x, 2))), the pooling only if `pool`; the norm has a bias and no weight.

    The kernel adds up x less `running_mean` in float32: where that lies very many deviations from the mean, as it may
    in the first steps of large and nearly constant x, the deviation loses digits.

    Args:
        x: [N, C, H, W], float16, bfloat16 or float32; C a multiple of 64 for the kernel.
        bias, running_mean, running_var: float32 [C]; the running ones are updated when `training`.
        momentum: share of the new in the running statistics, as torch has it.
        edge: the result has a row of zeros above and a column of zeros to the left more. A convolution of 3 x 3 without
            padding then has all but the last row and column of the padded one's, which a pooling of odd images drops.
            Not with `pool`.
        eager: use the twin; it is used anyway where Triton runs no programs, for other C, for fewer than two pixels,
            and for gradients in evaluation.

    Returns:
        [N, C, H // 2, W // 2] (or H, W), of x's dtype.
    """
    N, C, H, W = x.shape
    pixels = N * (H // 2) * (W // 2) if pool else N * H * W
    if edge and pool:
        raise KernelError("pooled_norm_silu: edge=True is not for pool=True")
    few = pixels < 2  # torch says what is wrong with them
    if eager or few or C % 64 or not _runs_on(x.device) or (not training and _learns(x, bias)):
        return pooled_norm_silu_eager(
            x, bias, running_mean, running_var, pool=pool, training=training, momentum=momentum, eps=eps,
            edge=edge,
        )  # fmt: skip
    x = x.contiguous(memory_format=torch.channels_last)
    if not training:
        return _infer(x, bias, running_mean, running_var, pool, eps, edge)
    result: torch.Tensor = _PooledNorm.apply(x, bias, running_mean, running_var, pool, momentum, eps, edge)
    return result


def global_max(x: torch.Tensor, *, eager: bool = False) -> torch.Tensor:
    """The largest value of each channel of each image, [N, C, H, W] to [N, C]; the first of equals has the gradient.

    The kernel takes channels-last images of up to 64 pixels; others, and `eager`, are torch's own max-pooling.
    """
    H, W = x.shape[2:]
    if eager or H * W > _MOST_PIXELS or not _runs_on(x.device):
        return F.max_pool2d(x, (H, W)).flatten(1)
    result: torch.Tensor = _GlobalMax.apply(x.contiguous(memory_format=torch.channels_last))
    return result


class PooledNormSiLU(nn.Module):
    """`pooled_norm_silu` as a layer: a batch norm with a bias and no weight, in float32, pooled before, gated after it.

    Args:
        channels: C.
        pool: halve height and width by max-pooling first.
        momentum, eps: as in torch's `BatchNorm2d`.
        eager: use the twin.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(
        self, channels: int, *, pool: bool, momentum: float = 0.1, eps: float = 1e-5, eager: bool = False
    ) -> None:
        super().__init__()
        self.pool, self.momentum, self.eps, self.eager = pool, momentum, eps, eager
        self.bias = nn.Parameter(torch.zeros(channels, dtype=torch.float32))
        self.register_buffer("running_mean", torch.zeros(channels, dtype=torch.float32))
        self.register_buffer("running_var", torch.ones(channels, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero bias, and statistics of nothing seen."""
        self.bias.zero_()
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] to [N, C, H // 2, W // 2] (or H, W)."""
        return pooled_norm_silu(
            x, self.bias, self.running_mean, self.running_var, pool=self.pool, training=self.training,
            momentum=self.momentum, eps=self.eps, eager=self.eager,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Channels and pooling."""
        return f"{len(self.bias)}, pool={self.pool}"


def pooled_norm_silu_eager(
    x: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *,
    pool: bool,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    edge: bool = False,
) -> torch.Tensor:
    """`pooled_norm_silu` in torch's own operations, in float32 after the pooling."""
    pooled = F.max_pool2d(x, 2) if pool else x
    # bias apart: torch 2.11 on CUDA cannot differentiate a norm that has a bias and no weight
    z = F.batch_norm(pooled.float(), running_mean, running_var, None, None, training, momentum, eps)
    out = F.silu(z + bias[:, None, None]).to(x.dtype)
    return F.pad(out, (1, 0, 1, 0)) if edge else out


# Pixels and channels of a tile, and warps; all channels are whole multiples of 64.
_ROWS, _COLUMNS, _WARPS = 64, 64, 8
_BR, _ADD_BC, _ADD_WARPS = 256, 8, 8
_MOST_PIXELS, _BN, _BC = 64, 16, 64


def _share(pixels: int, channels: int, device: torch.device) -> tuple[int, int, int]:
    """(programs, columns of channels, tiles of each program) for sums over pixels: as many as run at once."""
    columns = channels // _COLUMNS
    tiles = -(-pixels // _ROWS)
    turns = -(-tiles // max(min(tiles, _at_once(device) // columns), 1))
    return -(-tiles // turns), columns, turns


@cache
def _at_once(device: torch.device) -> int:
    """Programs that a device runs at once; registers leave room for two on a multiprocessor."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _is_fast(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def _forward(
    x: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    pool: bool,
    momentum: float,
    eps: float,
    edge: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(result, pooled x, which of each window was taken, [mean, 1 / deviation])."""
    from hotloop.kernels.programs import pooled_norm as programs

    N, C, H, W = x.shape
    h, w = (H // 2, W // 2) if pool else (H, W)
    pixels = N * h * w
    rows, columns, turns = _share(pixels, C, x.device)
    shape = (N, C, h + edge, w + edge)
    out = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    pooled = torch.empty_like(out) if pool else x
    which = torch.empty_like(out, dtype=torch.int8) if pool else None
    partial = torch.empty((rows, 2, C), dtype=torch.float32, device=x.device)
    statistics = torch.empty((2, C), dtype=torch.float32, device=x.device)
    programs.pool_and_sum[(rows, columns)](
        x, pooled, out if which is None else which, partial, pixels, running_mean, H, W, C, pool,
        _ROWS, _COLUMNS, turns, num_warps=_WARPS,
    )  # fmt: skip
    programs.add_up[(C // _ADD_BC,)](
        partial, statistics, rows, pixels, running_mean, running_var, momentum, eps,
        C, True, _BR, _ADD_BC, -(-rows // _BR), num_warps=_ADD_WARPS,
    )  # fmt: skip
    pixels = N * (h + edge) * (w + edge)
    programs.scale_and_gate[(-(-pixels // _ROWS), C // _COLUMNS)](
        pooled,
        out,
        statistics,
        bias,
        pixels,
        eps,
        h,
        w,
        C,
        False,
        edge,
        False,
        _is_fast(x),
        _ROWS,
        _COLUMNS,
        num_warps=_WARPS,
    )
    return out, pooled, which, statistics


def _backward(
    gradient: torch.Tensor,
    pooled: torch.Tensor,
    which: torch.Tensor | None,
    statistics: torch.Tensor,
    bias: torch.Tensor,
    size: torch.Size,
    edge: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [N, C, *size] and of the bias."""
    from hotloop.kernels.programs import pooled_norm as programs

    (N, C), (H, W) = pooled.shape[:2], size
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    pixels = pooled.numel() // C
    rows, columns, turns = _share(pixels, C, pooled.device)
    partial = torch.empty((rows, 2, C), dtype=torch.float32, device=pooled.device)
    sums = torch.empty((2, C), dtype=torch.float32, device=pooled.device)
    programs.slope_and_sum[(rows, columns)](
        pooled, gradient, statistics, bias, partial, pixels, *pooled.shape[2:], C, edge, _is_fast(pooled),
        _ROWS, _COLUMNS, turns, num_warps=_WARPS,
    )  # fmt: skip
    programs.add_up[(C // _ADD_BC,)](
        partial, sums, rows, pixels, sums, sums, 0.0, 0.0, C, False, _BR, _ADD_BC, -(-rows // _BR),
        num_warps=_ADD_WARPS,
    )  # fmt: skip
    dx = torch.empty(
        (N, C, H, W), device=pooled.device, dtype=pooled.dtype, memory_format=torch.channels_last
    )
    windows = pixels if which is None else N * ((H + 1) // 2) * ((W + 1) // 2)
    programs.slope_and_scatter[(-(-windows // _ROWS), C // _COLUMNS)](
        pooled, gradient, statistics, bias, sums, pooled if which is None else which, dx, windows, pixels,
        H, W, C, which is not None, edge, _is_fast(pooled), _ROWS, _COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return dx, sums[0]


class _PooledNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        pool: bool,
        momentum: float,
        eps: float,
        edge: bool,
    ) -> torch.Tensor:
        out, *saved = _forward(x, bias, running_mean, running_var, pool, momentum, eps, edge)
        ctx.save_for_backward(*saved, bias)
        ctx.shape, ctx.edge = x.shape, edge
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pooled, which, statistics, bias = ctx.saved_tensors
        dx, own = _backward(gradient, pooled, which, statistics, bias, ctx.shape[2:], ctx.edge)
        return dx, own, None, None, None, None, None, None


class _GlobalMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        from hotloop.kernels.programs import pooled_norm as programs

        N, C, H, W = x.shape
        out = x.new_empty(N, C)
        which = x.new_empty(N, C, dtype=torch.int16)
        programs.take_largest[(-(-N // _BN), -(-C // _BC))](x, out, which, N, C, H * W, _BN, _BC, num_warps=4)
        ctx.save_for_backward(which)
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        from hotloop.kernels.programs import pooled_norm as programs

        (which,) = ctx.saved_tensors
        N, C, H, W = ctx.shape
        dx = torch.empty(
            ctx.shape, device=gradient.device, dtype=gradient.dtype, memory_format=torch.channels_last
        )
        programs.scatter_image[(-(-N // _BN), -(-C // _BC))](
            gradient.contiguous(), which, dx, N, C, H * W, _BN, _BC, num_warps=4
        )
        return dx


def _infer(
    x: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    pool: bool,
    eps: float,
    edge: bool,
) -> torch.Tensor:
    from hotloop.kernels.programs import pooled_norm as programs

    N, C, H, W = x.shape
    h, w = (H // 2, W // 2) if pool else (H, W)
    out = torch.empty(
        (N, C, h + edge, w + edge), device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    pixels = N * (h + edge) * (w + edge)
    statistics = torch.stack((running_mean, running_var))
    programs.scale_and_gate[(-(-pixels // _ROWS), C // _COLUMNS)](
        x,
        out,
        statistics,
        bias,
        pixels,
        eps,
        H,
        W,
        C,
        pool,
        edge,
        True,
        _is_fast(x),
        _ROWS,
        _COLUMNS,
        num_warps=_WARPS,
    )
    return out


def _runs_on(device: torch.device) -> bool:
    from hotloop.kernels.language import runs_on  # loads Triton

    return runs_on(device)


def _learns(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
