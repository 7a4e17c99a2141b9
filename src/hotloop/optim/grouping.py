"""Which parameters are treated alike: decayed or not, orthogonalised or not. Each ends up in exactly one group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from hotloop.errors import OptimizerError

__all__ = ["no_decay", "split_matrices"]

_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LINEAR = (nn.Linear,)


def no_decay(model: nn.Module, weight_decay: float = 1e-2, **settings: Any) -> list[dict[str, Any]]:
    """Param groups in which biases, gains of norms and embeddings are not decayed.

    A parameter is decayed if it has two dimensions or more and no module that holds it is a norm (of torch, or with
    "norm" in its class's name) or an embedding; one that is shared, as an output layer with the embedding, counts as
    the embedding.

    Args:
        model: all its parameters are taken, also those that do not learn now.
        weight_decay: of the decayed group.
        settings: for both groups, such as `lr`.

    Returns:
        [decayed, not decayed], each without the group that would be empty.

    >>> groups = no_decay(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), 0.1)
    >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
    [(1, 0.1), (3, 0.0)]
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter, owners in _owners(model):
        matrix = parameter.dim() >= 2 and not any(_is_norm(m) or isinstance(m, _EMBEDDINGS) for m in owners)
        (decayed if matrix else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay, **settings},
        {"params": spared, "weight_decay": 0.0, **settings},
    ]
    return [group for group in groups if group["params"]]


def split_matrices(
    model: nn.Module,
    *,
    adamw: Iterable[str | nn.Module | nn.Parameter] = (),
    head: bool = True,
    weight_decay: float | None = None,
    adamw_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Param groups for `Muon`: hidden matrices and convolution kernels by Muon, all else by AdamW.

    AdamW gets vectors, norms, embeddings (and what shares their weight), the output
    layer, and what `adamw` names: these are no maps from one hidden space to another.

    Args:
        model: all its parameters are taken, also those that do not learn now.
        adamw: further modules, parameters, or names of them (as in `named_modules`, `named_parameters`).
        head: the last `nn.Linear` of `model.modules()` is its output layer, and AdamW's; False if it is not.
        weight_decay: of the matrices; None for the optimizer's own.
        adamw_weight_decay: of AdamW's matrices (never of biases, norms and embeddings); None for the optimizer's own.

    Returns:
        Up to three groups: Muon's, AdamW's that are decayed, AdamW's that are not.

    Raises:
        OptimizerError: a name in `adamw` is of no module or parameter.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    >>> [(group["use_muon"], len(group["params"])) for group in split_matrices(model)]
    [(True, 1), (False, 1), (False, 3)]
    """
    chosen = _chosen(model, adamw)
    linear = [m for m in model.modules() if isinstance(m, _LINEAR)]
    if head and linear:
        chosen |= {id(p) for p in linear[-1].parameters()}
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter, owners in _owners(model):
        # [1, n] is a row, such as a position table with a leading batch of one
        vector = parameter.dim() < 2 or len(parameter) < 2 or parameter[0].numel() < 2
        if vector or any(_is_norm(m) or isinstance(m, _EMBEDDINGS) for m in owners):
            spared.append(parameter)
        elif id(parameter) in chosen:
            decayed.append(parameter)
        else:
            matrices.append(parameter)
    own = {} if weight_decay is None else {"weight_decay": weight_decay}
    theirs = {} if adamw_weight_decay is None else {"weight_decay": adamw_weight_decay}
    groups = [
        {"params": matrices, "use_muon": True, **own},
        {"params": decayed, "use_muon": False, **theirs},
        {"params": spared, "use_muon": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _owners(model: nn.Module) -> list[tuple[nn.Parameter, list[nn.Module]]]:
    """Every parameter once, in the model's order, with the modules that hold it, also through a parametrization."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, []).append(module)
    for module in model.modules():
        # what torch.nn.utils.parametrize computes a weight from is that weight's module's
        if parametrize.is_parametrized(module):
            for parameter in module.parametrizations.parameters():  # type: ignore[union-attr]
                found[parameter].append(module)
    return list(found.items())


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()


def _chosen(model: nn.Module, wanted: Iterable[str | nn.Module | nn.Parameter]) -> set[int]:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    found: set[int] = set()
    for thing in wanted:
        if isinstance(thing, str):
            if thing not in modules and thing not in parameters:
                raise OptimizerError(
                    f"split_matrices: {type(model).__name__} has no module and no parameter named {thing!r}"
                )
            thing = parameters[thing] if thing in parameters else modules[thing]
        found |= {id(p) for p in thing.parameters()} if isinstance(thing, nn.Module) else {id(thing)}
    return found
