"""Muon as the CIFAR-10 recipe (`benchmarks.cifar_recipe`) uses it, and a check of its kernels."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.cifar_net import Recipe
from hotloop.optim import Muon

__all__ = ["Filters", "muon_agrees"]


class Filters:
    """Muon for filters that keep the norm of a matrix with orthonormal rows: sqrt(outputs)."""

    def __init__(
        self,
        parameters: list[torch.Tensor],
        rate: torch.Tensor,
        momentum: torch.Tensor | float,
        recipe: Recipe,
    ) -> None:
        self.parameters = parameters
        p = parameters[0]
        self.muon = Muon(
            parameters, rate, 0.0, momentum, ns_coefficients=(3.4576, -4.7391, 2.0843),
            ns_steps=recipe.ns_steps, adjust_lr_fn="none", master=False, unit_rows=True,
            ns_dtype=torch.float16 if recipe.dtype == "float16" and p.is_cuda else None,
            fused=recipe.kernels and recipe.muon_kernels and p.is_cuda,
        )  # fmt: skip

    def reset(self) -> None:
        for state in self.muon.state.values():
            for value in state.values():
                value.zero_()

    def step(self) -> None:
        self.muon.step()


def muon_agrees() -> bool:
    """Whether Muon's kernels make here the updates that torch's operations make, within float16's rounding."""
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        parameters: list[torch.Tensor] = [
            nn.Parameter(torch.randn(o, i, 3, 3, device="cuda").half().to(memory_format=torch.channels_last))
            for i, o in ((24, 64), (32, 64), (64, 64), (64, 256), (256, 256))
        ]
        start = [p.detach().float().clone() for p in parameters]
        rate = torch.tensor(0.2, device="cuda")
        filters = Filters(parameters, rate, 0.655, Recipe(muon_kernels=kernels))
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p) * 100
            filters.step()
        found.append([p.detach().float() - s for p, s in zip(parameters, start, strict=True)])
    return all(bool((a - b).norm() < 0.05 * b.norm()) for a, b in zip(*found, strict=True))
