"""What hotloop's own optimizers share: state and settings on the device, updates refused there, fp32 masters.

A step reads no value back. Its settings are Python numbers or 0-d tensors on the device, whichever the param group
holds; a flag on the device turns it into one that changes nothing. Parameters whose steps have always been made
together share one step counter, so that one small kernel advances it and one number corrects all their biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop.errors import OptimizerError
from hotloop.optim.masters import MasterPairs, is_sixteen_bit, keep_precision, new_master

if TYPE_CHECKING:
    from hotloop.kernels import Tables

__all__ = ["Batch", "Number", "ResidentOptimizer", "as_number", "check_settings", "is_tensor", "to_dtype"]

Number: TypeAlias = float | Tensor
"""A setting: a Python number, or a 0-d tensor on the parameters' device."""

# Settings of torch's own optimizers that say how those compute.
_FOREIGN = ("foreach", "capturable", "differentiable", "decoupled_weight_decay")


@dataclass(slots=True)
class Batch:
    """Parameters of one group that are updated together: same device, dtypes and step counter.

    Attributes:
        step: updates made so far, float32 0-d; None for rules that do not count.
        refuse: float32 0-d on the device, 1. to change nothing; None if nobody may refuse.
        scale: what the loss, and so the gradients, were multiplied by, float32 0-d; None for 1.
        weights: what is updated: the fp32 masters of 16-bit parameters, or the parameters themselves.
        gradients: as autograd left them.
        state: optimizer state by name, in the same order.
        rounded: the update has written the 16-bit parameters too.
    """

    step: Tensor | None
    refuse: Tensor | None
    scale: Tensor | None
    parameters: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    rounded: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether the weights are masters, to be rounded into the parameters."""
        return self.weights[0] is not self.parameters[0]

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.weights[0].device

    @property
    def dtype(self) -> torch.dtype:
        """What the update is computed in."""
        return self.weights[0].dtype

    @property
    def on_host(self) -> bool:
        """Whether every number that steers the update can be read for nothing."""
        return self.refuse is None and self.scale is None and self.device.type == "cpu"

    def gate(self, value: Number, idle: float) -> Number:
        """`value` where the update is made, `idle` where it is refused, exactly."""
        if self.refuse is None:
            return value
        refuse = _widen(self.refuse)
        kept = value * (1.0 - refuse)
        return kept if idle == 0.0 else kept + idle * refuse

    def advance(self) -> Tensor:
        """Count this update unless it is refused; returns the counter."""
        assert self.step is not None
        self.step.add_(1.0)
        if self.refuse is not None:
            self.step.sub_(self.refuse)
        return self.step

    def count(self) -> Tensor:
        """Number of this update from 1, 0-d, as wide as the device has it: float32 loses 1 - 0.999."""
        assert self.step is not None
        wide = _widen(self.step)
        # a refused first update leaves 0, and its bias correction must not be 0 / 0
        return wide if self.refuse is None else wide.clamp(min=1.0)

    def cast_gradients(self) -> list[Tensor]:
        """Gradients in the weights' dtype and layout; the originals where they are that already."""
        dtype = self.dtype
        if all(g.dtype == dtype for g in self.gradients):
            return self.gradients
        return self._copies()[1]

    def true_gradients(self, *, maximize: bool = False) -> list[Tensor]:
        """Gradients unscaled, all zero where the update is refused, negated to `maximize`; the originals stay."""
        if self.refuse is None and self.scale is None:
            ready = self.cast_gradients()
            return list(torch._foreach_neg(ready)) if maximize else ready
        # one buffer for all: what has no multi-tensor kernel is then one kernel all the same
        flat, ready = self._copies()
        if self.scale is not None:
            flat.div_(self.scale)
        if maximize:
            flat.neg_()
        if self.refuse is not None:
            # not a product: NaN times zero would still be NaN
            flat.masked_fill_(self.refuse.bool(), 0.0)
        return ready

    def _copies(self) -> tuple[Tensor, list[Tensor]]:
        sizes = [w.numel() for w in self.weights]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        views = [
            part.as_strided(w.shape, w.stride()) if _is_dense(w) else part.view(w.shape)
            for part, w in zip(flat.split(sizes), self.weights, strict=True)
        ]
        torch._foreach_copy_(views, self.gradients)
        return flat, views


class ResidentOptimizer(Optimizer):
    """Base of AdamW, Adam, SGD and Muon; a subclass says what state it needs and how a `Batch` is updated.

    It speaks the protocol of torch's fused optimizers: `found_inf` and `grad_scale`, if set, are float32 tensors of
    one element on the device that refuse the update and unscale its gradients.

    Attributes:
        device_settings: settings that may be 0-d tensors on the device, where a schedule's table fills them.
    """

    device_settings: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    _counts: ClassVar[bool] = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._mark()

    def _mark(self) -> None:
        self._step_supports_amp_scaling = True
        self._tables: dict[int, Tables] = {}
        self._hotloop_masters = MasterPairs()
        for p, state in self.state.items():
            if "master" in state:
                self._hotloop_masters.add(p, state["master"])

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """State that each weight of `group` has, zeros of its shape and dtype at first."""
        raise NotImplementedError

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        """Update the weights of `batch` in place by `group`'s settings, and count its step."""
        raise NotImplementedError

    def tables_of(self, group: dict[str, Any]) -> Tables:
        """Where kernels over many tensors keep the addresses of this group's."""
        found = self._tables.get(id(group))
        if found is None:
            from hotloop.kernels import Tables

            found = self._tables[id(group)] = Tables()
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` does, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        masters = self._hotloop_masters
        if masters:
            masters.refresh()
        refuse, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            for batch in self._batches(group, refuse, scale):
                self.update(batch, group)
                if batch.has_masters and not batch.rounded:
                    torch._foreach_copy_(batch.parameters, batch.weights)
        masters.note_written()
        return loss

    def _batches(self, group: dict[str, Any], refuse: Tensor | None, scale: Tensor | None) -> Iterable[Batch]:
        """The group's parameters that have gradients, put together by device, dtypes and step counter."""
        batches: dict[tuple[Any, ...], Batch] = {}
        fresh: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        waiting: set[int] = set()
        names = self.state_names(group)
        for p in group["params"]:
            state = self.state.get(p)
            if p.grad is None:
                if state and self._counts:
                    waiting.add(id(state["step"]))
                continue
            if not state or any(name not in state for name in names):
                state = self._start(p, group, fresh)
            step, weight = state.get("step"), state.get("master", p)
            key = (id(step), weight.dtype, p.dtype, weight.device)
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = Batch(step, _on(weight, refuse), _on(weight, scale))
                batch.state = {name: [] for name in names}
            batch.parameters.append(p)
            batch.weights.append(weight)
            batch.gradients.append(p.grad)
            for name, tensors in batch.state.items():
                tensors.append(state[name])
        for batch in batches.values() if waiting else ():
            if id(batch.step) in waiting:
                # others that shared this counter do not step now
                assert batch.step is not None
                batch.step = batch.step.clone()
                for p in batch.parameters:
                    self.state[p]["step"] = batch.step
        return batches.values()

    def _start(
        self,
        p: Tensor,
        group: dict[str, Any],
        fresh: dict[tuple[torch.device, torch.dtype], Tensor],
        value: Tensor | None = None,
    ) -> dict[str, Any]:
        """Make the state of `p`; those of one kind that start at once share a counter in `fresh`."""
        sparse = p.grad is not None and p.grad.is_sparse
        if sparse or not p.is_floating_point():
            raise OptimizerError(
                f"hotloop.optim.{type(self).__name__} updates real parameters with dense gradients; it was given one "
                f"of shape {tuple(p.shape)} with {'a sparse gradient' if sparse else f'dtype {p.dtype}'}: use "
                "torch.optim for it"
            )
        state, weight = self.state[p], p.detach()
        if self._keeps_master(p, group):
            if "master" not in state:
                state["master"] = new_master(p if value is None else value)
                self._hotloop_masters.add(p, state["master"])
            weight = state["master"]
        if self._counts and "step" not in state:
            kind = (p.device, p.dtype)
            if kind not in fresh:
                fresh[kind] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["step"] = fresh[kind]
        for name in self.state_names(group):
            if name not in state:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state

    def _keeps_master(self, p: Tensor, group: dict[str, Any]) -> bool:
        return is_sixteen_bit(p) and group.get("master") is not False

    def hold_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """See `hotloop.optim.add_masters`: masters begin at `values` where the parameter has one there."""
        with torch.no_grad():
            for group in self.param_groups:
                group["master"] = True
                fresh: dict[tuple[torch.device, torch.dtype], Tensor] = {}
                for p in group["params"]:
                    given = values.get(p)
                    if not is_sixteen_bit(p) or not p.requires_grad:
                        continue
                    if not self.state.get(p):
                        self._start(p, group, fresh, given)
                    elif given is not None and "master" in self.state[p]:
                        self.state[p]["master"].copy_(given)

    # ------------------------------------------------------------------------------------- saved and put back

    def state_dict(self) -> dict[str, Any]:
        """State and settings in the form of torch's optimizer of the same name, with the masters under "master"."""
        self._hotloop_masters.refresh()
        packed = super().state_dict()
        # to torch every parameter's counter is its own, and it adds to each
        state = {
            key: {k: v.clone() if k == "step" else v for k, v in entries.items()}
            for key, entries in packed["state"].items()
        }
        return {**packed, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name in _FOREIGN:
                group.pop(name, None)
            self._complete(group)
        self._mark()

    def _complete(self, group: dict[str, Any]) -> None:
        """Give `group` the settings that it lacks, as after loading what another version or torch saved."""
        for name, value in self.defaults.items():
            if name not in _FOREIGN:
                group.setdefault(name, value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned, or that of torch's optimizer of the same name; masters to the bit."""
        mine = [group.get("master") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, saved, master in zip(self.param_groups, state_dict["param_groups"], mine, strict=True):
            group["master"] = saved.get("master", master)
            for p in group["params"]:
                state = self.state.get(p)
                if state and "master" not in state and self._keeps_master(p, group):
                    state["master"] = new_master(p)
        self._mark()
        keep_precision(self, state_dict, self._hotloop_masters)
        self._mark()
        self._share_counters()

    def _share_counters(self) -> None:
        """Counters that agree are one again; reads them, as only loading may."""
        for group in self.param_groups:
            shared: dict[tuple[torch.device, torch.dtype, float], Tensor] = {}
            for p in group["params"]:
                step = self.state[p].get("step") if p in self.state else None
                if step is None:
                    continue
                count = float(step)
                kind = (p.device, p.dtype, count)
                if kind not in shared:
                    shared[kind] = torch.full((), count, dtype=torch.float32, device=p.device)
                self.state[p]["step"] = shared[kind]


def check_settings(optimizer: str, **settings: Any) -> None:
    """Raise `OptimizerError` for a setting out of its range: betas and momentum in [0, 1), others at least 0."""
    for name, value in settings.items():
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, Tensor):
                if number.numel() != 1:
                    raise OptimizerError(
                        f"{optimizer}: {name} is a tensor of {number.numel()} elements, not one"
                    )
                continue
            below_one = name in ("betas", "momentum")
            if not number >= 0.0 or (below_one and not number < 1.0):
                raise OptimizerError(
                    f"{optimizer}: {name}={value!r} must be {'in [0, 1)' if below_one else 'at least 0'}"
                )


def is_tensor(*settings: Any) -> bool:
    """Whether any of `settings` is a tensor."""
    return any(isinstance(value, Tensor) for value in settings)


def as_number(setting: Any) -> float:
    """A setting as a Python number; only where reading it waits for nothing."""
    return float(setting)


def to_dtype(value: Number, dtype: torch.dtype) -> Any:
    """A tensor in `dtype`, which multi-tensor kernels insist on; a number as it is."""
    return value.to(dtype) if isinstance(value, Tensor) else value


def _widen(value: Tensor) -> Tensor:
    """A 0-d tensor in float64 where the device has that: settings are not rounded before they are used."""
    return value.double() if value.device.type in ("cpu", "cuda") else value


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides of `tensor` fit memory of just its own size."""
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _on(weight: Tensor, value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    return value.reshape(()).to(weight.device, non_blocking=True)
