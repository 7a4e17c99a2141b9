"""fp32 masters of 16-bit parameters: the optimizer's own copy, of which the parameter is the rounding.

A bf16 parameter of size 1 cannot take a step smaller than 1/256: small updates vanish. So the sum is kept in fp32 and
the parameter is rewritten from it at each update, as in Micikevicius et al. (2018), "Mixed Precision Training".
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop.errors import OptimizerError

__all__ = [
    "MasterPairs",
    "add_masters",
    "clears_as_torch",
    "first_master",
    "is_sixteen_bit",
    "keep_precision",
    "masters_of",
    "new_master",
    "widen_state",
]

_VERSION = operator.attrgetter("_version")


def is_sixteen_bit(parameter: Tensor) -> bool:
    """Whether a parameter is bfloat16 or float16."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


class MasterPairs:
    """Parameters and their masters, parameter == master rounded, also when somebody else writes to a parameter."""

    def __init__(self) -> None:
        self._masters: dict[Tensor, Tensor] = {}
        self._low: list[Tensor] = []
        self._high: list[Tensor] = []
        self._versions: list[int] = []
        self._stale = False

    def __bool__(self) -> bool:
        return bool(self._masters)

    def add(self, parameter: Tensor, master: Tensor) -> None:
        """`master`, float32 of the parameter's shape, is its master from now on."""
        self._masters[parameter] = master
        self._stale = True

    def get(self, parameter: Tensor) -> Tensor | None:
        """The master of `parameter`, if it has one."""
        return self._masters.get(parameter)

    def items(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Every parameter with its master."""
        return self._masters.items()

    def tensors(self) -> list[Tensor]:
        """The masters."""
        return self._lists()[1]

    def _lists(self) -> tuple[list[Tensor], list[Tensor]]:
        if self._stale:
            self._low, self._high = list(self._masters), list(self._masters.values())
            self._versions = []
            self._stale = False
        return self._low, self._high

    def refresh(self) -> None:
        """Where a parameter is not its master rounded, somebody set it: the master takes its value.

        Looks at torch's version counters only, unless one has moved since the last write; never waits. Writing through
        `.data` moves none.
        """
        versions = list(map(_VERSION, self._lists()[0]))
        if versions == self._versions:
            return
        with torch.no_grad():
            for p, master in self._masters.items():
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
        self._versions = versions

    def write(self) -> None:
        """Round every master into its parameter."""
        low, high = self._lists()
        if low:
            with torch.no_grad():
                torch._foreach_copy_(low, high)
            self.note_written()

    def put_back(self, optimizer: Optimizer) -> None:
        """After a step that raised: the optimizer has its own parameters, wherever masters stood in their place."""

    def note_written(self) -> None:
        """The parameters are their masters rounded now."""
        self._versions = list(map(_VERSION, self._lists()[0]))


def new_master(parameter: Tensor) -> Tensor:
    """A float32 copy of `parameter`, with its layout."""
    return parameter.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)


def first_master(parameter: Tensor) -> Tensor:
    """Where the master of a 16-bit `parameter` begins unless told: at what that was rounded from, if this is known."""
    from hotloop.precision.weights import take_originals

    master = new_master(parameter)
    original = take_originals([parameter]).get(parameter)
    if original is not None:
        # weights loaded since then count
        torch.where(original.to(parameter.dtype) == parameter, original, master, out=master)
    return master


def widen_state(state: dict[str, Any]) -> None:
    """Make the floating state of one parameter float32, but for its counter, in place."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
            state[name] = value.float()


def keep_precision(
    optimizer: Optimizer, saved: Mapping[str, Any], masters: MasterPairs, skip: Iterable[str] = ("step",)
) -> None:
    """Put the float state of `saved` (a state_dict just loaded) back as it was saved, where a parameter has a master.

    torch's `load_state_dict` rounds state to the parameter's dtype.
    """
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, p in zip(numbers, parameters, strict=True):
        if masters.get(p) is None:
            continue
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.is_floating_point() and name not in skip:
                optimizer.state[p][name] = value.detach().to(p.device, torch.float32, copy=True)


class _AddedMasters(MasterPairs):
    """Masters beside an optimizer that knows nothing of them: its step sees them in the parameters' place."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._places: list[tuple[list[Tensor], int, Tensor]] = []
        self._loading: dict[str, Any] | None = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(self.put_back)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._note)
        optimizer.register_load_state_dict_post_hook(self._load)

    def cover(self, optimizer: Optimizer, values: Mapping[Tensor, Tensor]) -> None:
        """Give a master to each 16-bit parameter that has none; state that it has already becomes float32."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not is_sixteen_bit(p) or self.get(p) is not None:
                    continue
                given = values.get(p)
                self.add(p, first_master(p) if given is None else new_master(given))
                widen_state(optimizer.state.get(p, {}))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.put_back(optimizer)
        # groups added since the last step
        self.cover(optimizer, {})
        self.refresh()
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        self._put_in(optimizer)
        if closure is None:
            return None

        def evaluate() -> Any:
            # the model computes with its own parameters
            self.write()
            self.put_back(optimizer)
            try:
                return closure()
            finally:
                self._put_in(optimizer)

        return (args[0], evaluate), {k: v for k, v in kwargs.items() if k != "closure"}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.put_back(optimizer)
        self.write()

    def _put_in(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            listed = group["params"]
            for i, p in enumerate(listed):
                master = self.get(p)
                if master is None:
                    continue
                master.grad = None if p.grad is None else p.grad.to(master.dtype)
                self._places.append((listed, i, p))
                listed[i] = master
                if p in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(p)

    def put_back(self, optimizer: Optimizer) -> None:
        """See `MasterPairs.put_back`."""
        for listed, i, p in self._places:
            master = listed[i]
            master.grad = None
            listed[i] = p
            if master in optimizer.state:
                optimizer.state[p] = optimizer.state.pop(master)
        self._places = []

    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.refresh()
        state = dict(state_dict["state"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, p in zip(numbers, parameters, strict=True):
            master = self.get(p)
            if master is not None:
                state[number] = {**state.get(number, {}), "master": master}
        return {**state_dict, "state": state}

    def _note(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.put_back(optimizer)
        self._loading = state_dict
        # an optimizer makes its state where it finds none at all
        bare = {
            number: {name: value for name, value in entries.items() if name != "master"}
            for number, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": {number: entries for number, entries in bare.items() if entries}}

    def _load(self, optimizer: Optimizer) -> None:
        saved, self._loading = self._loading, None
        assert saved is not None
        keep_precision(optimizer, saved, self, skip=("step", "master"))
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        with torch.no_grad():
            for number, p in zip(numbers, parameters, strict=True):
                master, value = self.get(p), saved["state"].get(number, {}).get("master")
                if master is not None and value is not None:
                    master.copy_(value)


def add_masters(optimizer: Any, values: Mapping[Tensor, Tensor] | None = None) -> Any:
    """Let any optimizer keep float32 masters of its 16-bit parameters; returns the same optimizer.

    Its state is float32 too. The parameter is rewritten, rounded, at each step; `state_dict` carries the masters under
    "master". Call it when the parameters have their 16-bit dtype; those that come later have masters from the next
    step on. A pickled or deep-copied optimizer of torch's carries none: call it again on the copy.

    Args:
        optimizer: a `torch.optim.Optimizer`; hotloop's own keep masters by themselves and take only `values`.
        values: parameter -> the float32 tensor that it was rounded from; default the parameter itself.

    Raises:
        OptimizerError: an optimizer that keeps its parameters in a list of its own, as LBFGS does.
    """
    given = {} if values is None else values
    if hasattr(optimizer, "hold_masters"):
        optimizer.hold_masters(given)
        return optimizer
    if hasattr(optimizer, "_params"):
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps a list of its parameters beside param_groups, so it cannot be given "
            "masters; train it in fp32, or with bf16 autocast"
        )
    known = getattr(optimizer, "_hotloop_masters", None)
    if known is None:
        known = optimizer._hotloop_masters = _AddedMasters(optimizer)
        if clears_as_torch(optimizer):
            optimizer.zero_grad = functools.partial(_zero_grad, weakref.ref(optimizer))
    known.cover(optimizer, given)
    return optimizer


def _zero_grad(reference: Any, set_to_none: bool = True) -> None:
    """torch's, of the parameters also where a step has raised and left their masters in their place."""
    optimizer = reference()
    optimizer._hotloop_masters.put_back(optimizer)
    Optimizer.zero_grad(optimizer, set_to_none)


def clears_as_torch(optimizer: Any) -> bool:
    """Whether its `zero_grad` does what that of torch's base class does."""
    method = optimizer.zero_grad
    return (
        getattr(method, "__func__", None) is Optimizer.zero_grad
        or getattr(method, "func", None) is _zero_grad
    )


def masters_of(optimizer: Any) -> MasterPairs | None:
    """The masters that an optimizer keeps, its own or added; None if it keeps none."""
    pairs: MasterPairs | None = getattr(optimizer, "_hotloop_masters", None)
    return pairs if pairs else None
