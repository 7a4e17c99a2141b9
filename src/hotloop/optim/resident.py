"""What hotloop's own optimizers share: state and settings on the device, updates refused there, fp32 masters.

A step reads no value back. Its settings are Python numbers or 0-d tensors on the device, whichever the param group
holds; a flag on the device turns it into one that changes nothing. Parameters whose steps have always been made
together share one step counter, so that one small kernel advances it and one number corrects all their biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop.errors import OptimizerError
from hotloop.optim.batch import Batch, Refusal
from hotloop.optim.masters import (
    MasterPairs,
    first_master,
    is_sixteen_bit,
    keep_precision,
    new_master,
    widen_state,
)

if TYPE_CHECKING:
    from hotloop.kernels import Tables

__all__ = ["ResidentOptimizer", "check_settings"]

# Settings of torch's own optimizers that say how those compute.
_FOREIGN = ("foreach", "capturable", "differentiable", "decoupled_weight_decay")


class ResidentOptimizer(Optimizer):
    """Base of AdamW, Adam, SGD and Muon; a subclass says what state it needs and how a `Batch` is updated.

    It speaks the protocol of torch's fused optimizers: `found_inf` and `grad_scale`, if set, are float32 tensors of
    one element on the device that refuse the update and unscale its gradients.

    Attributes:
        device_settings: settings that may be 0-d tensors on the device, where a schedule's table fills them.
        layouts: how often parameters got another step counter than the one they had: what was recorded before counts
            the wrong one.
    """

    device_settings: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    _counts: ClassVar[bool] = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._mark()

    def _mark(self) -> None:
        self._step_supports_amp_scaling = True
        self.layouts: int = self.__dict__.get("layouts", 0)
        # kept over a loaded state: a recording made before reads them until it is dropped
        self._tables: dict[tuple[int, Any], Tables] = self.__dict__.get("_tables", {})
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

    def tables_of(self, group: dict[str, Any], part: Any = None) -> Tables:
        """Where kernels over many tensors keep the addresses of this group's, or of a part of it."""
        found = self._tables.get((id(group), part))
        if found is None:
            from hotloop.kernels import Tables

            found = self._tables[id(group), part] = Tables()
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
        refusal = Refusal(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        for group in self.param_groups:
            for batch in self._batches(group, refusal):
                self.update(batch, group)
                if batch.has_masters and not batch.rounded:
                    torch._foreach_copy_(batch.parameters, batch.weights)
        masters.note_written()
        return loss

    def _batches(self, group: dict[str, Any], refusal: Refusal) -> Iterable[Batch]:
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
                batch = batches[key] = Batch(step, *refusal.on(weight.device))
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
                self.layouts += 1
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
                state["master"] = first_master(p) if value is None else new_master(value)
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
                    given, state = values.get(p), self.state.get(p)
                    if not is_sixteen_bit(p) or not p.requires_grad:
                        continue
                    if not state:
                        self._start(p, group, fresh, given)
                    elif "master" not in state:
                        # steps were made without: in fp32, or in 16 bits
                        widen_state(state)
                        state["master"] = first_master(p) if given is None else new_master(given)
                        self._hotloop_masters.add(p, state["master"])
                    elif given is not None:
                        state["master"].copy_(given)

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
        self._lay_out_state()
        self._mark()
        self._share_counters()

    def _lay_out_state(self) -> None:
        """State lies in memory as its parameter does, which kernels rely on; files keep no strides."""
        for p, state in self.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == p.shape and value.stride() != p.stride():
                    state[name] = torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)

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
