"""What a loop does and decided by itself, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hotloop.hardware.processes import Processes
from hotloop.loop.session import Session
from hotloop.settings import Settings

__all__ = ["explain"]


def explain(
    device: torch.device,
    processes: Processes,
    precision: Any,
    settings: Settings,
    accumulation: int,
    float8: Iterable[Any],
    session: Session,
) -> str:
    """A text of a few lines: where it runs, what was set and by what, layers in fp8, and every line said so far."""
    lines = [
        f"device     {device}",
        f"processes  {processes.world} (this is {processes.rank})",
        f"precision  {precision}",
        f"window     {accumulation} micro-batch{'es' if accumulation > 1 else ''} an update",
        f"nonfinite  {settings['nonfinite']}",
    ]
    for layers in float8:
        lines += [f"fp8        {name}" for name in layers.chosen]
        lines += [f"not fp8    {name}: {reason}" for name, reason in layers.kept.items()]
    lines += [
        f"setting    {name} = {settings[name]}, from {source}"
        for name, source in settings.sources.items()
        if source != "default"
    ]
    lines += [f"record     {session.folder}"] if session.folder else []
    return "\n".join(lines + [f"- {note}" for note in session.notes.lines])
