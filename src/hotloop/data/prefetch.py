"""Batches on their way to the device: copied on a side stream, one or more ahead, handed over in order.

While the device computes with one batch, the copies of the next ones are queued on a stream of their own,
out of page-locked memory. The host never waits: torch's caching host allocator gives a page-locked block
out again only when the copy from it has ended (it asks, it does not wait), and every tensor handed over is
marked as used by the stream that it is handed to, so that its device memory is not given out again before
that stream is done with it, however slow the consumer is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hotloop.data.move import map_tensors, move, move_object, pin_object, pin_tensor
from hotloop.data.step import Step

__all__ = ["DeviceLane", "Lane", "find_lane", "moved_steps", "prefetched_steps"]


class Lane(Protocol):
    """A second stream of a device, and the few things that the prefetch does with it."""

    def side(self) -> AbstractContextManager[Any]:
        """Within the block, work goes to the second stream."""

    def record(self) -> Any:
        """An event after everything queued on the second stream so far."""

    def wait(self, event: Any) -> None:
        """Make the current stream wait for `event`; the host goes on."""

    def keep(self, value: Any) -> None:
        """Mark a tensor, or an object with `record_stream`, as used by the current stream."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, queued on the stream in force without waiting for it."""


class DeviceLane:
    """The `Lane` of a CUDA, ROCm or XPU device."""

    def __init__(self, device: torch.device, pins: bool = True) -> None:
        self.device = device
        self._pins = pins
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device=device)

    def side(self) -> AbstractContextManager[Any]:
        """Within the block, work goes to the second stream."""
        return self._module.stream(self._stream)

    def record(self) -> Any:
        """An event after everything queued on the second stream so far."""
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for `event`; the host goes on."""
        self._module.current_stream(self.device).wait_event(event)

    def keep(self, value: Any) -> None:
        """Mark `value` as used by the current stream."""
        value.record_stream(self._module.current_stream(self.device))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device; from pageable memory by way of page-locked memory."""
        if self._pins:
            tensor = pin_tensor(tensor)
        return tensor.to(self.device, non_blocking=True)


def find_lane(device: torch.device, *, pins: bool = True) -> Lane | None:
    """The lane of `device`, None for a device without streams of its own (CPU, MPS, meta)."""
    return DeviceLane(device, pins) if device.type in ("cuda", "xpu") else None


class _Staged:
    """A step whose copies are queued."""

    __slots__ = ("copies", "event", "late", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self.copies: list[Any] = []
        self.event: Any = None
        self.late = False


def _stage(step: Step, device: torch.device, lane: Lane) -> _Staged:
    staged = _Staged(step)
    copies = staged.copies

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        copied = lane.copy(tensor)
        copies.append(copied)
        return copied

    def change_object(value: Any) -> Any:
        if not hasattr(value, "record_stream"):
            # Its tensors cannot be marked as in use from outside, so it is moved by the consuming stream.
            staged.late = True
            return pin_object(value)
        moved = move_object(pin_object(value), device, non_blocking=True)
        copies.append(moved)
        return moved

    if step.batch is not None:
        with lane.side():
            step.batch = map_tensors(step.batch, change, change_object)
        if copies:
            staged.event = lane.record()
    return staged


def _move_late(batch: Any, device: torch.device) -> Any:
    """`batch` with those objects moved that `_stage` left to the consuming stream."""

    def change_object(value: Any) -> Any:
        return value if hasattr(value, "record_stream") else move_object(value, device, non_blocking=True)

    return map_tensors(batch, lambda tensor: tensor, change_object)


def prefetched_steps(steps: Iterator[Step], device: torch.device, depth: int, lane: Lane) -> Iterator[Step]:
    """`steps` with their batches on `device`; the copies of up to `depth` later ones are queued already.

    A batch whose tensors are on the device comes through as the same object. An error in fetching a later
    batch is raised when its turn comes.
    """
    waiting: deque[_Staged] = deque()
    error: Exception | None = None
    more = True
    while True:
        while more and len(waiting) <= depth:
            try:
                step = next(steps, None)
                if step is None:
                    more = False
                else:
                    waiting.append(_stage(step, device, lane))
            except Exception as failure:
                error, more = failure, False
        if not waiting:
            if error is not None:
                raise error
            return
        staged = waiting.popleft()
        step = staged.step
        if staged.event is not None:
            lane.wait(staged.event)
            for copied in staged.copies:
                lane.keep(copied)
        if staged.late:
            step.batch = _move_late(step.batch, device)
        del staged
        yield step


def moved_steps(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """`steps` with their batches moved to a device that has no streams of its own."""
    for step in steps:
        if step.batch is not None:
            step.batch = move(step.batch, device, non_blocking=True)
        yield step
