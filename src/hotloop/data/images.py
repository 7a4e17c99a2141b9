"""Images that lie on the device whole, augmented as they are cut into batches."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from hotloop.data.resizing import resize_images
from hotloop.errors import DataError
from hotloop.kernels.augment import Augment, augment, augment_filtered, augment_labelled

__all__ = ["ResidentImages", "whitening_filters"]


class ResidentImages:
    """uint8 images and their labels on the device; batches come augmented, normalised and channels-last.

    Gather, translation, flip, cutout, jitter, normalising and label smoothing are one kernel on a CUDA device, and its
    eager twin elsewhere, with the same bits. Random numbers belong to (seed, epoch, sample).

    Args:
        images: uint8 [N, H, W, C].
        labels: int64 [N], or None.
        how: what is done to each image.
        dtype: of the batches.
        classes: 0 for labels as they are; else targets are float32 [B, classes], 1 - smoothing at the label and
            smoothing / classes more everywhere.
        smoothing: of such targets.
        filters: a first layer that does not learn, [O, C, K, K]: batches are silu(conv2d(images, filters)), of its
            dtype, made by the same kernel. It is read at each batch, and may be changed in place. Needs labels.
        shrink: how a `Resizing` makes images smaller: "resize", or "crop", a window of the image that is shifted as
            far as the image goes. Crops keep the grain of the full image, on which a network without a fixed size
            (with a global pooling) can be judged.
        device: where all of it is moved.
        eager: use the twin on a CUDA device too.

    Raises:
        DataError: images are not uint8 [N, H, W, C], lengths differ, labels are not integers [N], or, where they lie
            on the host, are no classes.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor | None = None,
        how: Augment | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        classes: int = 0,
        smoothing: float = 0.0,
        filters: torch.Tensor | None = None,
        shrink: str = "resize",
        device: torch.device | str | None = None,
        eager: bool = False,
    ) -> None:
        for name, given in (("images", images), ("labels", labels)):
            if given is not None and not isinstance(given, torch.Tensor):
                raise DataError(
                    f"{name} must be a tensor, not a {type(given).__name__}: torch.as_tensor makes one"
                )
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(
                f"images must be uint8 [N, H, W, C], not {images.dtype} {list(images.shape)}; float images go into "
                "ResidentArrays"
            )
        if labels is not None:
            _check_labels(labels, len(images), classes)
        if filters is not None and labels is None:
            raise DataError("a first layer in the loader needs labels")
        if shrink not in ("resize", "crop"):
            raise DataError(f"shrink={shrink!r} is not known; valid values are: resize, crop")
        if smoothing and not classes:
            raise DataError("smoothing needs classes: how many there are")
        if not 0.0 <= smoothing <= 1.0:
            raise DataError(f"smoothing={smoothing} is a share, from 0 to 1")
        where = images.device if device is None else torch.device(device)
        self.images = images.to(where).contiguous()
        self.labels = None if labels is None else labels.to(where, torch.int64)
        self.how = how if how is not None else Augment()
        self.dtype = dtype
        self.classes = classes
        self.smoothing = smoothing
        self.filters = filters
        self.shrink = shrink
        self.eager = eager
        self._sized: dict[int, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the images lie."""
        return self.images.device

    def __len__(self) -> int:
        return len(self.images)

    def seen(self, how: Augment) -> ResidentImages:
        """The same images, treated as `how` says; for test-time views."""
        other = copy.copy(self)
        other.how = how
        return other

    def at_size(self, size: int) -> torch.Tensor:
        """All images at height `size`, anti-aliased, uint8; made once and kept."""
        if size == self.images.shape[1]:
            return self.images
        if size not in self._sized:
            self._sized[size] = resize_images(self.images, size)
        return self._sized[size]

    def cut(
        self, indices: torch.Tensor, epoch: torch.Tensor, seed: int, size: int | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Images [B, C, H, W] (channels-last memory), and their targets if there are labels.

        At another size, shifts and holes shrink in proportion; those of crops do not.
        """
        images, how = self.images, self.how
        if size is not None and size != images.shape[1]:
            if self.shrink == "crop":
                how = replace(
                    how, crop=size, translate=max(how.translate, (min(images.shape[1:3]) - size) // 2)
                )
            else:
                share = size / images.shape[1]
                images = self.at_size(size)
                translate, cutout, crop = (round(v * share) for v in (how.translate, how.cutout, how.crop))
                offset = (round(how.offset[0] * share), round(how.offset[1] * share))
                how = replace(how, translate=translate, cutout=cutout, crop=crop, offset=offset)
        if self.labels is None:
            return augment(images, indices, epoch, how, seed=seed, dtype=self.dtype, eager=self.eager)
        if self.filters is not None:
            return augment_filtered(
                images, self.labels, indices, epoch, how, self.filters, seed=seed, classes=self.classes,
                smoothing=self.smoothing, eager=self.eager,
            )  # fmt: skip
        return augment_labelled(
            images, self.labels, indices, epoch, how, seed=seed, dtype=self.dtype, classes=self.classes,
            smoothing=self.smoothing, eager=self.eager,
        )  # fmt: skip


def _check_labels(labels: torch.Tensor, count: int, classes: int) -> None:
    if labels.is_floating_point() or labels.dim() != 1:
        raise DataError(f"labels must be integers [N], not {labels.dtype} {list(labels.shape)}")
    if len(labels) != count:
        raise DataError(f"{count} images have {len(labels)} labels")
    # those on a device would have to be waited for
    if classes and count and labels.device.type == "cpu":
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or highest >= classes:
            raise DataError(f"labels go from {lowest} to {highest}, but classes={classes}")


@torch.no_grad()
def whitening_filters(
    images: torch.Tensor, how: Augment, *, size: int = 2, eps: float = 5e-4
) -> torch.Tensor:
    """Filters whose outputs are uncorrelated and of one variance: a first layer that need not learn.

    They are the eigenvectors of the covariance of all size x size patches, each over the root of its eigenvalue, and
    then the negatives of them (Page, "How to train your ResNet 8: bag of tricks", 2019). Waits for the device: the
    small eigenproblem is solved on the host.

    Args:
        images: uint8 [n, H, W, C]; a thousand are plenty.
        how: gives mean and deviation to normalise by; shifts and flips are left out.
        eps: added to the eigenvalues.

    Returns:
        float32 [2 * C * size * size, C, size, size] in channels-last memory, eigenvalues rising.
    """
    n, C = len(images), images.shape[3]
    index = torch.arange(n, device=images.device)
    plain = Augment(mean=how.mean, std=how.std)
    x = augment(images, index, torch.zeros_like(index[0]), plain, seed=0)
    # not F.unfold, which launches a kernel for each image
    patches = x.unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, C * size * size)
    values, vectors = torch.linalg.eigh((patches.T @ patches / len(patches)).cpu())
    scaled = (vectors / (values + eps).sqrt()).T.reshape(-1, C, size, size)
    return torch.cat((scaled, -scaled)).to(images.device).contiguous(memory_format=torch.channels_last)
