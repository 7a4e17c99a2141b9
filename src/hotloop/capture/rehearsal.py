"""A real step before the recording, watched for what a replay would not repeat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.capture.fingerprint import Fingerprint
from hotloop.capture.host_streams import HostStreams
from hotloop.capture.identities import alike
from hotloop.capture.reasons import is_library
from hotloop.stalls import record_syncs

__all__ = ["Rehearsal", "rehearse"]


@dataclass
class Rehearsal:
    """What came of it.

    Attributes:
        result: what the step returned.
        reason: why it cannot be recorded; None if nothing speaks against it.
        suspect: a wait for the device inside a library, which may do so only while nothing is being recorded: the
            recording will show it.
    """

    result: Any
    reason: str | None = None
    suspect: str | None = None


def rehearse(
    step: Callable[[], Any],
    forwards: AbstractContextManager[None],
    fingerprint: Fingerprint,
    device: torch.device,
    *,
    watched: bool,
) -> Rehearsal:
    """Run `step` while `forwards` is open and see what it does to the things that a recording freezes.

    With `watched` it is seen, too, where the host waits for the device, and whether it draws random numbers itself.
    """
    values, tensors = fingerprint.take(), fingerprint.tensors()
    watch: AbstractContextManager[Any] = record_syncs(device, copies=True) if watched else nullcontext([])
    streams = HostStreams(fingerprint.function, device) if watched else None
    with forwards, watch as waits:
        found = Rehearsal(step())
    if waits and not is_library(waits[0].file):
        found.reason = str(waits[0])
        return found
    found.suspect = str(waits[0]) if waits else None
    if streams is not None and (drawn := streams.drawn()) is not None:
        found.reason = drawn
    elif (now := fingerprint.tensors()) != tensors:
        name = next(n for n in now if now[n] != tensors.get(n))
        found.reason = (
            f"the step replaces the tensor {name}; a replay would not see the new one: write into it"
        )
    elif not alike(after := fingerprint.take(), values):
        changed = fingerprint.difference(values, after)
        found.reason = f"the step changes {changed}; a replay would not repeat that: do it outside the step"
    return found
