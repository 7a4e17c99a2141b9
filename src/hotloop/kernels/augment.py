"""Images of a resident set to a training batch in one pass: gather, translate, flip, jitter, cut out, normalise.

The Triton kernel reads each source byte once and writes each output once; its eager twin is written with torch
alone and gives the same bits. Random numbers are Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011) of (seed; index, epoch): they belong to the sample, not to its place in a batch, so batch size,
number of processes and a resume change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from hotloop.errors import KernelError

__all__ = [
    "Augment",
    "augment",
    "augment_eager",
    "augment_filtered",
    "augment_labelled",
    "philox",
    "targets_eager",
]

_MASK = 0xFFFFFFFF
_FLIPS = ("none", "random", "alternating")
_PADDINGS = ("reflect", "zero")
_BLOCK, _PIXELS = 1024, 128


@dataclass(frozen=True)
class Augment:
    """What is done to an image of a resident set; the default only normalises.

    Attributes:
        translate: shift by up to so many pixels each way, uniformly.
        padding: what comes in at the border: "reflect" (without the edge itself) or "zero" (after normalising).
        flip: "none", "random" (a fair coin each epoch) or "alternating" (a fair coin in epoch 0, then the other
            way every epoch; Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024).
        cutout: side of a square set to zero after normalising, its centre uniform over the image; 0 for none
            (DeVries and Taylor 2017).
        brightness, contrast: x becomes (x + b) * c with b in ±brightness and c in 1 ± contrast, after normalising.
        offset, mirror: a fixed view for every image: moved by so many pixels (down, right), and turned left to right
            before that; for test-time augmentation.
        crop: side of the square that is cut out, from the middle before it is shifted; 0 for the whole image. Shifted
            by up to half of what it is smaller, it never leaves the image.
        mean, std: of each channel, in units of the stored values over 255; one entry stands for all channels.

    Raises:
        KernelError: an unknown word, a negative count, or a deviation that is not above 0.
    """

    translate: int = 0
    padding: str = "reflect"
    flip: str = "none"
    cutout: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    offset: tuple[int, int] = (0, 0)
    mirror: bool = False
    crop: int = 0

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            # lists, arrays and tensors compare and hash in ways of their own
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        for name, known in (("padding", _PADDINGS), ("flip", _FLIPS)):
            if getattr(self, name) not in known:
                raise KernelError(
                    f"{name}={getattr(self, name)!r} is not known; valid values are: {', '.join(known)}"
                )
        if min(self.translate, self.cutout, self.crop) < 0:
            raise KernelError(
                f"translate={self.translate}, cutout={self.cutout} and crop={self.crop} are counts of pixels"
            )
        if not all(value > 0 for value in self.std):
            raise KernelError(f"std={self.std} must be above 0: images are divided by it")


def philox(seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: int, c3: int = 0) -> list[torch.Tensor]:
    """Four 32-bit words of Philox-4x32-10 under the 64-bit key `seed` at counter (c0, c1, c2, c3), as int64.

    Args:
        c0, c1: int64 of one shape; their low 32 bits count.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    x0, x1 = c0 & _MASK, (c1 & _MASK).expand_as(c0)
    x2, x3 = torch.full_like(x0, c2), torch.full_like(x0, c3)
    for _ in range(10):
        # the products wrap around 64 bits, which leaves their bits as they are; the shift's sign bits are masked
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            (((p1 >> 32) & _MASK) ^ x1) ^ k0,
            p1 & _MASK,
            (((p0 >> 32) & _MASK) ^ x3) ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [x0, x1, x2, x3]


def augment(
    images: torch.Tensor,
    indices: torch.Tensor,
    epoch: torch.Tensor,
    how: Augment,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    eager: bool = False,
) -> torch.Tensor:
    """The batch `images[indices]`, augmented as in `epoch`.

    Args:
        images: uint8 [N, H, W, C], contiguous.
        indices: int64 [B] on the same device.
        epoch: int64, 0-d or [B], on the same device: read there, so that a captured step need not be recorded anew.
        seed: 64-bit key of the random numbers.
        dtype: of the result; arithmetic is float32.
        eager: use the twin; it is used anyway where Triton runs no programs.

    Returns:
        [B, C, H, W] (or the crop's height and width) in channels-last memory.
    """
    if eager or not _runs_on(images.device):
        return augment_eager(images, indices, epoch, how, seed=seed, dtype=dtype)
    return _launch(images, None, indices, epoch, how, None, seed, dtype, 0, 0.0)[0]


def augment_labelled(
    images: torch.Tensor,
    labels: torch.Tensor,
    indices: torch.Tensor,
    epoch: torch.Tensor,
    how: Augment,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    classes: int = 0,
    smoothing: float = 0.0,
    eager: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`augment`, and the targets of the batch by the same kernel.

    Args:
        labels: int64 [N].
        classes: 0 for targets that are `labels[indices]`; else they are float32 [B, classes], 1 - smoothing at the
            label and smoothing / classes more everywhere (Szegedy et al. 2016).
    """
    if eager or not _runs_on(images.device):
        x = augment_eager(images, indices, epoch, how, seed=seed, dtype=dtype)
        return x, targets_eager(labels, indices, classes, smoothing)
    return _launch(images, labels, indices, epoch, how, None, seed, dtype, classes, smoothing)


def augment_filtered(
    images: torch.Tensor,
    labels: torch.Tensor,
    indices: torch.Tensor,
    epoch: torch.Tensor,
    how: Augment,
    filters: torch.Tensor,
    *,
    seed: int,
    classes: int = 0,
    smoothing: float = 0.0,
    edge: bool = False,
    eager: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Augmented images through a fixed first layer, silu(conv2d(x, filters)), and their targets.

    A first layer that does not learn (a whitening one) is a part of how a batch is made: its input is never written.

    Args:
        filters: [O, C, K, K] in channels-last memory; images are rounded to its dtype before it, sums are float32.
        edge: the result has a row of zeros above and a column of zeros to the left more; see
            `hotloop.kernels.pooled_norm.pooled_norm_silu`.

    Returns:
        [B, O, H - K + 1, W - K + 1] (each one more with `edge`) of the filters' dtype in channels-last memory, and
        targets as `augment_labelled`.
    """
    if eager or not _runs_on(images.device):
        x = augment_eager(images, indices, epoch, how, seed=seed, dtype=filters.dtype)
        x = F.silu(F.conv2d(x, filters))
        if edge:
            x = F.pad(x, (1, 0, 1, 0))
        return x.contiguous(memory_format=torch.channels_last), targets_eager(
            labels, indices, classes, smoothing
        )
    return _launch(
        images, labels, indices, epoch, how, filters, seed, filters.dtype, classes, smoothing, edge
    )


def targets_eager(
    labels: torch.Tensor, indices: torch.Tensor, classes: int, smoothing: float
) -> torch.Tensor:
    """The targets of `augment_labelled` in torch's own operations."""
    y = labels.index_select(0, indices)
    if not classes:
        return y
    off, on = _levels(classes, smoothing)
    hot = y[:, None] == torch.arange(classes, device=y.device)
    return torch.full(hot.shape, off, dtype=torch.float32, device=y.device).masked_fill_(hot, on)


def _levels(classes: int, smoothing: float) -> tuple[float, float]:
    """Target of the other classes and of the right one."""
    return smoothing / classes, 1 - smoothing + smoothing / classes


def _launch(
    images: torch.Tensor,
    labels: torch.Tensor | None,
    indices: torch.Tensor,
    epoch: torch.Tensor,
    how: Augment,
    filters: torch.Tensor | None,
    seed: int,
    dtype: torch.dtype,
    classes: int,
    smoothing: float,
    edge: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    from hotloop.kernels.programs.augment import augment_kernel, filtered_kernel

    B, (_, H, W, C) = len(indices), images.shape
    height, width = _cut(how, H, W)
    device = images.device
    if classes:
        targets = torch.empty((B, classes), dtype=torch.float32, device=device)
    else:
        targets = torch.empty((B if labels is not None else 0,), device=device, dtype=torch.int64)
    scale, shift = _affine(how, C, device)
    off, on = _levels(classes, smoothing) if classes else (0.0, 0.0)
    known = indices if labels is None else labels
    numbers = (seed, off, on, how.brightness, how.contrast)
    kinds = (
        H, W, C, height, width, *how.offset, how.mirror, how.translate, _FLIPS.index(how.flip), how.cutout,
        how.padding == "zero", bool(how.brightness or how.contrast), epoch.dim(), labels is not None, classes,
        _power(classes) if classes else 0,
    )  # fmt: skip
    # no fused multiply-add: the twin rounds after each operation
    if filters is None:
        out = torch.empty((B, height, width, C), device=device, dtype=dtype)
        augment_kernel[(B, -(-(height * width * C) // _BLOCK))](
            images,
            indices,
            epoch,
            scale,
            shift,
            out,
            known,
            targets,
            *numbers,
            *kinds,
            _BLOCK,
            enable_fp_fusion=False,
        )
        return out.permute(0, 3, 1, 2), targets
    filters = filters.contiguous(memory_format=torch.channels_last)
    n_out, K = len(filters), filters.shape[-1]
    h, w = height - K + 1 + edge, width - K + 1 + edge
    out = torch.empty((B, h, w, n_out), device=device, dtype=dtype)
    filtered_kernel[(B, -(-(h * w) // _PIXELS))](
        images, indices, epoch, scale, shift, out, known, targets, filters, *numbers, *kinds,
        K, int(edge), n_out, max(_power(C * K * K), 16), max(_power(n_out), 16), _PIXELS,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2), targets


def _power(n: int) -> int:
    """The power of two that is n or the next above."""
    return 1 << (n - 1).bit_length()


def augment_eager(
    images: torch.Tensor,
    indices: torch.Tensor,
    epoch: torch.Tensor,
    how: Augment,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`augment` in torch's own operations, on any device, to the bit."""
    B, (_, H, W, C) = len(indices), images.shape
    h, w = _cut(how, H, W)
    device = images.device
    t = how.translate
    rows, columns = torch.arange(h, device=device).expand(B, h), torch.arange(w, device=device).expand(B, w)
    place = philox(seed, indices, epoch, 0)
    if how.mirror:
        columns = w - 1 - columns
    if how.flip != "none":
        alternating = how.flip == "alternating"
        coin = philox(seed, indices, epoch * 0 if alternating else epoch, 2)[0]
        flipped = ((coin + epoch if alternating else coin) & 1).bool()[:, None]
        columns = torch.where(flipped, w - 1 - columns, columns)
    inside = None
    rows, columns = rows + ((H - h) // 2 + how.offset[0]), columns + ((W - w) // 2 + how.offset[1])
    if t:
        rows = rows + _below(place[0], 2 * t + 1)[:, None] - t
        columns = columns + _below(place[1], 2 * t + 1)[:, None] - t
    if how.padding == "zero":
        inside = ((rows >= 0) & (rows < H))[:, :, None] & ((columns >= 0) & (columns < W))[:, None, :]
    rows, columns = _reflect(rows, H), _reflect(columns, W)
    x = images[indices[:, None, None], rows[:, :, None], columns[:, None, :]].float()
    scale, shift = _affine(how, C, device)
    x = x * scale - shift
    if how.brightness or how.contrast:
        tone = philox(seed, indices, epoch, 1)
        x = (x + _around(tone[0], how.brightness)[:, None, None, None]) * (
            1 + _around(tone[1], how.contrast)[:, None, None, None]
        )
    if inside is not None:
        x = torch.where(inside[..., None], x, 0.0)
    if how.cutout:
        top = (_below(place[2], h) - how.cutout // 2)[:, None]
        left = (_below(place[3], w) - how.cutout // 2)[:, None]
        y, z = torch.arange(h, device=device)[None], torch.arange(w, device=device)[None]
        hole = ((y >= top) & (y < top + how.cutout))[:, :, None] & ((z >= left) & (z < left + how.cutout))[
            :, None
        ]
        x = torch.where(hole[..., None], 0.0, x)
    return x.to(dtype).permute(0, 3, 1, 2)


def _cut(how: Augment, height: int, width: int) -> tuple[int, int]:
    """Height and width of what is cut out."""
    if how.crop > min(height, width):
        raise KernelError(f"a square of {how.crop} pixels cannot be cut out of images of {height} x {width}")
    h, w = (how.crop, how.crop) if how.crop else (height, width)
    for size, cut, moved in ((height, h, how.offset[0]), (width, w, how.offset[1])):
        # behind the reflection of the whole image there is nothing to show
        first = (size - cut) // 2 + moved
        if first - how.translate < -2 * (size - 1) or first + how.translate + cut - 1 > 2 * (size - 1):
            raise KernelError(
                f"images of {height} x {width} are too small for translate={how.translate} and offset={how.offset}: "
                "they may be moved by less than a side"
            )
    return h, w


def _below(word: torch.Tensor, n: int) -> torch.Tensor:
    """A 32-bit word mapped to 0..n-1 (Lemire 2019, without the rejection: bias below n / 2^32)."""
    return (word * n) >> 32


def _around(word: torch.Tensor, reach: float) -> torch.Tensor:
    """A 32-bit word mapped to ±reach in float32."""
    return ((word >> 8).float() * (2.0**-23) - 1.0) * reach


def _reflect(at: torch.Tensor, size: int) -> torch.Tensor:
    at = at.abs()
    return torch.where(at >= size, 2 * (size - 1) - at, at)


@cache
def _affine(how: Augment, channels: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [C] each: stored value * scale - shift is the normalised one."""
    mean, std = (v * channels if len(v) == 1 else v for v in (how.mean, how.std))
    if len(mean) != channels or len(std) != channels:
        raise KernelError(f"images of {channels} channels have {len(mean)} means and {len(std)} deviations")
    scale = [1 / (255 * s) for s in std]
    shift = [m / s for m, s in zip(mean, std, strict=True)]
    return (
        torch.tensor(scale, dtype=torch.float32, device=device),
        torch.tensor(shift, dtype=torch.float32, device=device),
    )


def _runs_on(device: torch.device) -> bool:
    from hotloop.kernels.language import runs_on  # loads Triton

    return runs_on(device)
