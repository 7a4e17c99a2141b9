"""A training step that is launched as one: run eagerly a few times, recorded, then replayed, with eager semantics."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotloop.capture.effects import find_effects
from hotloop.capture.fingerprint import Fingerprint
from hotloop.capture.graphs import Recorder, Recording
from hotloop.errors import CaptureError
from hotloop.stalls import record_syncs

__all__ = ["CapturedStep", "StepHost", "host_names"]

# The first calls of each shape are real steps, run eagerly: lazy state of optimizers, libraries and autograd is made.
_WARM_CALLS = 3
_MOST_GRAPHS = 32
# A value that changes in so many calls running would have the step recorded anew for ever.
_CHANGES_IN_A_ROW = 4


class StepHost(Protocol):
    """What a captured step needs of the loop that it belongs to."""

    device: torch.device
    eager: bool

    def modules(self) -> list[nn.Module]:
        """Prepared modules."""

    def optimizers(self) -> list[Any]:
        """Prepared optimizers."""

    def recorder(self) -> Recorder | None:
        """What records on this device; None where nothing can."""

    def say(self, text: str) -> None:
        """Say a line once."""

    def enter(self) -> tuple[Any, ...]:
        """A step begins; returns what of its place in the accumulation window a recording freezes."""

    def ready(self) -> None:
        """Make optimizers and gradients fit to be recorded and replayed; called before each step."""

    def recording(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """While it is open, host effects of the step go to the list given instead of being done."""


@dataclass
class _Entry:
    """One shape of the step, in one state of everything frozen."""

    warm: int = 0
    recording: Recording | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    spec: Any = None
    effects: list[Callable[[], None]] = field(default_factory=list)
    gradients: list[torch.Tensor | None] | None = None
    single: bool = False


class CapturedStep:
    """`function` as one launch.

    Args:
        function: any function of tensors; with a backward inside it is a training step.
        mode: "off", "compile" (prepared modules' forwards compiled), "graph" (the whole recorded), "full" (both).
        outputs: "clone" gives each call results of its own; "static" gives the same tensors each time, valid until
            the next call.
        host: the loop.

    Attributes:
        captures: how many recordings were made.
        replays: how many calls were replays.
        reason: why calls run eagerly, or None.
    """

    def __init__(
        self, function: Callable[..., Any], host: StepHost, mode: str, outputs: str = "clone"
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = getattr(function, "__name__", "the step")
        self.mode = mode
        self.captures = 0
        self.replays = 0
        self.reason: str | None = None
        self._host = host
        self._clone = outputs == "clone"
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._states: list[list[Any]] = []
        self._state = 0
        self._fingerprint: Fingerprint | None = None
        self._changes: dict[str, int] = {}
        self._compiled: dict[nn.Module, Any] = {}
        self._recorder = host.recorder() if mode in ("graph", "full") else None
        if mode in ("graph", "full"):
            if self._recorder is None:
                self._give_up(f"{host.device} records no graphs")
            else:
                effects = find_effects(function, host_names(function, host))
                if effects:
                    self._give_up(
                        f"{'; '.join(effects)}: a replay would not repeat that; do it outside the step"
                    )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        host = self._host
        if host.eager:
            return self.function(*args, **kwargs)
        if self.mode == "off" or self._recorder is None:
            return self._run_eagerly(args, kwargs)
        place = host.enter()
        host.ready()
        if not kwargs and all(type(arg) is torch.Tensor for arg in args):
            # the usual call, without the cost of a general structure
            leaves, spec = list(args), None
        else:
            leaves, spec = tree_flatten((args, kwargs))
        key = (place, self._frozen_state(), spec, tuple(map(_describe, leaves)))
        entry = self._entries.get(key)
        if entry is None:
            entry = self._new_entry(key, leaves)
        else:
            self._entries.move_to_end(key)
        if entry.recording is None:
            if entry.warm < (_WARM_CALLS if self.captures == 0 else 1):
                entry.warm += 1
                return self._warm(entry, args, kwargs)
            if not self._record(entry, leaves, spec):
                return self._run_eagerly(args, kwargs)
            if self._recorder.runs_while_recording:
                return self._after(entry)
        tensors = leaves if spec is None else [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors:
            torch._foreach_copy_(entry.inputs, tensors, non_blocking=True)
        assert entry.recording is not None
        entry.recording.replay()
        self.replays += 1
        return self._after(entry)

    def _after(self, entry: _Entry) -> Any:
        """What a replay leaves to the host: gradients in place, effects, results."""
        if entry.gradients is not None and self._fingerprint is not None:
            for p, grad in zip(self._fingerprint.parameters, entry.gradients, strict=True):
                if p.grad is not grad:
                    p.grad = grad
        for effect in entry.effects:
            effect()
        results = entry.outputs
        if self._clone:
            results = [r.clone() if isinstance(r, torch.Tensor) else r for r in results]
        return results[0] if entry.single else tree_unflatten(results, entry.spec)

    # -------------------------------------------------------------------------------------------- what is frozen

    def _frozen_state(self) -> int:
        """Number of the state that everything frozen is in; a new one means recording anew."""
        fingerprint = self._fingerprint
        if fingerprint is None:
            host = self._host
            fingerprint = Fingerprint(self.function, host.modules(), host.optimizers(), skip=[host])
            self._fingerprint = fingerprint
        values = fingerprint.take()
        if self._states and values == self._states[self._state]:
            if self._changes:
                self._changes.clear()
            return self._state
        return self._find_state(fingerprint, values)

    def _find_state(self, fingerprint: Fingerprint, values: list[Any]) -> int:
        if not self._states:
            self._states.append(values)
            return 0
        changed = fingerprint.difference(self._states[self._state], values)
        for number, known in enumerate(self._states):
            if known == values:
                self._state = number
                return number
        name = changed.split(":")[0]
        self._changes[name] = self._changes.get(name, 0) + 1
        if self._changes[name] >= _CHANGES_IN_A_ROW:
            raise CaptureError(
                f"{self.name}: {changed} changed in each of the last {_CHANGES_IN_A_ROW} calls; a captured step "
                "freezes Python values. Pass it as a tensor argument, or hold it in a tensor on the device"
            )
        if self.captures:
            self._host.say(f"{self.name} is captured anew: {changed}")
        # modules or parameters may be others now: what is watched is found again
        host = self._host
        self._fingerprint = Fingerprint(self.function, host.modules(), host.optimizers(), skip=[host])
        self._states.append(self._fingerprint.take())
        self._state = len(self._states) - 1
        return self._state

    def _new_entry(self, key: Any, leaves: list[Any]) -> _Entry:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | bool | int | float | str | bytes | type(None)):
                self._host.say(
                    f"{self.name}: an argument of type {type(leaf).__name__} is frozen by identity"
                )
        self._entries[key] = _Entry()
        if len(self._entries) > _MOST_GRAPHS:
            self._entries.popitem(last=False)
        return self._entries[key]

    # -------------------------------------------------------------------------------------------- running

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        """Prepared modules' forwards compiled while it is open, if the mode says so."""
        if self.mode not in ("compile", "full"):
            yield
            return
        modules = self._host.modules()
        before = [m._compiled_call_impl for m in modules]
        for module in modules:
            if module not in self._compiled:
                self._host.say(
                    f"compiling the forward of {type(module).__name__} (once; takes seconds to minutes)"
                )
                self._compiled[module] = torch.compile(module._call_impl)
            module._compiled_call_impl = self._compiled[module]
        try:
            yield
        finally:
            for module, compiled in zip(modules, before, strict=True):
                module._compiled_call_impl = compiled

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        with self._forwards():
            return self.function(*args, **kwargs)

    def _warm(self, entry: _Entry, args: Any, kwargs: Any) -> Any:
        """An eager step on the recording stream; the one before recording is watched for waits."""
        assert self._recorder is not None
        assert self._fingerprint is not None
        values, tensors = self._fingerprint.take(), self._fingerprint.tensors()
        last = entry.warm >= (_WARM_CALLS if self.captures == 0 else 1)
        watch: AbstractContextManager[Any] = record_syncs(self._host.device) if last else nullcontext([])
        with self._forwards(), watch as waits:
            result = self._recorder.warm(lambda: self.function(*args, **kwargs))
        if waits:
            self._give_up(str(waits[0]))
        elif (now := self._fingerprint.tensors()) != tensors:
            name = next(n for n in now if now[n] != tensors.get(n))
            self._give_up(
                f"the step replaces the tensor {name}; a replay would not see the new one: write into it"
            )
        elif (after := self._fingerprint.take()) != values:
            changed = self._fingerprint.difference(values, after)
            self._give_up(
                f"the step changes {changed}; a replay would not repeat that: do it outside the step"
            )
        return result

    def _record(self, entry: _Entry, leaves: list[Any], spec: Any) -> bool:
        """Record the step for this shape; False if it cannot be, and then it runs eagerly from now on."""
        assert self._recorder is not None
        assert self._fingerprint is not None
        # clones keep strides; the recording reads from them for ever
        entry.inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        statics = iter(entry.inputs)
        mine = [next(statics) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = (mine, {}) if spec is None else tree_unflatten(mine, spec)
        before = [p.grad for p in self._fingerprint.parameters]
        try:
            with self._forwards(), self._host.recording() as effects:
                entry.recording, result = self._recorder.record(lambda: self.function(*args, **kwargs))
        except (RuntimeError, AssertionError) as error:
            for p, grad in zip(self._fingerprint.parameters, before, strict=True):
                p.grad = grad
            self._give_up(_cause(error))
            return False
        entry.effects = effects
        entry.outputs, entry.spec = tree_flatten(result)
        entry.single = isinstance(result, torch.Tensor)
        entry.outputs = [o.detach() if isinstance(o, torch.Tensor) else o for o in entry.outputs]
        after = [p.grad for p in self._fingerprint.parameters]
        if any(g is not None for g in after) or any(g is not None for g in before):
            entry.gradients = after
        self.captures += 1
        return True

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._recorder = None
        self._entries.clear()
        self._host.say(f"{self.name} runs eagerly, not as one launch: {reason}")


def host_names(function: Callable[..., Any], host: StepHost) -> frozenset[str]:
    """Names by which `function` knows objects of hotloop, whose methods a recording understands."""
    function = getattr(function, "__func__", function)
    scope = dict(getattr(function, "__globals__", {}))
    code = getattr(function, "__code__", None)
    for name, cell in zip(
        code.co_freevars if code else (), getattr(function, "__closure__", None) or (), strict=True
    ):
        try:
            scope[name] = cell.cell_contents
        except ValueError:
            continue
    ours = {name for name, value in scope.items() if type(value).__module__.split(".")[0] == "hotloop"}
    return frozenset(
        ours | {name for name, value in scope.items() if isinstance(value, torch.optim.Optimizer)}
    )


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, bool | int | float | str | bytes | type(None)) else id(leaf)


def _cause(error: BaseException) -> str:
    """The innermost line of the user's own code in a traceback, and what was said there."""
    import traceback

    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and "/hotloop/" not in f.filename
    ]
    text = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
    if not frames:
        return text
    last = frames[-1]
    return f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno} `{last.line}`: {text}"
