"""Muon: momentum whose matrices are orthogonalised before they are applied, AdamW for everything else.

Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks"; Liu et al. (2025), "Muon is Scalable
for LLM Training" (weight decay, and an update scaled so that AdamW's learning rate fits).

Matrices of one shape, or its transpose, are one stack: each product is then one kernel, however many layers there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotloop.errors import OptimizerError
from hotloop.optim.adam import adam_state_names, kernels_run_on, update_adam
from hotloop.optim.batch import Batch, Number, is_tensor, to_dtype
from hotloop.optim.beside import run_beside
from hotloop.optim.orthogonal import QUINTIC, orthogonalise
from hotloop.optim.resident import ResidentOptimizer, check_settings

__all__ = ["Muon"]

_ADAMW = ("lr", "betas", "eps", "weight_decay")
_SCALES = ("original", "match_rms_adamw", "none")
# What `fused=None` means for matrices on a CUDA device: the kernels are compiled by the first step that uses them.
_KERNELS_BY_DEFAULT = False
# of one stack: what is held beside it is several times as much
_MOST_ELEMENTS = 2**27


class Muon(ResidentOptimizer):
    """Muon for matrices and convolution kernels, and AdamW for the rest, in one optimizer.

    Pass it `hotloop.optim.split_matrices(model)`, or param groups of your own in which `use_muon` says which rule is
    meant; parameters without that are matrices, as with `torch.optim.Muon`. A kernel [out, in, height, width] counts
    as the matrix [out, in * height * width].

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate of the matrices; a number or a 0-d tensor, as are `weight_decay`, `momentum`, `adamw_lr`,
            `adamw_betas` and `adamw_weight_decay`.
        weight_decay: decoupled decay of the matrices, times lr.
        momentum: decay of the running mean of gradients.
        nesterov: orthogonalise the mean looked ahead by one gradient.
        ns_coefficients: (a, b, c) of the quintic.
        eps: added to the norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: how the update of a matrix [rows, columns] is scaled: "original" by sqrt(max(1, rows / columns)),
            "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), "none" by 1; None is "original".
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: the settings of groups with `use_muon=False`, where they
            are called `lr`, `betas`, `eps` and `weight_decay`.
        ns_dtype: dtype of the products; None for bfloat16 on a CUDA device and the weights' own elsewhere.
        unit_rows: give every matrix [rows, columns] the Frobenius norm of orthonormal rows, sqrt(rows), before each
            of its updates: for weights whose scale a norm takes away.
        maximize: climb instead of descend.
        fused: True for hotloop's kernels on a CUDA device, else torch's products and multi-tensor kernels; for groups
            of AdamW's as there.
        master: keep float32 masters of 16-bit parameters; None (and True) keep them, False does not.

    Raises:
        OptimizerError: a setting out of its range, or a parameter for Muon that is no matrix.
    """

    device_settings: ClassVar[frozenset[str]] = frozenset({"lr", "momentum", "betas", "weight_decay"})

    def __init__(
        self,
        params: Any,
        lr: Number = 2e-2,
        weight_decay: Number = 0.0,
        momentum: Number = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: Number = 3e-4,
        adamw_betas: tuple[Number, Number] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: Number = 0.0,
        ns_dtype: torch.dtype | None = None,
        unit_rows: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        master: bool | None = None,
    ) -> None:
        check_settings("Muon", lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
        check_settings("Muon", lr=adamw_lr, weight_decay=adamw_weight_decay, betas=adamw_betas, eps=adamw_eps)
        if adjust_lr_fn is not None and adjust_lr_fn not in _SCALES:
            raise OptimizerError(
                f"Muon: adjust_lr_fn={adjust_lr_fn!r} is not known; valid: {', '.join(_SCALES)}"
            )
        # what a group of AdamW's is given; kept under names that a scheduler for momentum does not look at
        adamw = {
            "adamw_lr": adamw_lr,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "ns_dtype": ns_dtype,
                "unit_rows": unit_rows,
                "maximize": maximize,
                "fused": fused,
                "master": master,
                **adamw,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: for Muon, unless it says `use_muon=False`.

        Raises:
            OptimizerError: a parameter for Muon has fewer than two dimensions.
        """
        given = dict(param_group)
        given.setdefault("use_muon", True)
        self._complete(given)
        super().add_param_group(given)
        group = self.param_groups[-1]
        wanted = self._settings(group["use_muon"])
        for name in [n for n in group if n in self.defaults and n not in wanted]:
            del group[name]
        if group["use_muon"]:
            for p in group["params"]:
                if p.dim() < 2:
                    self.param_groups.pop()
                    raise OptimizerError(
                        f"Muon: a parameter of shape {tuple(p.shape)} is no matrix; pass "
                        "hotloop.optim.split_matrices(model), or a group with use_muon=False for AdamW"
                    )

    def _settings(self, use_muon: bool) -> dict[str, Any]:
        """The settings that a group has, by name, with their defaults."""
        # torch puts settings of its own among the defaults when a state is loaded
        own = {n: v for n, v in self.defaults.items() if not n.startswith("adamw_") and n != "differentiable"}
        if use_muon:
            return own
        return {n: self.defaults[f"adamw_{n}"] for n in _ADAMW} | {
            n: own[n] for n in ("maximize", "fused", "master")
        }

    def _complete(self, group: dict[str, Any]) -> None:
        for name, value in self._settings(group.setdefault("use_muon", True)).items():
            group.setdefault(name, value)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See `ResidentOptimizer.state_names`."""
        return ("momentum_buffer",) if group["use_muon"] else adam_state_names(group)

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        """See `ResidentOptimizer.update`."""
        if not group["use_muon"]:
            update_adam(batch, group, decoupled=True, tables=self.tables_of)
            return
        if self._kernels_take(batch, group):
            self._update_by_kernels(batch, group)
            return
        if group["unit_rows"]:
            _scale_to_unit_rows(batch, range(len(batch.weights)))
        lr, decay = group["lr"], group["weight_decay"]
        directions = _directions(batch, group)
        if is_tensor(decay) or decay != 0.0:
            torch._foreach_mul_(batch.weights, to_dtype(1 - batch.gate(lr * decay, 0.0), batch.dtype))
        rate = to_dtype(batch.gate(-lr, 0.0), batch.dtype)
        for members in _stacks(directions):
            stack = torch.stack([m.mT if turned else m for _, m, turned in members])
            ready = orthogonalise(
                stack,
                group["ns_steps"],
                coefficients=group["ns_coefficients"],
                eps=group["eps"],
                dtype=group["ns_dtype"],
            ).to(batch.dtype)
            if is_tensor(rate):
                ready = ready * rate
            parts: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
            for (number, matrix, turned), part in zip(members, ready.unbind(), strict=True):
                weights, updates = parts.setdefault(
                    _update_scale(matrix.shape, group["adjust_lr_fn"]), ([], [])
                )
                weight = batch.weights[number]
                weights.append(weight)
                updates.append((part.mT if turned else part).reshape(weight.shape))
            for scale, (weights, updates) in parts.items():
                torch._foreach_add_(weights, updates, alpha=scale if is_tensor(rate) else rate * scale)

    def _kernels_take(self, batch: Batch, group: dict[str, Any]) -> bool:
        """Whether hotloop's kernels run there and know tensors such as these."""
        fused = _KERNELS_BY_DEFAULT if group["fused"] is None else group["fused"]
        if not fused or not kernels_run_on(batch.device):
            return False
        return (
            batch.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and group["ns_dtype"] in (None, torch.bfloat16, torch.float16)
            and all(w.stride(0) * len(w) == w.numel() > 0 for w in batch.weights)
            and batch.is_uniform()
        )

    def _update_by_kernels(self, batch: Batch, group: dict[str, Any]) -> None:
        """Matrices of one shape and layout at a time, all kinds beside each other."""
        from hotloop.kernels.gram import muon_step, muon_step_takes
        from hotloop.kernels.muon import muon_apply, muon_gather, newton_schulz, scalar_on

        lr, momentum, decay = (scalar_on(group[n], batch.device) for n in ("lr", "momentum", "weight_decay"))
        factor = batch.factor(maximize=group["maximize"])
        means = batch.state["momentum_buffer"]
        kind = group["ns_dtype"] or torch.bfloat16
        kinds: dict[tuple[Any, ...], list[int]] = {}
        small: list[int] = []  # of 64 rows, and larger ones that the same kernels take
        large: list[int] = []
        for number, weight in enumerate(batch.weights):
            if group["ns_steps"] > 0 and muon_step_takes(
                weight, batch.gradients[number], means[number], kind
            ):
                (small if len(weight) == 64 else large).append(number)
            else:
                kinds.setdefault((weight.shape, weight.stride()), []).append(number)
        if group["unit_rows"] and kinds:
            _scale_to_unit_rows(batch, [i for members in kinds.values() for i in members])

        def step(members: list[int], part: Any) -> None:
            shapes = [(len(w), w.numel() // len(w)) for w in (batch.weights[i] for i in members)]
            muon_step(
                [batch.weights[i] for i in members],
                [batch.gradients[i] for i in members],
                [means[i] for i in members],
                lr=lr,
                momentum=momentum,
                weight_decay=decay,
                nesterov=group["nesterov"],
                eps=group["eps"],
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                scales=[_update_scale(s, group["adjust_lr_fn"]) for s in shapes],
                norms=[math.sqrt(rows) for rows, _ in shapes] if group["unit_rows"] else None,
                coefficient=factor,
                skip=batch.refuse,
                shadows=[batch.parameters[i] for i in members] if batch.has_masters else None,
                tables=self.tables_of(group, part),
            )

        def update(members: list[int], part: Any) -> None:
            tables = self.tables_of(group, part)
            weights = [batch.weights[i] for i in members]
            rows = len(weights[0])
            ready = muon_gather(
                [batch.gradients[i] for i in members],
                [means[i] for i in members],
                momentum=momentum,
                nesterov=group["nesterov"],
                eps=group["eps"],
                dtype=kind,
                coefficient=factor,
                skip=batch.refuse,
                tables=tables,
            )
            ready = newton_schulz(ready, group["ns_steps"], group["ns_coefficients"])
            muon_apply(
                weights,
                ready,
                lr=lr,
                weight_decay=decay,
                scale=_update_scale((rows, weights[0].numel() // rows), group["adjust_lr_fn"]),
                skip=batch.refuse,
                shadows=[batch.parameters[i] for i in members] if batch.has_masters else None,
                tables=tables,
            )

        works = [
            functools.partial(step, part, name) for name, part in (("small", small), ("large", large)) if part
        ]
        for alike, members in kinds.items():
            most = max(_MOST_ELEMENTS // max(batch.weights[members[0]].numel(), 1), 1)
            for first in range(0, len(members), most):
                works.append(functools.partial(update, members[first : first + most], (alike, first)))
        run_beside(works, batch.device)
        batch.rounded = True


def _directions(batch: Batch, group: dict[str, Any]) -> list[Tensor]:
    """What is to be orthogonalised: the running mean of gradients, or that looked ahead; in the weights' shapes."""
    momentum, means = group["momentum"], batch.state["momentum_buffer"]
    gradients = batch.true_gradients(maximize=group["maximize"])
    if batch.refuse is None and not is_tensor(momentum):
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        return list(torch._foreach_lerp(gradients, means, momentum)) if group["nesterov"] else means
    dtype = batch.dtype
    share = torch._foreach_mul(gradients, to_dtype(1 - momentum, dtype))
    torch._foreach_mul_(means, to_dtype(batch.gate(momentum, 1.0), dtype))
    torch._foreach_add_(means, share)
    if not group["nesterov"]:
        return means
    ahead = torch._foreach_mul(means, to_dtype(momentum, dtype))
    torch._foreach_add_(ahead, share)
    return list(ahead)


def _scale_to_unit_rows(batch: Batch, members: Sequence[int]) -> None:
    """Give weights the norm of orthonormal rows; those of all zeros stay."""
    weights = [batch.weights[i] for i in members]
    norms = torch._foreach_norm(weights)
    factors = torch._foreach_reciprocal(norms)
    torch._foreach_mul_(factors, [math.sqrt(len(w)) for w in weights])
    ready = torch.where(torch.stack(norms) == 0, 1.0, torch.stack(factors))
    torch._foreach_mul_(weights, list(to_dtype(batch.gate(ready, 1.0), batch.dtype).unbind()))


def _stacks(directions: list[Tensor]) -> Iterator[list[tuple[int, Tensor, bool]]]:
    """Matrices to be stacked: (number, [rows, columns], whether to transpose it), of one shape once transposed."""
    found: dict[tuple[int, int], list[tuple[int, Tensor, bool]]] = {}
    for number, direction in enumerate(directions):
        matrix = direction.flatten(1)
        rows, columns = matrix.shape
        turned = rows > columns
        found.setdefault((columns, rows) if turned else (rows, columns), []).append((number, matrix, turned))
    for (rows, columns), members in found.items():
        if rows * columns == 0:
            continue
        most = max(_MOST_ELEMENTS // (rows * columns), 1)
        for first in range(0, len(members), most):
            yield members[first : first + most]


def _update_scale(shape: tuple[int, ...], rule: str | None) -> float:
    rows, columns = shape
    if rule is None or rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0
