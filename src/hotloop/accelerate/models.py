"""Models below and beside what torch puts around them."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch

from hotloop.loop.modules import binding_of

__all__ = [
    "compile_regions",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "has_compiled_regions",
    "is_compiled_module",
    "model_has_dtensor",
]


def is_compiled_module(module: Any) -> bool:
    """Whether it is what `torch.compile(module)` returns."""
    dynamo: Any = getattr(torch, "_dynamo", None)
    if dynamo is None or not hasattr(module, "_orig_mod"):
        return False
    return isinstance(module, dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Whether some submodule is compiled by itself."""
    return any(is_compiled_module(part) for part in module.modules() if part is not module)


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile repeated blocks (elements of ModuleLists) each by itself, in place; without any, the whole module."""
    found = False
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList) and len({type(block) for block in part}) == 1:
            for block in part:
                block.compile(**compile_kwargs)
            found = True
    if not found:
        module.compile(**compile_kwargs)
    return module


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The user's module below wrappers of torch's own; one that was prepared is the user's module already.

    Args:
        model: a module, maybe in DistributedDataParallel, DataParallel or what torch.compile returns.
        keep_fp32_wrapper: False: its calls no longer go through autocast.
        keep_torch_compile: put what torch.compile made around the result again.
        recursive: unwrap submodules too.
    """
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    compiled = model if is_compiled_module(model) else None
    if compiled is not None:
        model = compiled._orig_mod
    while isinstance(model, wrappers):
        model = model.module
    if recursive:
        for part in model.modules():
            for name, child in list(part.named_children()):
                if isinstance(child, wrappers):
                    setattr(part, name, child.module)
    binding = binding_of(model)
    if binding is not None and not keep_fp32_wrapper:
        binding.dtype = None
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Whether some parameter is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(p, module.DTensor) for p in model.parameters())


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """All submodules, children before their parents, `model` itself last; with their names if so asked."""
    by_depth: dict[int, list[tuple[str, torch.nn.Module]]] = defaultdict(list)
    for name, part in model.named_modules():
        by_depth[name.count(".") + 1 if name else 0].append((name, part))
    ordered = [pair for depth in sorted(by_depth, reverse=True) for pair in by_depth[depth]]
    return ordered if return_fqns else [part for _, part in ordered]
