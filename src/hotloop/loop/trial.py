"""A stretch of training that leaves no trace: everything prepared is put back as it was, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import DataError
from hotloop.loop.resume import apply_snapshot, take_snapshot
from hotloop.nested import map_tensors

if TYPE_CHECKING:
    from hotloop.loop.loop import Loop

__all__ = ["undone"]


@contextmanager
def undone(loop: Loop) -> Iterator[Callable[[], bool]]:
    """What is prepared and registered is, after the block, as it was before: weights, buffers, optimizers, schedules,
    loaders, random streams, counters, means. It is kept in memory meanwhile; nothing inside is logged.

    Yields:
        What says whether more batches are to come before the next update.

    Raises:
        DataError: a prepared loader is being iterated over, so that its position cannot be put back.
    """
    registry = loop._preparer.registry
    if any(loader.live for loader in registry.loaders) or not loop._window.at_rest:
        raise DataError(
            "a trial cannot begin in the middle of an epoch: begin it before the loop over the batches"
        )
    updates = loop._course.position().updates
    parts: dict[str, Any] = {
        "window": loop._window,
        "state": loop._state,
        "processes": loop.processes,
        "device": loop.device,
        "means": loop._session.means,
    }
    snapshot = take_snapshot(registry, meta={"updates": updates}, **parts)
    # what is taken still shares the memory that training writes to
    kept = copy.copy(snapshot)
    kept.tensors = map_tensors(snapshot.tensors, torch.Tensor.clone)
    kept.objects = _copy(snapshot.objects)
    buffers = [(b, b.clone()) for module in registry.modules for b in module.buffers()]
    modes = [(m, m.training) for module in registry.modules for m in module.modules()]
    write, loop._write_row = loop._write_row, lambda step, values: None
    try:
        yield lambda: loop._window.inside
    finally:
        loop._write_row = write
        apply_snapshot(kept, registry, folder="the state before a trial", **parts)
        # those that no state_dict holds
        for buffer, value in buffers:
            buffer.copy_(value)
        for module, training in modes:
            module.training = training
        loop._faults.restart(updates)


def _copy(value: Any) -> Any:
    """A copy that shares no tensor, list or dict with `value`."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return tuple(map(_copy, value)) if type(value) is tuple else value
