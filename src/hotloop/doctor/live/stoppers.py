"""What keeps a step from being recorded and launched as one: waits, effects of Python, shapes that change, optimizers.

A recording of a step holds device work alone. It cannot wait for a value, it repeats no Python, each shape of its
inputs is a recording of its own, and an optimizer whose state is on the host stays outside.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.capture.effects import effects_in
from hotloop.optim.skipping import takes_device_rate

__all__ = ["Stopper", "find_stoppers", "optimizer_stopper"]

# what such names stand for has a form that a recording understands
_KNOWN = frozenset({"loop", "accelerator", "scaler"})


@dataclass(frozen=True)
class Stopper:
    """A line that keeps a step from being captured: `file`, `line` (0 if none), its `text`, and why."""

    file: str
    line: int
    text: str
    why: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}  " if self.line else ""
        return f"{where}{self.why}" + (f"\n    {self.text}" if self.text else "")


def find_stoppers(step: tuple[str, int] | None, waits: Iterable[tuple[str, int, str]]) -> list[Stopper]:
    """Waits inside the step, and effects of Python in its source.

    Args:
        step: file and line of the optimizer's step; the loop or function around it is taken as the step. None: unknown.
        waits: (file, line, what) of the waits that come back in every step, wherever they are.
    """
    found = {(file, line): f"waits for the device: {what}" for file, line, what in waits}
    if step is not None:
        body = _step_around(*step)
        for line, what in effects_in(body, _KNOWN) if body is not None else ():
            found.setdefault((step[0], line), f"{what}: a recording does not repeat that")
    return [
        Stopper(file, line, linecache.getline(file, line).strip(), why)
        for (file, line), why in sorted(found.items())
    ]


def optimizer_stopper(optimizer: Any) -> Stopper | None:
    """Why an optimizer's step cannot be recorded; None if it can be, also if only after `capturable=True`."""
    name = type(optimizer).__name__
    if any("capturable" in group for group in optimizer.param_groups) or takes_device_rate(optimizer):
        return None
    if name == "LBFGS":
        return Stopper("", 0, "", "LBFGS reads the loss at each evaluation: its step is Python")
    why = f"{name} reads its learning rate on the host, and steps after each replay"
    fusible = any("fused" in group for group in optimizer.param_groups)
    return Stopper("", 0, "", f"{why}: fused=True puts it on the device" if fusible else why)


def _step_around(file: str, line: int) -> ast.AST | None:
    """The innermost loop around a line that is in the same function, else that function."""
    try:
        tree = ast.parse(Path(file).read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return None
    around: ast.AST | None = None
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)):
            if not node.lineno <= line <= (node.end_lineno or node.lineno):
                continue
            around = node
    return around
