"""Forwards of prepared modules, compiled: AOTAutograd supplies the backwards, and the modules stay the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hotloop.kernels.selection import kernels_chosen, kernels_wanted

__all__ = ["CompiledForwards"]


class CompiledForwards:
    """The compiled forwards of one step's modules, made when they are first used.

    Args:
        device: where modules run.
        modules: gives the prepared modules.
        say: says a line once.
    """

    def __init__(
        self, device: torch.device, modules: Callable[[], list[nn.Module]], say: Callable[[str], None]
    ) -> None:
        self._device = device
        self._modules = modules
        self._say = say
        self._compiled: dict[nn.Module, Any] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it is open, calls of prepared modules run their compiled forwards."""
        modules = self._modules()
        before = [m._compiled_call_impl for m in modules]
        ours = self._device.type == "cuda" and kernels_wanted()
        options: dict[str, Any] = {}
        if ours:
            from hotloop.kernels import compile_fused

            options["backend"] = compile_fused
        for module in modules:
            if module not in self._compiled:
                self._say(
                    f"compiling the forward of {type(module).__name__} (once; takes seconds to minutes)"
                )
                self._compiled[module] = torch.compile(_traceable_call(module), **options)
            module._compiled_call_impl = self._compiled[module]
        try:
            with kernels_chosen(ours):
                yield
        finally:
            for module, compiled in zip(modules, before, strict=True):
                module._compiled_call_impl = compiled


def _traceable_call(module: nn.Module) -> Callable[..., Any]:
    """A call of `module` for `torch.compile`, which begins at no function of torch itself (`nn.Sequential.forward`)."""
    if not type(module).forward.__module__.startswith("torch."):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # what is compiled is kept with the code object, a few variants each: every module needs one of its own
    call.__code__ = call.__code__.replace()
    return call
