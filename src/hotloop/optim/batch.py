"""Tensors that are updated together, and the numbers that steer an update: on the host, or on the device.

A number is a Python number or a 0-d tensor on the device, whichever the param group holds; the formulas are written
once for both. A flag on the device makes every coefficient one that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Batch", "Number", "Refusal", "as_number", "is_dense", "is_tensor", "to_dtype"]

Number: TypeAlias = float | Tensor
"""A setting: a Python number, or a 0-d tensor on the parameters' device."""


# Elements; of each there are four or five tensors.
_CACHED = 2**16


@dataclass(slots=True)
class Batch:
    """Parameters of one group that are updated together: same device, dtypes and step counter.

    Attributes:
        step: updates made so far, float32 0-d; None for rules that do not count.
        refuse: float32 0-d on the device, 1. to change nothing; None if nobody may refuse.
        flag: the same as a bool.
        scale: what the loss, and so the gradients, were multiplied by, float32 0-d; None for 1.
        weights: what is updated: the fp32 masters of 16-bit parameters, or the parameters themselves.
        gradients: as autograd left them.
        state: optimizer state by name, in the same order.
        rounded: the update has written the 16-bit parameters too.
    """

    step: Tensor | None
    refuse: Tensor | None
    flag: Tensor | None
    scale: Tensor | None
    parameters: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    rounded: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether the weights are masters, to be rounded into the parameters."""
        return self.weights[0] is not self.parameters[0]

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.weights[0].device

    @property
    def dtype(self) -> torch.dtype:
        """What the update is computed in."""
        return self.weights[0].dtype

    @property
    def on_host(self) -> bool:
        """Whether every number that steers the update can be read for nothing."""
        return self.refuse is None and self.scale is None and self.device.type == "cpu"

    def gate(self, value: Number, idle: float) -> Number:
        """`value` where the update is made, `idle` where it is refused; in one tiny kernel, for there are many such."""
        if self.refuse is None or self.flag is None:
            return value
        if isinstance(value, Tensor):
            return torch.where(self.flag, idle, value)
        if self.dtype == torch.get_default_dtype():
            return torch.where(self.flag, idle, value)
        refuse = _widen(self.refuse)
        kept = (1.0 - refuse) * value
        return kept if idle == 0.0 else kept + idle * refuse

    def advance(self) -> Tensor:
        """Count this update unless it is refused; returns the counter."""
        assert self.step is not None
        self.step.add_(1.0)
        if self.refuse is not None:
            self.step.sub_(self.refuse)
        return self.step

    def count(self) -> Tensor:
        """Number of this update from 1, 0-d, as wide as the device has it: float32 loses 1 - 0.999."""
        assert self.step is not None
        wide = _widen(self.step)
        # a refused first update leaves 0, and its bias correction must not be 0 / 0
        return wide if self.refuse is None else wide.clamp(min=1.0)

    def pieces(self) -> Iterator[Batch]:
        """Parts that a CPU's cache holds: each operation finds there what the last one wrote; one step in all."""
        first, size = 0, 0
        for i, weight in enumerate(self.weights):
            if size and size + weight.numel() > _CACHED:
                yield self._part(first, i)
                first, size = i, 0
            size += weight.numel()
        yield self._part(first, len(self.weights))

    def _part(self, first: int, end: int) -> Batch:
        if first == 0 and end == len(self.weights):
            return self
        part = slice(first, end)
        return Batch(
            self.step,
            self.refuse,
            self.flag,
            self.scale,
            self.parameters[part],
            self.weights[part],
            self.gradients[part],
            {name: tensors[part] for name, tensors in self.state.items()},
        )

    def is_uniform(self) -> bool:
        """Whether gradients are of one dtype and lie in memory as the weights do: kernels take no others."""
        kind = self.gradients[0].dtype
        return all(
            g.dtype == kind and g.stride() == w.stride() and is_dense(w)
            for g, w in zip(self.gradients, self.weights, strict=True)
        )

    def factor(self, *, maximize: bool = False) -> Tensor | None:
        """What a kernel is to multiply gradients by, 0-d: unscaled, negated to `maximize`; None for 1."""
        factor = None if self.scale is None else self.scale.reciprocal()
        if not maximize:
            return factor
        if factor is None:
            return torch.full((), -1.0, dtype=torch.float32, device=self.device)
        return -factor

    def cast_gradients(self) -> list[Tensor]:
        """Gradients in the weights' dtype and layout; the originals where they are that already."""
        dtype = self.dtype
        if all(g.dtype == dtype for g in self.gradients):
            return self.gradients
        return self._copies()[1]

    def true_gradients(self, *, maximize: bool = False) -> list[Tensor]:
        """Gradients unscaled, all zero where the update is refused, negated to `maximize`; the originals stay."""
        if self.refuse is None and self.scale is None:
            ready = self.cast_gradients()
            return list(torch._foreach_neg(ready)) if maximize else ready
        # one buffer for all: what has no multi-tensor kernel is then one kernel all the same
        flat, ready = self._copies()
        if self.scale is not None:
            flat.div_(self.scale)
        if maximize:
            flat.neg_()
        if self.flag is not None:
            # not a product: NaN times zero would still be NaN
            flat.masked_fill_(self.flag, 0.0)
        return ready

    def _copies(self) -> tuple[Tensor, list[Tensor]]:
        sizes = [w.numel() for w in self.weights]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        views = [
            part.as_strided(w.shape, w.stride()) if is_dense(w) else part.view(w.shape)
            for part, w in zip(flat.split(sizes), self.weights, strict=True)
        ]
        torch._foreach_copy_(views, self.gradients)
        return flat, views


class Refusal:
    """What refuses and unscales one step, on each device that it is asked for."""

    def __init__(self, refuse: Tensor | None, scale: Tensor | None) -> None:
        self._refuse, self._scale = refuse, scale
        self._known: dict[torch.device, tuple[Tensor | None, Tensor | None, Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(refuse, the same as a bool, scale) on `device`."""
        found = self._known.get(device)
        if found is None:
            refuse, scale = (
                None if t is None else t.reshape(()).to(device, non_blocking=True)
                for t in (self._refuse, self._scale)
            )
            found = self._known[device] = (refuse, None if refuse is None else refuse.bool(), scale)
        return found


def is_tensor(*settings: Any) -> bool:
    """Whether any of `settings` is a tensor."""
    return any(isinstance(value, Tensor) for value in settings)


def as_number(setting: Any) -> float:
    """A setting as a Python number; only where reading it waits for nothing."""
    return float(setting)


def to_dtype(value: Number, dtype: torch.dtype) -> Any:
    """A tensor in `dtype`, which multi-tensor kernels insist on; a number as it is."""
    return value.to(dtype) if isinstance(value, Tensor) else value


def _widen(value: Tensor) -> Tensor:
    """A 0-d tensor in float64 where the device has that: settings are not rounded before they are used."""
    return value.double() if value.device.type in ("cpu", "cuda") else value


def is_dense(tensor: Tensor) -> bool:
    """Whether the strides of `tensor` fit memory of just its own size."""
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
