"""A stretch of training that leaves no trace: everything prepared is put back as it was, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotloop.errors import DataError
from hotloop.hardware.processes import Processes
from hotloop.loop.resume import Registry, apply_snapshot, take_snapshot
from hotloop.loop.saving import Position
from hotloop.loop.session import Session
from hotloop.loop.window import Window
from hotloop.nested import map_tensors
from hotloop.state import HostState, ResidentState

__all__ = ["undone"]


@contextmanager
def undone(
    registry: Registry,
    *,
    window: Window,
    state: HostState | ResidentState,
    processes: Processes,
    device: torch.device,
    session: Session,
    position: Position,
    restart: Callable[[int], None],
) -> Iterator[None]:
    """What is prepared and registered is, after the block, as it was before: weights, buffers, optimizers, schedules,
    loaders, random streams, counters, means. It is kept in memory meanwhile.

    Raises:
        DataError: a prepared loader is being iterated over, so that its position cannot be put back.
    """
    if any(loader.live for loader in registry.loaders) or not window.at_rest:
        raise DataError(
            "a trial cannot begin in the middle of an epoch: begin it before the loop over the batches"
        )
    snapshot = take_snapshot(
        registry,
        window=window,
        state=state,
        processes=processes,
        device=device,
        meta={"updates": position.updates},
        means=session.means,
    )
    # what is taken still shares the memory that training writes to
    kept = copy.copy(snapshot)
    kept.tensors = map_tensors(snapshot.tensors, torch.Tensor.clone)
    kept.objects = _copy(snapshot.objects)
    buffers = [(b, b.clone()) for module in registry.modules for b in module.buffers()]
    modes = [(m, m.training) for module in registry.modules for m in module.modules()]
    try:
        yield
    finally:
        apply_snapshot(
            kept,
            registry,
            folder="the state before a trial",
            window=window,
            state=state,
            processes=processes,
            device=device,
            means=session.means,
        )
        # those that no state_dict holds
        for buffer, value in buffers:
            buffer.copy_(value)
        for module, training in modes:
            module.training = training
        restart(position.updates)


def _copy(value: Any) -> Any:
    """A copy that shares no tensor, list or dict with `value`."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return tuple(map(_copy, value)) if type(value) is tuple else value
