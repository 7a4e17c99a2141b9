"""Which settings are worth a trial on this machine for this script, in which order, and which are hopeless before one.

The order follows the doctor's findings; what no finding suggests comes after, in the order of what it usually gives. A
rung is pruned where Amdahl's bound on its gain is below what could be told from noise, where the machine or the script
has no use for it, or where the script's structure stops it: then with the change that would allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.tune.rung import Rung

__all__ = ["Ladder", "Pruned", "Shares", "build_ladder"]

_LEAST_SHARE = 0.02
# no model of use compiles, forward and backward, in less
_LEAST_COMPILE_S = 10.0

# finding of the doctor's -> levers that its fix corresponds to
_SUGGESTED = {
    "launch-bound": ("capture", "fused", "micro_batch"),
    "fusion": ("capture", "precision"),
    "tensor-cores": ("precision",),
    "data-loading": ("threads", "workers", "prefetch"),
    "blocking-copy": ("pin_memory", "prefetch", "workers"),
    "optimizer": ("fused", "capture"),
    "small-grids": ("micro_batch", "capture"),
    "accumulation-sync": ("micro_batch",),
    "host-stall": ("threads", "workers", "capture"),
    "host-sync": ("capture",),
}
_CAPTURED = """+ @loop.capture
+ def train(x, y):
+     loss = loss_of(model(x), y)
+     loop.backward(loss)
+     loop.update(optimizer, scheduler)
+     return loss"""


@dataclass(frozen=True)
class Pruned:
    """A lever that is not tried.

    Attributes:
        name: of the rung or lever. why: in words. diff: the change of the script that would allow it, or empty.
    """

    name: str
    why: str
    diff: str = ""


@dataclass(frozen=True)
class Shares:
    """Where the time goes, for the bounds.

    Attributes:
        data: share of a step that waits for the loader, 0..1. update: share that the optimizer takes.
        run_s: seconds that the whole run takes as it is; None if its length is not known.
    """

    data: float = 1.0
    update: float = 1.0
    run_s: float | None = None


@dataclass(frozen=True)
class Ladder:
    """Rungs in the order of trial, and what is not tried."""

    rungs: list[Rung]
    pruned: list[Pruned]


def build_ladder(
    facts: dict[str, Any],
    findings: Sequence[dict[str, Any]] = (),
    *,
    shares: Shares | None = None,
    exact: bool = False,
    extra: Sequence[Rung] = (),
) -> Ladder:
    """The ladder for what the probe saw.

    Args:
        facts: of the script as it is. findings: the doctor's, the most expensive first. shares: for the cost model.
        exact: leave out what cannot be bitwise the same. extra: rungs of the user's own; they come first.
    """
    shares = shares or Shares()
    pruned: list[Pruned] = []
    rungs: list[Rung] = []
    # on a CPU the number of threads comes first: where it is wrong, nothing else can be measured well
    first, last = ((_threads,), ()) if facts["device"] == "cpu" else ((), (_threads,))
    for make in (*first, _precision, _capture, _fused, _layout, _cudnn, _loader, _micro_batch, *last):
        rungs += make(facts, shares, pruned)
    if exact:
        dropped = [rung.name for rung in rungs if rung.lever == "precision"]
        if dropped:
            pruned.append(
                Pruned(", ".join(dropped), "another number format is never bitwise the same (--exact)")
            )
        rungs = [rung for rung in rungs if rung.lever != "precision"]
    order = _order(findings)
    why = dict(reversed(order))
    places = {lever: place for place, (lever, _) in reversed(list(enumerate(order)))}
    seen: dict[str, int] = {}
    choice = {}
    for rung in rungs:
        choice[rung.name] = seen[rung.lever] = seen.get(rung.lever, -1) + 1
    # one rung of each lever before the alternatives to it
    ranked = sorted(rungs, key=lambda rung: (choice[rung.name] > 0, places.get(rung.lever, len(order))))
    ranked = [
        Rung(r.name, r.settings, r.lever, f"doctor: {why[r.lever]}") if r.lever in why else r for r in ranked
    ]
    return Ladder([*extra, *ranked], pruned)


def _order(findings: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(lever, rule) of the findings, in their order."""
    return [(lever, f["rule"]) for f in findings for lever in _SUGGESTED.get(f["rule"], ())]


def _value(facts: dict[str, Any], name: str) -> Any:
    return facts["values"].get(name)


def _precision(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    supported, now = facts["supported"], _value(facts, "precision")
    found = []
    for name in ("tf32", "bf16", "fp16", "bf16-true", "fp8"):
        if name == now:
            continue
        known = supported.get("bf16" if name == "bf16-true" else name)
        if known is None:
            pruned.append(Pruned(f"precision={name}", f"{facts['device_name']} does not compute in it"))
        elif "emulated" in known:
            pruned.append(Pruned(f"precision={name}", f"{known} on {facts['device_name']}"))
        elif name in ("fp8", "bf16-true") and facts["parameters"] < 1_000_000:
            pruned.append(Pruned(f"precision={name}", "the model is too small to gain from it"))
        else:
            found.append(Rung(f"precision={name}", {"precision": name}))
    # the format that usually wins goes first: the others are then measured against it
    found.sort(
        key=lambda rung: ("bf16", "fp16", "tf32", "fp8", "bf16-true").index(str(rung.settings["precision"]))
    )
    return found


def _capture(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    device, captured = facts["device"], facts["captured"]
    modes = ["graph", "full", "compile"] if device == "cuda" else ["compile"]
    now = _value(facts, "capture")
    if not captured:
        place = facts.get("backward") or ""
        where = f"{Path(place.rpartition(':')[0]).name}:{place.rpartition(':')[2]} " if place else ""
        why = f"{where}the step is plain code, which is never captured; put it into a function under @loop.capture"
        pruned.append(Pruned("capture=" + "/".join(modes), why, _CAPTURED))
        return []
    found = []
    for mode in modes:
        running = now == mode or (now == "auto" and mode == "graph" and device == "cuda")
        reasons = [c["reason"] for c in captured if c.get("reason")]
        if mode in ("graph", "full") and reasons and now in ("auto", "graph", "full"):
            pruned.append(Pruned(f"capture={mode}", f"the step cannot be recorded: {reasons[0]}"))
        elif mode in ("compile", "full") and shares.run_s is not None and shares.run_s < _LEAST_COMPILE_S:
            why = f"the whole run takes {shares.run_s:.3g} s, and compiling alone more than {_LEAST_COMPILE_S:g} s"
            pruned.append(Pruned(f"capture={mode}", why))
        elif not running:
            found.append(Rung(f"capture={mode}", {"capture": mode}))
    return found


def _fused(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    able = [o for o in facts["optimizers"] if o["torch"] and o["type"] in ("Adam", "AdamW", "SGD", "Adagrad")]
    if not able or all(o["fused"] for o in able):
        why = "the optimizer runs fused already" if able else "the optimizer has no fused kernel"
        pruned.append(Pruned("fused=on", why))
        return []
    if shares.update < _LEAST_SHARE:
        pruned.append(
            Pruned("fused=on", f"the update is {shares.update:.1%} of a step: at most that is to be gained")
        )
        return []
    return [Rung("fused=on", {"fused": True})]


def _layout(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    if not facts["convolutions"]:
        pruned.append(Pruned("memory_format=channels_last", "the model has no convolutions over images"))
        return []
    if _value(facts, "memory_format") == "channels_last":
        return []
    return [Rung("memory_format=channels_last", {"memory_format": "channels_last"})]


def _threads(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    cores, now = facts["cores"], facts["threads"]
    wanted = sorted({cores, max(cores // 2, 1), 1} - {now}, reverse=True)
    if facts["device"] != "cpu":
        # there the host only fetches and launches; more threads than cores stand in each other's way
        wanted = [1] if now > 1 else []
    return [Rung(f"threads={n}", {"threads": n}) for n in wanted]


def _cudnn(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    if facts["device"] != "cuda" or not facts["convolutions"]:
        return []
    return [Rung("cudnn_benchmark=on", {"cudnn_benchmark": True})]


def _loader(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    names = "workers, prefetch, pin_memory"
    if facts["loader"] is None:
        pruned.append(
            Pruned(names, "no loader is prepared", "- for x, y in loader:\n+ loader = loop.prepare(loader)")
        )
        return []
    if not facts["by_index"]:
        pruned.append(Pruned(names, f"a {facts['loader']} is not read by index"))
        return []
    if shares.data < _LEAST_SHARE:
        pruned.append(
            Pruned(
                names, f"the loop waits for data {shares.data:.1%} of its time: at most that is to be gained"
            )
        )
        return []
    found = []
    now, cores = facts["workers"] or 0, facts["cores"]
    for n in sorted({1, 2, min(4, cores), min(8, cores)} - {now}):
        if n <= max(cores, 1):
            found.append(Rung(f"workers={n}", {"workers": n}))
    if facts["device"] != "cpu":
        found.append(Rung("prefetch=4", {"prefetch": 4}))
        found.append(Rung("pin_memory=off", {"pin_memory": False}))
    return found


def _micro_batch(facts: dict[str, Any], shares: Shares, pruned: list[Pruned]) -> list[Rung]:
    batch, accumulation = facts["batch_size"], facts["accumulation"]
    if not isinstance(batch, int) or not facts["by_index"] or facts["world"] > 1 or facts["captured"]:
        return []
    if _value(facts, "micro_batch") is not None:
        return []
    found = []
    if accumulation > 1:
        found.append(batch * accumulation)
    # halves may fit a cache that the whole does not
    found += [batch // 2] if batch >= 16 and batch % 2 == 0 and facts["device"] == "cpu" else []
    return [Rung(f"micro_batch={n}", {"micro_batch": n}) for n in found]
