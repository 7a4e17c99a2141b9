"""Muon as the CIFAR-10 recipe (`benchmarks.cifar_recipe`) uses it."""

from __future__ import annotations

import torch

from benchmarks.cifar_net import COEFFICIENTS, Recipe
from hotloop.optim import Muon

__all__ = ["Filters"]


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
            parameters, rate, 0.0, momentum, ns_coefficients=COEFFICIENTS,
            ns_steps=recipe.ns_steps, adjust_lr_fn="none", master=False, unit_rows=True,
            ns_dtype=torch.float16 if recipe.dtype == "float16" and p.is_cuda else None,
            fused=recipe.kernels and p.is_cuda,
        )  # fmt: skip

    def reset(self) -> None:
        for state in self.muon.state.values():
            for value in state.values():
                value.zero_()

    def step(self) -> None:
        self.muon.step()
