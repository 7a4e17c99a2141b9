"""A prepared module stays the user's: the same object, whose calls go through autocast and data parallelism.

Its class is replaced by a subclass made for it alone, with the same name. So isinstance and state_dict keys hold, and
`copy.deepcopy` and pickling, which go by the class, give an independent plain module.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hotloop.loop.buffers import BufferKeeper
from hotloop.loop.window import Window
from hotloop.precision.casting import autocast_context, outputs_to_float32

__all__ = ["Binding", "bind_module", "binding_of", "unbind_module"]


class Binding:
    """What a prepared module's calls do besides its own forward.

    Attributes:
        dtype: autocast dtype of its forward, or None.
        replica: its DistributedDataParallel twin, or None.
        keeper: restores its buffers after a refused update, or None.
        hold_sync: True inside `no_sync`.
        decided: a forward since the last backward has said whether gradients are exchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        window: Window,
        device: torch.device,
        dtype: torch.dtype | None,
        replica: Any,
        keeper: BufferKeeper | None,
    ) -> None:
        self.plain: type[nn.Module] = type(module)
        self.window = window
        self.device = device
        self.dtype = dtype
        self.replica = replica
        self.keeper = keeper
        self.hold_sync = False
        self.decided = False
        self.convert_outputs = True
        self._inside = False
        # one object for all calls: building it costs as much as a kernel launch; `_inside` keeps it from nesting
        self._autocast = autocast_context(device, dtype)

    @property
    def needed(self) -> bool:
        """False if calls would do nothing more than the module itself."""
        return self.dtype is not None or self.replica is not None or self.keeper is not None

    def call(
        self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One forward of `module`; `run` is the plain class's `__call__`."""
        if self._inside:
            return run(module, *args, **kwargs)
        self._inside = True
        try:
            learning = torch.is_grad_enabled() and module.training
            if learning:
                self._enter()
            through = self.replica if learning and self.replica is not None else None
            if self.dtype is None:
                return through(*args, **kwargs) if through is not None else run(module, *args, **kwargs)
            with self._autocast:
                out = through(*args, **kwargs) if through is not None else run(module, *args, **kwargs)
            return outputs_to_float32(out) if self.convert_outputs else out
        finally:
            self._inside = False

    def _enter(self) -> None:
        window = self.window
        if not window.plain:
            window.enter()
            if self.replica is not None:
                self.replica.require_backward_grad_sync = window.boundary and not self.hold_sync
                self.decided = True
        if self.keeper is not None:
            self.keeper.save(again=window.replaying)

    def make_ready(self, loss: torch.Tensor) -> None:
        """Have gradients exchanged in a backward that no forward through the module itself announced.

        That is the second backward of a micro-batch, or one after calling a method or a part of the module. To take
        the mean over ranks once more of what is their mean already changes nothing.
        """
        replica = self.replica
        if not self.decided and not self.hold_sync and not replica.static_graph:
            # torch refuses to do this once it waits for gradients, which may be those of another module only
            replica.reducer._rebuild_buckets()
            replica.reducer.prepare_for_backward([loss] if replica.find_unused_parameters else [])


def bind_module(module: nn.Module, binding: Binding) -> None:
    """Give `module` a class of its own whose calls go through `binding`."""
    plain = binding.plain
    run = plain.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return binding.call(self, run, args, kwargs)

    def as_plain(self: nn.Module, action: Callable[[], Any]) -> Any:
        bound = self.__class__
        self.__class__ = plain
        try:
            return action()
        finally:
            self.__class__ = bound

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        parts = as_plain(self, lambda: self.__reduce_ex__(protocol))
        if isinstance(parts, tuple) and parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle insists that this form names the object's own class; the older form names any
            return (copyreg._reconstructor, (plain, object, None), *parts[2:])  # type: ignore[attr-defined]
        return parts

    names: dict[str, Any] = {
        "__call__": call,
        "__reduce_ex__": reduce_ex,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_hotloop_binding": binding,
    }
    if hasattr(plain, "__deepcopy__"):
        names["__deepcopy__"] = lambda self, memo: as_plain(self, lambda: self.__deepcopy__(memo))
    metaclass: Any = type(plain)
    module.__class__ = metaclass(plain.__name__, (plain,), names)


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of a prepared module; None if it is plain."""
    return getattr(type(module), "_hotloop_binding", None)


def unbind_module(module: nn.Module) -> None:
    """Make `module` plain again."""
    binding = binding_of(module)
    if binding is not None:
        module.__class__ = binding.plain
