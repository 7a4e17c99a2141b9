"""A replay beside the plain step: both from the same state, and what each leaves behind compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.nested import tensors_of

__all__ = ["Kept", "Outcome", "differing", "keep", "outcome_of"]

# The same kernels in the same order give the same bits, except where sums are made in no fixed order (atomics). A value
# frozen by mistake shows in the update as a whole; the bound is on the difference relative to what the step changed.
_BOUND = {torch.float32: 1e-2, torch.float64: 1e-2}
_LOOSE = 5e-2
# A tensor that a step changes by less than this part of itself is compared as if it had changed by so much.
_LEAST_CHANGE = 1e-4


@dataclass
class Kept:
    """Tensors and random streams as they were, to be put back.

    Attributes:
        tensors: the live ones, by name.
        values: copies of them.
        gradients: for each parameter, its gradient's tensor and a copy of it.
    """

    tensors: dict[str, torch.Tensor]
    values: list[torch.Tensor]
    parameters: list[torch.Tensor]
    gradients: list[tuple[torch.Tensor | None, torch.Tensor | None]]
    random: list[tuple[torch.Generator, torch.Tensor]]

    def put_back(self) -> None:
        """Everything as it was."""
        with torch.no_grad():
            if self.values:
                torch._foreach_copy_([t.detach() for t in self.tensors.values()], self.values)
            for p, (gradient, value) in zip(self.parameters, self.gradients, strict=True):
                if gradient is not None and value is not None:
                    gradient.copy_(value)
                p.grad = gradient
        for generator, state in self.random:
            generator.set_state(state)


@dataclass
class Outcome:
    """What a step left behind: copies of tensors, gradients and results, by name."""

    values: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]

    def put(self, kept: Kept) -> None:
        """Make this the state."""
        with torch.no_grad():
            for name, tensor in kept.tensors.items():
                tensor.detach().copy_(self.values[name])
        for p, gradient in zip(kept.parameters, self.gradients, strict=True):
            p.grad = gradient


def keep(
    tensors: dict[str, torch.Tensor],
    parameters: Sequence[torch.Tensor],
    generators: Iterable[torch.Generator],
) -> Kept:
    """Copies of `tensors`, of the gradients of `parameters` and of the states of `generators`."""
    return Kept(
        tensors,
        [t.detach().clone() for t in tensors.values()],
        list(parameters),
        [(p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters],
        [(g, g.get_state()) for g in generators],
    )


def outcome_of(kept: Kept, result: Any) -> Outcome:
    """Copies of what is there after a step that returned `result`."""
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in kept.parameters]
    values = {name: t.detach().clone() for name, t in kept.tensors.items()}
    values |= {f"gradient {i}": g for i, g in enumerate(gradients) if g is not None}
    values |= {f"result {i}": t.detach().clone() for i, t in enumerate(tensors_of(result))}
    return Outcome(values, gradients)


def differing(kept: Kept, plain: Outcome, replayed: Outcome) -> str | None:
    """The value that differs most beyond its bound, and by how much; None if none does. Waits for the device."""
    before = dict(zip(kept.tensors, kept.values, strict=True))
    if plain.values.keys() != replayed.values.keys():
        odd = sorted(plain.values.keys() ^ replayed.values.keys())
        return f"{odd[0]} is there after one of them only"
    names, scores = [], []
    for name, a in plain.values.items():
        b = replayed.values[name]
        if a.shape != b.shape:
            return f"{name} has another shape"
        if a.numel() == 0:
            continue
        names.append(name)
        scores.append(_score(a, b, before.get(name)))
    if not scores:
        return None
    worst = torch.stack(scores)
    value, at = worst.max(0)
    if not value.item() > 1.0:
        return None
    name = names[int(at.item())]
    bound = _BOUND.get(plain.values[name].dtype, _LOOSE)
    return f"{name} differs by {value.item() * bound:.2g} of what the step changes"


def _score(a: torch.Tensor, b: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Difference over its bound, float32 0-d: more than 1 is too much."""
    if not (a.is_floating_point() or a.is_complex()):
        return 2.0 * (a != b).any().float()
    bound = _BOUND.get(a.dtype, _LOOSE)
    odd = (a.isnan() != b.isnan()).any()
    x, y = a.nan_to_num().double(), b.nan_to_num().double()
    size = x.norm()
    change = size if before is None or before.shape != a.shape else (x - before.nan_to_num().double()).norm()
    scale = torch.maximum(change, _LEAST_CHANGE * size).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(odd, 2.0, ((x - y).norm() / (scale * bound))).float()
