"""Which layers of a model compute in fp8, and putting that into them, with class, parameters and keys untouched."""

from __future__ import annotations

import fnmatch
import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hotloop.errors import PrecisionError
from hotloop.precision.float8 import MULTIPLE, Float8Numbers
from hotloop.precision.formats import Precision

__all__ = ["Float8Layers", "choose_layers", "install_float8", "remove_float8"]

# Measured on an H200: forward and backward of one compiled layer of 16,384 rows, launches counted, against bf16.
# 2048 -> 8192: 1.25 times as fast, 4096 -> 4096: 1.43; 2048 -> 2048, 1024 -> 4096 and 1024 -> 1024: 0.8 to 0.9.
_LEAST_WIDTH = 2048
_LEAST_WEIGHTS = 2048 * 8192


@dataclass(frozen=True)
class Float8Layers:
    """What became of each Linear layer.

    Attributes:
        chosen: names of those that compute in fp8.
        kept: name -> why it computes in 16 bits.
    """

    chosen: tuple[str, ...]
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        count = len(self.chosen) + len(self.kept)
        if not self.chosen:
            return f"fp8 in none of {count} Linear layers, all compute in 16 bits; loop.explain() says why"
        return (
            f"fp8 in {len(self.chosen)} of {count} Linear layers: {', '.join(_gathered(list(self.chosen)))}"
        )


class _Switch:
    """Says that a layer computes in fp8. Copies and pickles of a layer lose it, and so are plain layers."""

    def __init__(self, numbers: Float8Numbers) -> None:
        self.numbers = numbers

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return (type(None), ())


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    switch: Any = self._hotloop_float8
    if switch is None:
        return F.linear(input, self.weight, self.bias)
    out: torch.Tensor = switch.numbers.linear(input, self.weight, self.bias)
    return out


# a bound method is pickled by name: what is unpickled finds the class's own
_forward.__name__ = "forward"


def choose_layers(model: nn.Module, layers: str | tuple[str, ...] = "measured") -> Float8Layers:
    """Which Linear layers of `model` compute in fp8.

    Args:
        model: any module.
        layers: "measured", "all" or patterns, as in `Precision`.

    Raises:
        PrecisionError: a pattern fits no Linear layer, or one that cannot compute in fp8.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                uses[id(p)] = uses.get(id(p), 0) + 1
    last = next(reversed(linears), None)
    chosen: list[str] = []
    kept: dict[str, str] = {}
    asked = layers if isinstance(layers, tuple) else ()
    for pattern in asked:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in linears):
            raise PrecisionError(
                f"layers={pattern!r} fits no Linear layer; there are: {', '.join(_gathered(list(linears))) or 'none'}"
            )
    for name, linear in linears.items():
        named = any(fnmatch.fnmatchcase(name, pattern) for pattern in asked)
        reason = _why_not(linear)
        if asked and not named:
            reason = "not named"
        elif named and reason:
            raise PrecisionError(f"layer {name!r} cannot compute in fp8: {reason}")
        elif not reason and layers == "measured":
            reason = _why_slow(linear)
            if not reason and name == last and not any(part.isdigit() for part in name.split(".")):
                reason = "the model's output"
            if not reason and uses.get(id(linear._parameters.get("weight")), 1) > 1:
                reason = "its weight is shared with another layer"
        if reason:
            kept[name] = reason
        else:
            chosen.append(name)
    return Float8Layers(tuple(chosen), kept)


def install_float8(model: nn.Module, precision: Precision) -> Float8Layers:
    """Let layers of `model` compute in fp8; returns which, and why not the others.

    Raises:
        PrecisionError: as `choose_layers`.
    """
    found = choose_layers(model, precision.layers or "measured")
    numbers = Float8Numbers(
        precision.gradients or "e5m2", rowwise=precision.scaling == "rowwise", emulated=precision.emulated
    )
    for name in found.chosen:
        layer: Any = model.get_submodule(name)
        layer._hotloop_float8 = _Switch(numbers)
        layer.forward = types.MethodType(_forward, layer)
    return found


def remove_float8(model: nn.Module) -> None:
    """Make all layers of `model` plain again."""
    for module in model.modules():
        if module.__dict__.pop("_hotloop_float8", None) is not None:
            module.__dict__.pop("forward", None)


def _why_not(linear: nn.Linear) -> str:
    """Why this layer cannot compute in fp8; empty if it can."""
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"{linear.in_features} -> {linear.out_features} is not in multiples of {MULTIPLE}"
    if type(linear).forward is not nn.Linear.forward or "forward" in linear.__dict__:
        return "it has a forward of its own"
    if type(linear).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention does not call it"
    return ""


def _why_slow(linear: nn.Linear) -> str:
    """Why this layer would gain nothing; empty if it gains."""
    least, weights = min(linear.in_features, linear.out_features), linear.in_features * linear.out_features
    if least < _LEAST_WIDTH or weights < _LEAST_WEIGHTS:
        return f"{linear.in_features} -> {linear.out_features} is too small to gain"
    return ""


def _gathered(names: list[str]) -> list[str]:
    """Names with numbers replaced by "*", each once, with how many there are of it."""
    counts: dict[str, int] = {}
    for name in names:
        shape = ".".join("*" if part.isdigit() else part for part in name.split("."))
        counts[shape] = counts.get(shape, 0) + 1
    return [f"{shape} ({n})" if n > 1 else shape for shape, n in counts.items()]
