"""The layers of the cold CIFAR-10 run by torch's own kernels, by Triton's, and by those of `cifar_cold.cu`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cifar_cold_kernels import Kernels
from benchmarks.cifar_net import Recipe
from hotloop.kernels.pooled_norm import pooled_norm_silu

__all__ = ["CudaLayers", "TorchLayers", "TritonLayers"]


class TorchLayers:
    """Augmentation with the first layer, and pooling, norm and SiLU, by torch's own kernels."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.ones = torch.ones(max(recipe.widths), device=device)

    def first(
        self,
        images: torch.Tensor,
        index: torch.Tensor,
        moves: torch.Tensor,
        tone: torch.Tensor,
        filters: torch.Tensor,
    ) -> torch.Tensor:
        """silu(conv2d(augmented images[index], filters)).

        Args:
            images: uint8 [N, S, S, 3].
            index: int64 [B].
            moves: int32 [B, 3]: rows down, columns to the right, and 1 for images turned left to right before that.
            tone: float32 [B, 2, 3]: bytes of each channel become x * tone[:, 0] + tone[:, 1].
            filters: [O, 3, 2, 2], channels-last; its dtype is the result's.

        Returns:
            [B, O, S - 1, S - 1], channels-last.
        """
        size = images.shape[1]
        span = torch.arange(size, device=images.device)
        rows, columns = (
            span + moves[:, :1],
            torch.where(moves[:, 2:] > 0, size - 1 - span, span) + moves[:, 1:2],
        )
        rows, columns = _reflect(rows, size), _reflect(columns, size)
        x = images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        x = (x * tone[:, 0, None, None] + tone[:, 1, None, None]).to(filters.dtype)
        return F.silu(F.conv2d(x.permute(0, 3, 1, 2), filters))

    def after(
        self,
        x: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        pool: bool,
        training: bool,
    ) -> torch.Tensor:
        """`hotloop.kernels.pooled_norm.pooled_norm_silu`; rounded to x's dtype after each operation."""
        if pool:
            x = F.max_pool2d(x, 2)
        x = F.batch_norm(
            x, mean, var, self.ones[: len(bias)], bias, training, self.recipe.norm_momentum, 1e-12
        )
        return F.silu(x)


class TritonLayers(TorchLayers):
    """Pooling, norm and SiLU by hotloop's Triton kernels."""

    def after(
        self,
        x: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        pool: bool,
        training: bool,
    ) -> torch.Tensor:
        """See `TorchLayers.after`."""
        momentum = self.recipe.norm_momentum
        return pooled_norm_silu(
            x, bias, mean, var, pool=pool, training=training, momentum=momentum, eps=1e-12
        )


class CudaLayers(TorchLayers):
    """All of them by the kernels of `cifar_cold.cu`."""

    def __init__(self, recipe: Recipe, device: torch.device, kernels: Kernels) -> None:
        super().__init__(recipe, device)
        self.kernels = kernels

    def first(
        self,
        images: torch.Tensor,
        index: torch.Tensor,
        moves: torch.Tensor,
        tone: torch.Tensor,
        filters: torch.Tensor,
    ) -> torch.Tensor:
        """See `TorchLayers.first`; 32 filters, float16."""
        size = images.shape[1]
        shape = (len(index), len(filters), size - 1, size - 1)
        out = torch.empty(shape, device=images.device, dtype=torch.float16, memory_format=torch.channels_last)
        # [O, 2, 2, 3], as the patches lie
        plain = filters.permute(0, 2, 3, 1).float().contiguous()
        grid = (-(-((size - 1) ** 2) // 128), len(index))
        values = (images, index, moves.contiguous(), tone.contiguous(), plain, out, ctypes.c_uint(size))
        self.kernels.launch("filtered", grid, 128, _stream(), *values)
        return out

    def after(
        self,
        x: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        pool: bool,
        training: bool,
    ) -> torch.Tensor:
        """See `TorchLayers.after`."""
        if training:
            made: torch.Tensor = _After.apply(
                x, bias, mean, var, pool, self.recipe.norm_momentum, self.kernels
            )
            return made
        n, c, h, w = x.shape
        size = (h // 2, w // 2) if pool else (h, w)
        out = torch.empty((n, c, *size), device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        pixels = out.numel() // c
        self.kernels.launch(
            "infer_1" if pool else "infer_0", (_blocks(pixels, c, 16), 1), 256, _stream(),
            x, out, mean, var, bias, ctypes.c_float(1e-12), *_numbers(pixels, h, w, c),
        )  # fmt: skip
        return out


class _After(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        pool: bool,
        momentum: float,
        kernels: Kernels,
    ) -> torch.Tensor:
        n, c, h, w = x.shape
        size = (h // 2, w // 2) if pool else (h, w)
        out = torch.empty((n, c, *size), device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        pixels = out.numel() // c
        pooled = torch.empty_like(out) if pool else x
        which = torch.empty(pixels * c // 8 if pool else 1, device=x.device, dtype=torch.int16)
        blocks = _blocks(pixels, c, 4)
        partial = torch.empty((blocks, 2, c), device=x.device)
        statistics = torch.empty((2, c), device=x.device)
        sizes, stream = _numbers(pixels, h, w, c), _stream()
        kernels.launch(
            "pool_and_sum_1" if pool else "pool_and_sum_0", (blocks, 1), 256, stream,
            x, pooled, which, partial, mean, *sizes,
        )  # fmt: skip
        kernels.launch(
            "add_up", (c, 1), 256, stream, partial, statistics, ctypes.c_uint(blocks), ctypes.c_float(pixels),
            mean, var, ctypes.c_float(momentum), ctypes.c_float(1e-12), ctypes.c_uint(c), ctypes.c_int(1),
        )  # fmt: skip
        kernels.launch(
            "scale_and_gate_0", (_blocks(pixels, c, 16), 1), 256, stream,
            pooled, out, statistics[0], statistics[1], bias, ctypes.c_float(1e-12), *sizes,
        )  # fmt: skip
        ctx.save_for_backward(pooled, which, statistics, bias)
        ctx.size, ctx.pool, ctx.kernels = (h, w), pool, kernels
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pooled, which, statistics, bias = ctx.saved_tensors
        (h, w), n, c, kernels, stream = ctx.size, len(pooled), pooled.shape[1], ctx.kernels, _stream()
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        pixels = pooled.numel() // c
        blocks = _blocks(pixels, c, 4)
        partial = torch.empty((blocks, 2, c), device=pooled.device)
        sums = torch.empty((2, c), device=pooled.device)
        kernels.launch(
            "slope_and_sum", (blocks, 1), 256, stream,
            pooled, gradient, statistics, bias, partial, ctypes.c_uint(pixels), ctypes.c_uint(c),
        )  # fmt: skip
        kernels.launch(
            "add_up", (c, 1), 256, stream, partial, sums, ctypes.c_uint(blocks), ctypes.c_float(pixels),
            sums, sums, ctypes.c_float(0), ctypes.c_float(0), ctypes.c_uint(c), ctypes.c_int(0),
        )  # fmt: skip
        dx = torch.empty(
            (n, c, h, w), device=pooled.device, dtype=pooled.dtype, memory_format=torch.channels_last
        )
        windows = n * ((h + 1) // 2) * ((w + 1) // 2) if ctx.pool else pixels
        kernels.launch(
            "slope_and_scatter_1" if ctx.pool else "slope_and_scatter_0",
            (_blocks(windows, c, 16), 1), 256, stream, pooled, gradient, statistics, bias, sums, which, dx,
            ctypes.c_uint(windows), ctypes.c_float(pixels), *_numbers(h, w, c),
        )  # fmt: skip
        return dx, sums[0], None, None, None, None, None


def _blocks(pixels: int, channels: int, turns: int) -> int:
    """Blocks of 256 threads for so many pixels; at most `turns` for each of 132 multiprocessors."""
    return max(min(-(-pixels * channels // 2048), 132 * turns), 1)


def _numbers(*values: int) -> tuple[ctypes.c_uint, ...]:
    return tuple(ctypes.c_uint(v) for v in values)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _reflect(at: torch.Tensor, size: int) -> torch.Tensor:
    at = at.abs()
    return torch.where(at >= size, 2 * (size - 1) - at, at)
