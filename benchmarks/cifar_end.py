"""The end of the CIFAR-10 recipe's network, there and back: global max, linear, softmax, and their gradients."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch

from hotloop.kernels.language import jit, runs_on, tl

__all__ = ["end_and_back", "end_takes"]

_LANES = 16  # classes, filled up to what a product of tiles takes
_IMAGES = 16


def end_takes(x: torch.Tensor, head: torch.Tensor) -> bool:
    """Whether `end_and_back` knows such tensors: 16-bit, a power of two of channels, up to 16 classes and 64 pixels."""
    channels = x.shape[1]
    return (
        runs_on(x.device)
        and x.dtype == head.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and 16 <= channels <= 1024
        and channels & (channels - 1) == 0
        and len(head) <= _LANES
        and x.shape[2] * x.shape[3] <= 64
    )


def end_and_back(
    x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the summed cross-entropy of logits = max over pixels of x, times head, divided by C.

    Args:
        x: [N, C, H, W] in channels_last.
        head: [classes, C].
        targets: [N, classes], shares of classes.

    Returns:
        That of x; and two factors of the head's, [N, 16] and [N, C]: it is the first's first columns, transposed, times
        the second, divided by C.
    """
    n, c, h, w = x.shape
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    largest, slopes = x.new_empty(n, c), x.new_empty(n, _LANES)
    _end[(-(-n // _IMAGES),)](
        x, head, targets.contiguous(), dx, largest, slopes, n, 1 / c, channels=c, classes=len(head), pixels=h * w,
        images=_IMAGES, lanes=_LANES, num_warps=8,
    )  # fmt: skip
    return dx, slopes, largest


@jit
def _end(
    x, head, targets, dx, largest, slopes, samples, share,
    channels: tl.constexpr, classes: tl.constexpr, pixels: tl.constexpr, images: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * images + tl.arange(0, images))[:, None]
    c = tl.arange(0, channels)[None, :]
    k = tl.arange(0, lanes)
    here = n < samples
    first = n.to(tl.int64) * (pixels * channels) + c
    best = tl.load(x + first, mask=here, other=0.0)
    place = tl.zeros(best.shape, tl.int32)
    for p in tl.static_range(1, pixels):
        other = tl.load(x + first + p * channels, mask=here, other=0.0)
        place = tl.where(other > best, p, place)
        # it makes float32 of bfloat16
        best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL).to(other.dtype)
    tl.store(largest + n * channels + c, best, mask=here)
    weights = tl.load(head + k[:, None] * channels + c, mask=(k < classes)[:, None], other=0.0)
    known = (k < classes)[None, :]
    logits = tl.where(known, tl.dot(best, tl.trans(weights)) * share, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    wanted = tl.load(targets + n * classes + k[None, :], mask=here & known, other=0.0).to(tl.float32)
    slope = tl.where(here, powers / tl.sum(powers, 1)[:, None] - wanted, 0.0).to(best.dtype)
    tl.store(slopes + n * lanes + k[None, :], slope, mask=here)
    back = (tl.dot(slope, weights) * share).to(best.dtype)
    zero = tl.zeros(back.shape, back.dtype)
    for p in tl.static_range(0, pixels):
        tl.store(dx + first + p * channels, tl.where(place == p, back, zero), mask=here)
