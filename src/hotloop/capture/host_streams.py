"""Random streams of the host: a number drawn from one is a Python value that a recording would repeat for ever."""

from __future__ import annotations

import ast
import inspect
import pickle
import random
import textwrap
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["HostStreams"]

_CURE = (
    "a replay would repeat the number: draw it on the device with torch, or outside and pass it as a tensor"
)
_KINDS = (random.Random, np.random.Generator, np.random.RandomState)


class HostStreams:
    """Where the streams that `function` may draw from stand now.

    They are python's, numpy's, torch's of the CPU (but where that is the device's own) and such objects of theirs that
    the function knows by a name.

    Args:
        function: the step, or a module's forward.
        device: where it runs.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = inspect.unwrap(getattr(function, "__func__", function))
        self._scope = _names_of(self._function)
        self._streams: dict[str, Callable[[], Any]] = {
            "python's random stream": random.getstate,
            "numpy's random stream": np.random.get_state,
        }
        here = device.type == "cpu"
        if not here:
            self._streams["torch's random stream of the CPU"] = lambda: torch.get_rng_state().numpy()
        for name, value in self._scope.items():
            if isinstance(value, np.random.Generator):
                bits = value.bit_generator
                self._streams[f"`{name}` on the host"] = lambda bits=bits: bits.state  # type: ignore[misc]
            elif isinstance(value, np.random.RandomState):
                self._streams[f"`{name}` on the host"] = value.get_state
            elif isinstance(value, random.Random):
                self._streams[f"`{name}` on the host"] = value.getstate
            elif isinstance(value, torch.Generator) and value.device.type == "cpu" and not here:
                self._streams[f"`{name}` on the host"] = lambda value=value: value.get_state().numpy()  # type: ignore[misc]
        self._before = self._look()

    def drawn(self) -> str | None:
        """Which stream has moved since, where, and what to do instead; None if none has."""
        for name, state in self._look().items():
            if state != self._before[name]:
                line = self._line()
                return f"{f'line {line[0]}: {line[1]}()' if line else 'it'} draws from {name}; {_CURE}"
        return None

    def _look(self) -> dict[str, bytes]:
        return {name: pickle.dumps(state()) for name, state in self._streams.items()}

    def _line(self) -> tuple[int, str] | None:
        """The first call in the function's own source that draws: (line, name)."""
        try:
            source, start = inspect.getsourcelines(self._function)
            tree = ast.parse(textwrap.dedent("".join(source)))
        except (OSError, TypeError, SyntaxError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(
                getattr(self._named(node.func), "__self__", None), _KINDS
            ):
                return start + node.lineno - 1, ast.unparse(node.func)
        return None

    def _named(self, node: ast.expr) -> Any:
        """What a dotted name stands for that goes through modules and streams; None if it is something else."""
        if isinstance(node, ast.Name):
            return self._scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._named(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, (types.ModuleType, *_KINDS)) else None
        return None


def _names_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Globals and variables around `function` that it names, and defaults of its arguments, with their values."""
    try:
        names = inspect.getclosurevars(function)
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {**names.globals, **names.nonlocals, **{a.name: a.default for a in arguments}}
