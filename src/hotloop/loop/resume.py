"""A run's whole state as a snapshot, and a snapshot put back, so that training goes on as if never broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import CheckpointError
from hotloop.loop.modules import binding_of
from hotloop.loop.updates import updates_of
from hotloop.seeds import derive_seed, rng_state, seed_everything, set_rng_state

if TYPE_CHECKING:
    from hotloop.hardware.processes import Processes
    from hotloop.loop.checkpoint import Snapshot
    from hotloop.loop.window import Window
    from hotloop.state import HostState, ResidentState

__all__ = ["Registry", "apply_snapshot", "take_snapshot"]


@dataclass
class Registry:
    """Everything of a run that has a state, in the order it was prepared or registered."""

    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many of each there are."""
        return {name: len(getattr(self, name)) for name in self.__dataclass_fields__}


def take_snapshot(
    registry: Registry,
    *,
    window: Window,
    state: HostState | ResidentState,
    processes: Processes,
    device: torch.device,
    meta: dict[str, Any],
    means: Any,
) -> Snapshot:
    """The state of the run now. Collective over the processes; what differs between ranks is gathered to all."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    objects: dict[str, Any] = {}
    for i, module in enumerate(registry.modules):
        whole = module.state_dict()
        tensors[f"module{i}"] = {k: v.detach() for k, v in whole.items() if isinstance(v, torch.Tensor)}
        extra = {k: v for k, v in whole.items() if not isinstance(v, torch.Tensor)}
        if extra:
            objects[f"module{i}"] = extra
    for i, optimizer in enumerate(registry.optimizers):
        updates = updates_of(optimizer)
        counts = {} if updates is None else {"attempted": updates.attempted, "pending": updates.pending}
        if updates is not None and hasattr(updates, "applied"):
            counts["applied"] = updates.applied
        objects[f"optimizer{i}"] = {
            "class": type(optimizer).__name__,
            "state": _with_plain_rates(optimizer.state_dict()),
            "counts": counts,
        }
    for i, scheduler in enumerate(registry.schedulers):
        objects[f"scheduler{i}"] = scheduler.state_dict()
    for i, thing in enumerate(registry.registered):
        objects[f"registered{i}"] = thing.state_dict()
    mine = {
        "rng": rng_state(device),
        "loaders": [loader.state_dict() for loader in registry.loaders],
        "gradients": _waiting_gradients(registry, window),
        "means": means.state_dict(),
        "window": window.state_dict(),
    }
    objects["ranks"] = processes.gather_object(mine)
    objects["state"] = _state_of(state)
    from hotloop.loop.checkpoint import Snapshot

    return Snapshot(
        step=meta["updates"],
        tensors=tensors,
        objects=objects,
        meta=meta | {"world": processes.world, "counts": registry.counts()},
    )


def _with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with its settings as numbers, not as views into a table on the device."""
    groups = [{k: _plain_setting(v) for k, v in group.items()} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _plain_setting(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(_plain_setting, value)) if type(value) is tuple else value


def _waiting_gradients(registry: Registry, window: Window) -> list[dict[str, torch.Tensor]]:
    """Gradients of a window that is not complete yet; nothing between two windows."""
    if window.at_rest:
        return []
    return [
        {name: p.grad.detach().cpu() for name, p in module.named_parameters() if p.grad is not None}
        for module in registry.modules
    ]


def _state_of(state: HostState | ResidentState) -> dict[str, Any]:
    if not state.resident:
        return {"skipped": state.skipped}  # type: ignore[union-attr]
    refused, bad = state.read()  # type: ignore[union-attr]
    found: dict[str, Any] = {"skipped": refused, "bad": bad}
    if state.scale is not None:  # type: ignore[union-attr]
        found["scale"] = state.scale.state_dict()  # type: ignore[union-attr]
    return found


def apply_snapshot(
    snapshot: Snapshot,
    registry: Registry,
    *,
    folder: Any,
    window: Window,
    state: HostState | ResidentState,
    processes: Processes,
    device: torch.device,
    means: Any,
) -> None:
    """Put a snapshot back into the prepared objects.

    With another number of ranks, loaders keep the global order of the data; what ranks had summed up by themselves
    (waiting gradients, means) goes to rank 0; random streams of ranks that did not exist are derived from rank 0's.

    Raises:
        CheckpointError: the snapshot is of other objects than those prepared; names folder and difference. Some of
            them may have been loaded by then.
    """
    expected, found = registry.counts(), snapshot.meta.get("counts", {})
    if "counts" not in snapshot.meta or "ranks" not in snapshot.objects:
        raise CheckpointError(f"{folder}: this checkpoint was not written by Loop.save_state")
    if expected != found:
        raise CheckpointError(
            f"{folder}: the checkpoint holds {_count_text(found)}, but {_count_text(expected)} are prepared; prepare "
            "and register the same objects in the same order before resume"
        )
    _load_each(folder, "module", registry.modules, lambda i, m: m.load_state_dict(_module_state(snapshot, i)))
    _load_each(
        folder,
        "optimizer",
        registry.optimizers,
        lambda i, o: _load_optimizer(o, snapshot.objects[f"optimizer{i}"]),
    )
    # before the schedulers: a table on the device starts at the counts now in force
    _load_state(state, snapshot.objects["state"])
    _load_each(
        folder,
        "scheduler",
        registry.schedulers,
        lambda i, s: s.load_state_dict(snapshot.objects[f"scheduler{i}"]),
    )
    _load_each(
        folder,
        "registered object",
        registry.registered,
        lambda i, r: r.load_state_dict(snapshot.objects[f"registered{i}"]),
    )
    ranks = snapshot.objects["ranks"]
    mine = ranks[processes.rank] if processes.rank < len(ranks) else ranks[0]
    _load_each(folder, "loader", registry.loaders, lambda i, x: x.load_state_dict(mine["loaders"][i]))
    sums = mine if len(ranks) == processes.world else _sums_of(ranks, first=processes.is_main)
    window.load_state_dict(sums["window"])
    means.load_state_dict(sums["means"])
    _put_gradients(registry, sums["gradients"])
    if processes.rank < len(ranks):
        set_rng_state(mine["rng"], device)
    else:
        set_rng_state(mine["rng"], None)
        seed_everything(derive_seed(torch.initial_seed(), "rank", processes.rank, snapshot.step))


def _count_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing"


def _module_state(snapshot: Snapshot, i: int) -> dict[str, Any]:
    return {**snapshot.tensors.get(f"module{i}", {}), **snapshot.objects.get(f"module{i}", {})}


def _load_each(folder: Any, what: str, things: Sequence[Any], load: Any) -> None:
    for i, thing in enumerate(things):
        try:
            load(i, thing)
        except (KeyError, RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{folder}: {what} number {i} ({type(thing).__name__}) does not fit the checkpoint: {error}"
            ) from error


def _load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    saved_class = saved.get("class", type(optimizer).__name__)
    if saved_class != type(optimizer).__name__:
        raise ValueError(f"the checkpoint holds the state of a {saved_class}")
    fused = [group.get("fused") for group in optimizer.param_groups]
    held = [
        {k: v for k, v in group.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(saved["state"])
    for group, mine in zip(optimizer.param_groups, fused, strict=True):
        # which kernel computes is a matter of this machine, not of the saved one
        if "fused" in group:
            group["fused"] = mine
    for group, tensors in zip(optimizer.param_groups, held, strict=True):
        # a rate that is a number and one that is a tensor are computed with otherwise
        for name, tensor in tensors.items():
            if isinstance(group.get(name), int | float):
                group[name] = tensor.fill_(group[name])
    updates = updates_of(optimizer)
    if updates is not None:
        updates.restart(saved["counts"])


def _sums_of(ranks: list[dict[str, Any]], *, first: bool) -> dict[str, Any]:
    """What all ranks together had summed up, for the first of another number of ranks; nothing for the rest."""
    if not first:
        return {
            "window": {**ranks[0]["window"], "totals": []},
            "means": {"host": {}, "device": {}},
            "gradients": [],
        }
    host: dict[str, list[float]] = {}
    device: dict[str, torch.Tensor] = {}
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in ranks[0]["gradients"]]
    for rank in ranks:
        for name, sums in rank["means"]["host"].items():
            host[name] = [a + b for a, b in zip(host.get(name, [0.0, 0.0]), sums, strict=True)]
        for name, lines in rank["means"]["device"].items():
            device[name] = device[name] + lines if name in device else lines
        for into, found in zip(gradients, rank["gradients"], strict=True):
            for name, gradient in found.items():
                into[name] = into[name] + gradient if name in into else gradient
    totals = [sum(parts) for parts in zip(*(rank["window"]["totals"] for rank in ranks), strict=True)]
    return {
        "window": {**ranks[0]["window"], "totals": totals},
        "means": {"host": host, "device": device},
        "gradients": gradients,
    }


def _put_gradients(registry: Registry, gradients: list[dict[str, torch.Tensor]]) -> None:
    """Gradients of the window that was open when the state was saved; none where there was none."""
    for i, module in enumerate(registry.modules):
        saved = gradients[i] if i < len(gradients) else {}
        for name, p in module.named_parameters():
            dtype = getattr(p, "grad_dtype", None) or p.dtype
            p.grad = saved[name].to(p.device, dtype) if name in saved else None
        binding = binding_of(module)
        if binding is not None and binding.keeper is not None:
            binding.keeper.accept()


def _load_state(state: HostState | ResidentState, saved: dict[str, Any]) -> None:
    state.close_losses()
    if not state.resident:
        state.skipped = saved["skipped"]  # type: ignore[union-attr]
        return
    state.load(saved["skipped"], saved.get("bad", 0))  # type: ignore[union-attr]
    if state.scale is not None and "scale" in saved:  # type: ignore[union-attr]
        state.scale.load_state_dict(saved["scale"])  # type: ignore[union-attr]
