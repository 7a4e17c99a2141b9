"""Small first: a schedule of sizes over a run, with batches that grow as samples shrink and rates that follow.

The seeds are fast.ai's DAWNBench entries (2018) and Composer's progressive resizing: images (or contexts) start small,
where a step costs a fraction, and end at full size, at which the network is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hotloop.errors import DataError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hotloop.optim.rate_scheduler import RateScheduler
    from hotloop.optim.rates import Rate

__all__ = ["Resizing", "Stage", "cuts", "refresh_norms", "resize_images"]


# What a point of a run, in epochs, may be short of a border that it is to have reached.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Stage:
    """A stretch of a run at one size.

    Attributes:
        until: where it ends, in epochs from the start of the run; `math.inf` for the last one.
        size: pixels of an image's height, or steps of a window.
        batch_size: samples of a batch on one process.
        rate: what the learning rate is multiplied by.
    """

    until: float
    size: int
    batch_size: int
    rate: float = 1.0


class Resizing:
    """Which size, batch size and rate hold at which point of a run; give it to a `ResidentLoader`.

    Args:
        sizes: (epochs, size) in turn; epochs may be fractions, sizes are whole. After the last one the last size stays.
        batch_size: at the largest size.
        cost: how work grows with size: 2 for images, 1 for sequences. Batches of smaller samples hold
            (largest / size) ** cost times as many samples, and never fewer; 0 keeps the batch size.
        most: no batch is larger than this.
        multiple: larger batches are rounded down to multiples of it (tensor cores like 8 and more).
        rate: "linear" multiplies the rate by what the batch grew by (Goyal et al. 2017), "sqrt" by its root, "none"
            leaves it.

    Raises:
        DataError: a setting out of its range.

    >>> plan = Resizing([(2, 16), (2, 32)], batch_size=64)
    >>> [(s.until, s.size, s.batch_size, s.rate) for s in plan.stages]
    [(2.0, 16, 256, 4.0), (inf, 32, 64, 1.0)]
    """

    def __init__(
        self,
        sizes: Sequence[tuple[float, int]],
        *,
        batch_size: int,
        cost: float = 2.0,
        most: int | None = None,
        multiple: int = 8,
        rate: str = "linear",
    ) -> None:
        if not sizes or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in sizes):
            raise DataError(f"sizes={list(sizes)!r}: give (epochs, size) pairs")
        if any(not 0 < epochs < math.inf or size < 1 or size != int(size) for epochs, size in sizes):
            raise DataError(f"sizes={list(sizes)!r}: give (epochs, size) pairs, both above 0, sizes whole")
        if batch_size < 1 or multiple < 1 or cost < 0:
            raise DataError(
                f"batch_size={batch_size} and multiple={multiple} must be at least 1, cost={cost} at least 0"
            )
        if most is not None and most < batch_size:
            raise DataError(f"most={most} is below batch_size={batch_size}, that of the largest size")
        power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}.get(rate)
        if power is None:
            raise DataError(f"rate={rate!r} is not known; valid values are: linear, sqrt, none")
        sizes = [(float(epochs), int(size)) for epochs, size in sizes]
        largest = max(size for _, size in sizes)
        stages = []
        done = 0.0
        for i, (epochs, size) in enumerate(sizes):
            done += epochs
            wanted = batch_size * (largest / size) ** cost
            batch = min(wanted, most) if most is not None else wanted
            batch = max(int(batch // multiple) * multiple, batch_size) if size != largest else batch_size
            until = float("inf") if i == len(sizes) - 1 else done
            stages.append(Stage(until, size, int(batch), (batch / batch_size) ** power))
        self.stages = tuple(stages)
        self.batch_size = batch_size
        # parts of whole epochs may add up to a rounding error more, and would ask for an epoch more
        self.epochs = float(round(done)) if abs(done - round(done)) < _ROUNDING else done

    @classmethod
    def ramp(
        cls,
        start: int,
        end: int,
        epochs: float,
        *,
        delay: float = 0.4,
        finish: float = 0.2,
        step: int = 4,
        batch_size: int,
        **settings: Any,
    ) -> Resizing:
        """From `start` to `end` in equal steps of `step`: the first `delay` of the epochs at start, the last `finish`
        at end (the shape of Composer's ProgressiveResizing).

        Raises:
            DataError: `start` is not below `end`, or `delay` and `finish` are no shares that leave something between.

        >>> [(s.until, s.size) for s in Resizing.ramp(24, 32, 10, batch_size=8).stages]
        [(4.0, 24), (8.0, 28), (inf, 32)]
        """
        if not 0 < start < end or step < 1:
            raise DataError(
                f"ramp({start}, {end}, step={step}): give 0 < start < end and a step of 1 or more"
            )
        if not (delay > 0.0 and finish > 0.0 and delay + finish < 1.0):
            raise DataError(f"delay={delay} and finish={finish} are shares of the run, together below 1")
        between = list(range(start + step, end, step))
        middle = (1.0 - delay - finish) * epochs
        if not between:
            return cls(
                [(delay * epochs + middle, start), (finish * epochs, end)], batch_size=batch_size, **settings
            )
        pairs = [(delay * epochs, start)]
        pairs += [(middle / len(between), size) for size in between]
        return cls([*pairs, (finish * epochs, end)], batch_size=batch_size, **settings)

    def at(self, epochs: float) -> Stage:
        """The stage at a point of the run, in epochs; at a border the later one."""
        # a batch may end a rounding error before the border that it is to reach
        return next(stage for stage in self.stages if epochs < stage.until - _ROUNDING)

    def batches(self, samples: int, epochs: int | None = None, *, drop_last: bool = False) -> list[Stage]:
        """The stage of every batch of a run over `samples` samples an epoch, in order, on one process.

        What an update's number has to be turned into for rates: `len(plan.batches(n))` updates in all, the k-th one
        on `plan.batches(n)[k].batch_size` samples at `plan.batches(n)[k].rate` times the rate.
        """
        return [stage for _, _, _, stage in self._cuts(samples, epochs, 1, drop_last)]

    def scheduler(
        self,
        optimizer: Optimizer,
        rate: Rate,
        samples: int,
        epochs: int | None = None,
        *,
        world: int = 1,
        drop_last: bool = False,
    ) -> RateScheduler:
        """The torch scheduler of a rate in steps, samples or epochs, times what each batch's size asks for.

        Each step of the loader counts as an update. With accumulation there are fewer: then give a `RateScheduler` the
        `per_step` and `factor` of yours. Where an update is refused, the rate comes an update late from there on.

        Args:
            optimizer: all its groups get the rate.
            rate: such as `one_cycle(0.1, 8, unit="epochs")`; that of a batch of `batch_size`.
            samples: of an epoch, over all processes.
            epochs: how many the run has, whole, by default those of the plan.
            world: how many processes share each step.
            drop_last: whether the loader drops a short last batch.

        Raises:
            DataError: the rate is in tokens, of which the plan knows nothing, the run has no update, or `epochs` is no
                whole number.

        >>> from hotloop.optim import constant
        >>> plan = Resizing([(1, 16), (1, 32)], batch_size=8)
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = plan.scheduler(optimizer, constant(0.1), samples=64)
        >>> rates = []
        >>> for _ in range(4):
        ...     rates.append(scheduler.get_last_lr()[0]); optimizer.step(); scheduler.step()
        >>> rates
        [0.4, 0.4, 0.1, 0.1]
        """
        if rate.unit not in ("steps", "samples", "epochs"):
            raise DataError(f"a rate in {rate.unit}: give one in steps, samples or epochs")
        updates = list(self._cuts(samples, epochs, world, drop_last))
        if not updates:
            raise DataError(f"a run over {samples} samples has no update")
        taken: list[float] = [end - start for _, start, end, _ in updates]
        if rate.unit == "epochs":
            # as the plan counts them: what a loader drops has passed, too
            begins = [epoch + start / samples for epoch, start, _, _ in updates] + [updates[-1][0] + 1.0]
            taken = [after - before for before, after in pairwise(begins)]
        last = len(updates) - 1
        return rate.scheduler(
            optimizer,
            per_step=None if rate.unit == "steps" else lambda k: taken[min(k, last)],
            factor=lambda k: updates[min(k, last)][3].rate,
        )

    def _cuts(
        self, samples: int, epochs: int | None, world: int, drop_last: bool
    ) -> Iterator[tuple[int, int, int, Stage]]:
        """(epoch, and `cuts` of it) of a whole run, by default of the plan's epochs."""
        if epochs is not None and epochs != int(epochs):
            raise DataError(f"epochs={epochs}: a run's loop over a loader has whole epochs")
        for epoch in range(math.ceil(self.epochs) if epochs is None else int(epochs)):
            for cut in cuts(samples, epoch, 0, world, self.at, drop_last=drop_last):
                yield epoch, *cut

    def __repr__(self) -> str:
        return f"Resizing({[(s.until, s.size, s.batch_size, round(s.rate, 4)) for s in self.stages]})"


def cuts(
    samples: int, epoch: int, start: int, world: int, at: Callable[[float], Stage], *, drop_last: bool
) -> Iterable[tuple[int, int, Stage]]:
    """(first sample, one behind the last, stage) of each step of an epoch from sample `start` on, over all ranks."""
    while start < samples:
        stage = at(epoch + start / samples)
        end = min(start + stage.batch_size * world, samples)
        if drop_last and end - start < stage.batch_size * world:
            return
        yield start, end, stage
        start = end


def resize_images(images: torch.Tensor, size: int, *, chunk_bytes: int = 1 << 26) -> torch.Tensor:
    """uint8 images [N, H, W, C] at height `size` (the width in proportion), anti-aliased, rounded to uint8.

    Each value is within half a unit of `torch.nn.functional.interpolate(..., mode="bilinear", antialias=True)` of the
    float images, where float32 products are exact (with tf32 allowed, within 0.7). Rows and columns are two matrix
    products with interpolate's own weights; about `chunk_bytes` of images are in work at a time.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or size < 1:
        raise DataError(
            f"size={size} of images {images.dtype} {list(images.shape)}: give uint8 [N, H, W, C] and 1 or more"
        )
    N, H, W, C = images.shape
    width = max(1, round(W * size / H))
    down = _weights(H, size, images.device)
    across = torch.kron(
        _weights(W, width, images.device), torch.eye(C, dtype=torch.float32, device=images.device)
    )
    out = torch.empty((N, size, width, C), dtype=torch.uint8, device=images.device)
    chunk = max(1, chunk_bytes // (H * W * C))
    for part, into in zip(images.split(chunk), out.split(chunk), strict=True):
        x = part.reshape(-1, W * C).float() @ across.T
        x = down @ x.view(len(part), H, width * C)
        into.copy_(x.round_().clamp_(0, 255).view(into.shape))
    return out


@cache
def _weights(before: int, after: int, device: torch.device) -> torch.Tensor:
    """The matrix [after, before] of an anti-aliased bilinear resize along one side."""
    eye = torch.eye(before, dtype=torch.float32)[None, None]  # resized along its rows alone
    return F.interpolate(eye, (after, before), mode="bilinear", antialias=True, align_corners=False)[0, 0].to(
        device
    )


@torch.no_grad()
def refresh_norms(
    model: nn.Module, batches: Iterable[Any], *, forward: Callable[[Any], Any] | None = None
) -> int:
    """Take the running statistics of all batch norms in `model` anew, as the plain mean over `batches`.

    Another size of images shifts the statistics, and running ones still tell of the old size. The same as torch's
    `swa_utils.update_bn`, but for modules other than these norms, such as dropout, which evaluate. Parameters are not
    changed, nor which modules train.

    Args:
        batches: tensors, or tuples whose first entry is the input.
        forward: what is called with each input; the model itself by default.

    Returns:
        The number of batches used; 0 where the model has no such norm, and then `batches` is not read.

    Raises:
        DataError: there is no batch. The statistics are what they were then, as after any other error.
    """
    norms: list[Any] = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return 0
    modes = [(m, m.training) for m in model.modules()]
    momenta = [m.momentum for m in norms]
    kept = [(b, b.clone()) for m in norms for b in m.buffers(recurse=False)]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # torch's word for the plain mean
    count = 0
    model.eval()
    for m in norms:
        m.training = True
    try:
        for batch in batches:
            (forward or model)(batch[0] if isinstance(batch, (tuple, list)) else batch)
            count += 1
        if not count:
            raise DataError("there is no batch to take the statistics of the norms from")
    except BaseException:
        for buffer, value in kept:
            buffer.copy_(value)
        raise
    finally:
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
        for m, mode in modes:
            m.training = mode
    return count
