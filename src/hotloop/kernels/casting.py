"""Many tensors converted to another type at once, forwards and back: what autocast does weight by weight."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["cast_together"]


def cast_together(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """`tensors`, floating point and of another type, as `dtype`; gradients come back as the originals' types.

    One launch or a few, where autocast makes one or two for each weight and one for each gradient.
    """
    made: list[torch.Tensor] = _forward(tensors, dtype)
    return made


@torch.library.custom_op("hotloop::cast_together", mutates_args=())
def _forward(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    made = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(made, tensors)
    return made


@_forward.register_fake
def _(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.kind = inputs[0][0].dtype


def _differentiate(ctx: Any, slopes: list[torch.Tensor]) -> tuple[Any, ...]:
    return _forward([s.contiguous() for s in slopes], ctx.kind), None


_forward.register_autograd(_differentiate, setup_context=_remember)
