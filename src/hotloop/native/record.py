"""The fallback of capturing: run the model once with the example and note every operation on tensors.

A dispatch mode sees each operation after composite ones were taken apart (linear arrives as addmm), with its real
tensors. Tensors that were not made inside the run are constants, but for the inputs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.native.capture import Call, Captured, Ref, find_source_line, name_operation
from hotloop.native.faults import NativeError
from hotloop.native.graph import Origin

__all__ = ["record_model"]


class _Recorder(TorchDispatchMode):
    def __init__(self, captured: Captured, inputs: Sequence[torch.Tensor], module_of: list[str]) -> None:
        super().__init__()
        self.captured = captured
        self.module_of = module_of
        # the tensors are kept alive, so an id stays the name of one of them
        self.known: dict[int, tuple[torch.Tensor, Ref]] = {
            id(tensor): (tensor, Ref(name)) for tensor, name in zip(inputs, captured.inputs, strict=True)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refs = [self._convert(arg) for arg in args]
        named = {key: self._convert(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        if not tensors:
            return result
        name = f"{name_operation(func).partition('.')[0]}_{len(self.captured.calls)}"
        origin = Origin(
            name_operation(func),
            self.module_of[-1] if self.module_of else "",
            find_source_line("".join(traceback.format_stack(limit=25)[:-1])),
        )
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in results]
        dtypes = [v.dtype if isinstance(v, torch.Tensor) else torch.float32 for v in results]
        self.captured.calls.append(
            Call(name, name_operation(func), tuple(refs), named, shapes, dtypes, origin, func)
        )
        several = isinstance(result, (list, tuple))
        for index, value in enumerate(results):
            if isinstance(value, torch.Tensor):
                self.known[id(value)] = (value, Ref(f"{name}#{index}" if several else name))
        return result

    def _convert(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._convert(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.known:
            name = f"constant_{len(self.captured.constants)}"
            self.captured.constants[name] = value.detach().clone()
            self.known[id(value)] = (value, Ref(name))
        return self.known[id(value)][1]


def record_model(model: nn.Module, example: Sequence[torch.Tensor], *, because: Exception) -> Captured:
    """Run `model` on the example and note what it computes. `because` is why export was of no use.

    Raises:
        NativeError: the model does not run on the example either.
    """
    names = [f"input_{index}" for index in range(len(example))]
    captured = Captured(
        [],
        {},
        names,
        {name: tuple(tensor.shape) for name, tensor in zip(names, example, strict=True)},
        {name: tensor.dtype for name, tensor in zip(names, example, strict=True)},
        [],
        how="recorder",
    )
    module_of: list[str] = []
    hooks = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: module_of.append(path)

    def leave(*_: Any) -> None:
        module_of.pop()

    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    # with oneDNN, recurrent layers and convolutions become operations of its own
    onednn = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        recorder = _Recorder(captured, example, module_of)
        with torch.no_grad(), recorder:
            result = model(*example)
    except Exception as error:
        raise NativeError(
            f"the model can neither be exported ({type(because).__name__}: {str(because)[:300]}) nor run on the "
            f"example ({type(error).__name__}: {error}); the example must be a valid input"
        ) from error
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        for hook in hooks:
            hook.remove()
    for value in tree_leaves(result):
        if isinstance(value, torch.Tensor):
            known = recorder.known.get(id(value))
            captured.outputs.append(known[1] if known else value.detach())
    return captured
