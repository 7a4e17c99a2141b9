"""What is left to launch as one where a step is not: the forward and the backward of each prepared module.

Everything between them, a value read on the host or a decision by it, runs as the plain Python it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotloop.capture.entry import describe, only_objects, only_tensors
from hotloop.capture.frozen import Frozen
from hotloop.capture.graphs import Recorder
from hotloop.capture.host_streams import HostStreams
from hotloop.capture.identities import alike
from hotloop.capture.reasons import cause_of
from hotloop.errors import CaptureError
from hotloop.stalls import record_syncs

__all__ = ["ModuleGraphs", "Parts"]

_WARM_CALLS = 3
_MOST = 8


class Parts:
    """Module graphs for one step.

    Args:
        recorder: what records.
        device: where modules run.
        modules: gives the prepared modules.
        say: says a line once.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        modules: Callable[[], list[nn.Module]],
        say: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._modules = modules
        self._say = say
        self._graphs: dict[nn.Module, ModuleGraphs] = {}

    @property
    def replays(self) -> int:
        """How many forwards were replays."""
        return sum(graphs.replays for graphs in self._graphs.values())

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it is open, calls of prepared modules go through their graphs where there are any."""
        modules = self._modules()
        before = [m._compiled_call_impl for m in modules]
        for module in modules:
            graphs = self._graphs.get(module)
            if graphs is None:
                # between the forward of a module and its backward those of others are replayed
                graphs = ModuleGraphs(module, self._recorder.apart(), self._device, self._say)
                self._graphs[module] = graphs
            graphs.begin()
            module._compiled_call_impl = graphs.call
        try:
            yield
        finally:
            for module, impl in zip(modules, before, strict=True):
                module._compiled_call_impl = impl


class ModuleGraphs:
    """The forwards of one module as recordings, each with its backward.

    A training forward of tensors alone is recorded after three eager ones of its shape. It is replayed once in a step:
    a second forward before the next step begins runs eagerly, since its results would overwrite the first one's.

    Attributes:
        replays: how many forwards were replays.
        refused: why this module is not recorded, or None.
    """

    def __init__(
        self, module: nn.Module, recorder: Recorder, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._module = module
        self._recorder = recorder
        self._device = device
        self._say = say
        self._frozen = Frozen(
            type(module).forward, type(module).__name__, lambda: [module], list, list, [self]
        )
        self._pairs: dict[Any, _Pair | int] = {}
        self._used = False
        self.replays = 0
        self.refused: str | None = None

    def begin(self) -> None:
        """A step begins: results of the one before are no longer needed."""
        self._used = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """One forward."""
        module = self._module
        if self.refused is not None or self._used or not (module.training and torch.is_grad_enabled()):
            return module._call_impl(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = only_tensors(leaves)
        if only_objects(leaves):
            # what lies in an object, a replay would read where it lay
            return module._call_impl(*args, **kwargs)
        try:
            state = self._frozen.look()
        except CaptureError as error:
            self._refuse(str(error))
            return module._call_impl(*args, **kwargs)
        key = (state, spec, tuple(map(describe, leaves)))
        pair = self._pairs.get(key, 0)
        if isinstance(pair, int):
            if pair < _WARM_CALLS:
                return self._warm(key, pair, args, kwargs)
            made = self._record(key, leaves, spec)
            if made is None:
                return module._call_impl(*args, **kwargs)
            pair = made
        self._used = True
        self.replays += 1
        outputs = _Replay.apply(pair, *tensors, *pair.parameters)
        return pair.rebuild(outputs)

    def _warm(self, key: Any, calls: int, args: Any, kwargs: Any) -> Any:
        if len(self._pairs) >= _MOST and key not in self._pairs:
            return self._module._call_impl(*args, **kwargs)
        self._pairs[key] = calls + 1
        fingerprint = self._frozen.fingerprint
        values, buffers = fingerprint.take(), fingerprint.tensors()
        streams = HostStreams(type(self._module).forward, self._device)
        with record_syncs(self._device, copies=True) as waits:
            result = self._module._call_impl(*args, **kwargs)
        if waits:
            self._refuse(str(waits[0]))
        elif (drawn := streams.drawn()) is not None:
            self._refuse(drawn)
        elif fingerprint.tensors() != buffers or not alike(fingerprint.take(), values):
            self._refuse("it changes its own attributes")
        return result

    def _record(self, key: Any, leaves: list[Any], spec: Any) -> _Pair | None:
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        try:
            pair = _Pair(self._recorder, self._module._call_impl, leaves, spec, parameters)
        except (RuntimeError, AssertionError) as error:
            self._refuse(cause_of(error))
            return None
        if pair.others:
            self._refuse("it returns something other than tensors")
            return None
        self._pairs[key] = pair
        self._say(f"forward and backward of {type(self._module).__name__} are launched as one each")
        return pair

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._pairs.clear()
        self._say(f"forward and backward of {type(self._module).__name__} run eagerly too: {reason}")


class _Pair:
    """A recorded forward and its recorded backward."""

    def __init__(
        self,
        recorder: Recorder,
        run: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        parameters: list[nn.Parameter],
    ) -> None:
        self.parameters = parameters
        self.generation = 0
        mine = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        self.inputs = only_tensors(mine)
        args, kwargs = tree_unflatten(mine, spec)
        live: list[Any] = []
        # casts that autocast has kept from before are not part of a recording
        torch.clear_autocast_cache()

        def forward() -> list[torch.Tensor]:
            with torch.enable_grad():
                live[:], self._spec = tree_flatten(run(*args, **kwargs))
            return [t.detach() for t in live if isinstance(t, torch.Tensor)]

        self.forward, self.outputs = recorder.record(forward)
        self.done = recorder.runs_while_recording
        self.others = [t for t in live if not isinstance(t, torch.Tensor | None)]
        self._places = [isinstance(t, torch.Tensor) for t in live]
        self.learning = [t.requires_grad for t in live if isinstance(t, torch.Tensor)]
        wanted = [t for t in (*self.inputs, *parameters) if t.requires_grad]
        self.wanted = [t.requires_grad for t in (*self.inputs, *parameters)]
        self.handed = [
            torch.zeros_like(o) for o, learns in zip(self.outputs, self.learning, strict=True) if learns
        ]

        def backward() -> tuple[torch.Tensor | None, ...]:
            ends = [t for t in live if isinstance(t, torch.Tensor) and t.requires_grad]
            # done once in the recording and again by its first replay, unless recording does not do it
            again = self.done
            return torch.autograd.grad(ends, wanted, self.handed, retain_graph=again, allow_unused=True)

        self.backward, self.gradients = recorder.record(backward)

    def rebuild(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """`outputs` in the structure that the module returned."""
        rest = iter(outputs)
        return tree_unflatten([next(rest) if is_tensor else None for is_tensor in self._places], self._spec)


class _Replay(torch.autograd.Function):
    """Replays a pair: its forward now, its backward when gradients come."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results of their own: what the recording wrote is overwritten by the next step."""
        inputs = tensors[: len(pair.inputs)]
        if inputs:
            torch._foreach_copy_([i.data for i in pair.inputs], list(inputs), non_blocking=True)
        if not pair.done:
            pair.forward.replay()
        pair.done = False
        pair.generation += 1
        ctx.pair, ctx.generation, ctx.spent = pair, pair.generation, False
        outputs = tuple(o.clone() for o in pair.outputs)
        ctx.mark_non_differentiable(
            *[o for o, learns in zip(outputs, pair.learning, strict=True) if not learns]
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of inputs and parameters."""
        pair: _Pair = ctx.pair
        if ctx.generation != pair.generation:
            raise CaptureError(
                "a backward through a forward of an earlier step: the recording has been replayed since. Backpropagate "
                'in the step, or use capture(mode="off")'
            )
        if ctx.spent:
            # the first has written over what it needed no more
            raise CaptureError(
                "a second backward through one forward of a module that is launched as one: add the losses and "
                'backpropagate once, or use capture(mode="off")'
            )
        ctx.spent = True
        given = [g for g, learns in zip(gradients, pair.learning, strict=True) if learns]
        if given:
            torch._foreach_copy_(pair.handed, given, non_blocking=True)
        pair.backward.replay()
        found = iter(pair.gradients)
        return (None, *[next(found) if wanted else None for wanted in pair.wanted])
