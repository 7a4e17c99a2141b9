"""Lowering calls to nodes: which part of every value is needed, which dimension is time, and where values lie.

Three passes over the calls. Forward, only for a state machine: which dimension of each value is time. Backward:
the region of each value that somebody needs, one list of indices for each dimension; so of a convolution whose last
output alone is used only the cone above that output is computed. Forward again: each call lowers itself for its region.

A state machine is the same thing with one restriction: a value that runs along time is computed at the newest
position only, older positions come from a ring that keeps them. What cannot be computed position by position takes
the whole window from rings and is computed anew at each event. Index i of a time dimension with shift s lies at
time i + s; the newest time is T - 1; before the first event there are zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hotloop.native.capture import Call, Captured, Ref
from hotloop.native.faults import UnsupportedOpError
from hotloop.native.graph import (
    Array,
    Buffer,
    Expr,
    Graph,
    Map,
    Node,
    Origin,
    Push,
    View,
    load,
    whole,
)

__all__ = ["RULES", "Context", "Region", "Rule", "Time", "Value", "full_region", "positions_of", "register"]

Region = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Time:
    """Which dimension is time, and how far index 0 lies after the window's first event. `pinned`: right at the
    newest position only."""

    dim: int
    shift: int
    pinned: bool = False


@dataclass(frozen=True)
class Rule:
    """How a call is treated. `pull`: the regions of its inputs for a region of its result. `lower`: emit nodes and
    return a view with the region's shape (several results: a list). `time`: the result's time dimension. `is_view`:
    it computes nothing, so old positions of its result are old positions of its input."""

    pull: Callable[[Context, Call, Any], list[tuple[Ref, Region]]]
    lower: Callable[[Context, Call, Any], Any]
    time: Callable[[Context, Call], Any] = lambda _context, _call: None
    is_view: bool = False


RULES: dict[str, Rule] = {}


def register(names: str, rule: Rule) -> None:
    """Make `rule` the rule of each operation in the blank-separated `names`."""
    for name in names.split():
        RULES[name] = rule


def full_region(shape: Sequence[int]) -> Region:
    """Every index of every dimension."""
    return tuple(tuple(range(size)) for size in shape)


def positions_of(wanted: Sequence[int], have: Sequence[int]) -> list[int]:
    """Where each of `wanted` stands in `have`."""
    place = {index: position for position, index in enumerate(have)}
    return [place[index] for index in wanted]


def _union(a: Region | None, b: Region) -> Region:
    if a is None:
        return b
    return tuple(x if x == y else tuple(sorted(set(x) | set(y))) for x, y in zip(a, b, strict=True))


def _contains(outer: Region, inner: Region) -> bool:
    return all(a == b or set(b) <= set(a) for a, b in zip(outer, inner, strict=True))


def _volume(region: Region) -> int:
    return int(np.prod([len(listed) for listed in region], dtype=np.int64))


@dataclass
class Value:
    """What is known of a lowered value: a view of `region`; `now` is its newest position alone."""

    view: View
    region: Region
    now: View | None = None


@dataclass
class Context:
    """The state of one lowering. `window`: events in the example window of a state machine, 0 for a plain model."""

    captured: Captured
    graph: Graph
    window: int = 0
    times: dict[str, Time] = field(default_factory=dict)
    need: dict[str, Region] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    static: set[str] = field(default_factory=set)
    early: list[Node] = field(default_factory=list)
    consts: dict[tuple[str, Region], View] = field(default_factory=dict)
    time_last: set[str] = field(default_factory=set)
    origin: Origin = field(default_factory=Origin)
    in_early: bool = False

    # ---- asking about values

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The full shape of a value or constant."""
        if ref.name in self.captured.constants:
            return tuple(self.captured.constants[ref.name].shape)
        return self.shapes[ref.name]

    def __post_init__(self) -> None:
        self.views: dict[str, Call] = {}
        self.parts: dict[str, list[Region]] = {}
        self.pieces: dict[str, list[Value]] = {}
        self.shapes: dict[str, tuple[int, ...]] = dict(self.captured.input_shapes)
        for call in self.captured.calls:
            for index, shape in enumerate(call.shapes):
                self.shapes[call.name if len(call.shapes) == 1 else f"{call.name}#{index}"] = shape
            self.shapes.setdefault(f"{call.name}#0", call.shapes[0])

    def is_constant(self, value: Any) -> bool:
        """Whether an argument is a constant tensor."""
        return isinstance(value, Ref) and value.name in self.captured.constants

    def array(self, value: Any, what: str = "the weight") -> Array:
        """A constant tensor as float32.

        Raises:
            UnsupportedOpError: it is computed from the input.
        """
        if not self.is_constant(value):
            raise UnsupportedOpError(
                f"{self.origin}: {what} is computed from the input, which has no C form here"
            )
        tensor = self.captured.constants[value.name].detach()
        return np.ascontiguousarray(tensor.to(torch.float32).cpu().numpy())

    def time(self, value: Any) -> Time | None:
        """The time dimension of an argument, if it has one."""
        return self.times.get(value.name) if isinstance(value, Ref) else None

    def newest(self, name: str) -> int:
        """The index of the newest position in the time dimension of a value."""
        return self.window - 1 - self.times[name].shift

    # ---- making nodes

    def emit(self, node: Node) -> None:
        """Append a node."""
        node.origin = self.origin
        self.graph.nodes.append(node)

    def temp(self, shape: Sequence[int]) -> View:
        """A new contiguous value in the arena."""
        return whole(Buffer("temp", int(np.prod(shape, dtype=np.int64))), shape)

    def state(self, shape: Sequence[int], initial: Array | None = None) -> View:
        """A new value that is kept between calls; starts as zeros or `initial`."""
        data = np.zeros(shape, np.float32) if initial is None else np.asarray(initial, np.float32)
        return whole(Buffer("state", data.size, np.ascontiguousarray(data).reshape(-1)), shape)

    def fixed(self, shape: Sequence[int], value: float = 0.0) -> View:
        """A new value in the arena that is filled once, on creation; parts of it may be written later."""
        size = int(np.prod(shape, dtype=np.int64))
        return whole(Buffer("fixed", size, np.full(size, value, np.float32)), shape)

    def const(self, data: Array) -> View:
        """A constant array."""
        data = np.ascontiguousarray(data, np.float32)
        return whole(Buffer("const", data.size, data.reshape(-1)), data.shape)

    def store(self, shape: Sequence[int], expr: Expr) -> View:
        """Evaluate an expression elementwise into a new value."""
        out = self.temp(shape)
        self.emit(Map(tuple(shape), [(out, expr)]))
        return out

    def copy(self, view: View) -> View:
        """The same values, contiguous."""
        return self.store(view.shape, load(view))

    def compact(self, view: View) -> View:
        """The view, or a contiguous copy of it."""
        return view if view.contiguous else self.copy(view)

    def reshape(self, view: View, shape: Sequence[int]) -> View:
        """The view under another shape, copied if it must be."""
        found = view.reshape(shape)
        if found is None:
            found = self.copy(view).reshape(shape)
        assert found is not None
        return found

    # ---- reading values

    def take(self, value: Any, region: Region | None = None) -> View:
        """A view of exactly `region` (default: all) of an argument."""
        shape = self.shape(value)
        region = full_region(shape) if region is None else region
        if self.is_constant(value):
            return self._take_constant(value.name, region)
        if value.name in self.views:
            return self._take_view(self.views[value.name], region)
        for piece in self.pieces.get(value.name, ()):
            if _contains(piece.region, region):
                return self.subset(piece.view, piece.region, region)
        found = self.values[value.name]
        time = self.times.get(value.name)
        if time is not None and found.now is not None and region[time.dim] == (self.newest(value.name),):
            have = (*found.region[: time.dim], region[time.dim], *found.region[time.dim + 1 :])
            return self.subset(found.now, have, region)
        return self.subset(found.view, found.region, region)

    def _take_view(self, call: Call, region: Region) -> View:
        # lowered for the very region that is asked for, so that the newest position is not read through a ring
        # what is copied after the event is no source for what is done before it
        key = (call.name + "|early" * self.in_early, region)
        if key not in self.consts:
            saved, self.origin = self.origin, call.origin
            self.consts[key] = RULES[call.op].lower(self, call, region)
            self.origin = saved
        return self.consts[key]

    def _take_constant(self, name: str, region: Region) -> View:
        key = (name, region)
        if key not in self.consts:
            data = self.captured.constants[name].detach().to(torch.float32).cpu().numpy()
            self.consts[key] = self.const(data[np.ix_(*region)] if region else data)
        return self.consts[key]

    def subset(self, view: View, have: Region, want: Region) -> View:
        """Narrow a view of the region `have` to the region `want`."""
        for dim, (old, new) in enumerate(zip(have, want, strict=True)):
            if old == new:
                continue
            places = positions_of(new, old)
            steps = {b - a for a, b in itertools.pairwise(places)}
            if len(steps) <= 1:
                view = view.slice(dim, places[0] if places else 0, len(places), steps.pop() if steps else 1)
            else:
                view = self.gather(view, dim, places)
        return view

    def gather(self, view: View, dim: int, places: list[int]) -> View:
        """A copy of the given positions along `dim`, in that order."""
        shape = (*view.shape[:dim], len(places), *view.shape[dim + 1 :])
        out = self.temp(shape)
        start = 0
        while start < len(places):
            stop = start + 1
            step = places[stop] - places[start] if stop < len(places) else 1
            while stop < len(places) and places[stop] - places[stop - 1] == step:
                stop += 1
            part = view.slice(dim, places[start], stop - start, step)
            self.emit(Map(part.shape, [(out.slice(dim, start, stop - start), load(part))]))
            start = stop
        return out

    # ---- the passes

    def run(self) -> None:
        """Lower everything.

        Raises:
            UnsupportedOpError: an operation has no rule.
            StreamingError: nothing of the model runs along the window.
        """
        for call in self.captured.calls:
            if call.op not in RULES:
                raise UnsupportedOpError(_explain_unsupported(call))
        while not self._find_needs():
            pass
        for name in self.captured.inputs:
            self._bind_input(name)
        for call in self.captured.calls:
            self._lower(call)
        self._bind_outputs()
        self.graph.nodes = self.early + self.graph.nodes

    def _find_needs(self) -> bool:
        """One attempt at the first two passes; False if a value had to be declared static and all starts anew."""
        self.need.clear()
        self.parts.clear()
        self.time_last.clear()
        if self.window:
            base = self.times.copy()
            self.times = {name: base[name] for name in self.captured.inputs if name in base}
            for call in self.captured.calls:
                found = None if call.name in self.static else RULES[call.op].time(self, call)
                if isinstance(found, list):
                    for index, time in enumerate(found):
                        if time is not None:
                            self.times[f"{call.name}#{index}"] = time
                elif found is not None:
                    self.times[call.name] = found
        for output in self.captured.outputs:
            if isinstance(output, Ref) and not self.is_constant(output):
                region = full_region(self.shape(output))
                time = self.times.get(output.name)
                if time is not None:
                    region = (*region[: time.dim], (self.newest(output.name),), *region[time.dim + 1 :])
                self.need[output.name] = _union(self.need.get(output.name), region)
                self.parts.setdefault(output.name, []).append(region)
        return all(self._pull(call) for call in reversed(self.captured.calls))

    def _pull(self, call: Call) -> bool:
        rule = RULES[call.op]
        wanted = self._wanted(call)
        if wanted is None:
            return True
        names = (
            [call.name] if len(call.shapes) == 1 else [f"{call.name}#{i}" for i in range(len(call.shapes))]
        )
        for name in names:
            time = self.times.get(name)
            if time is None or name not in self.need:
                continue
            listed = self.need[name][time.dim]
            newest = self.newest(name)
            if (
                listed[-1] > newest
                or newest >= self.shapes[name][time.dim]
                or (time.pinned and listed != (newest,))
            ):
                self.static.add(call.name)
                return False
        # views are lowered for each region that is asked for, so each is passed on by itself
        for each in self.parts.get(call.name, [wanted]) if rule.is_view else [wanted]:
            for ref, region in rule.pull(self, call, each):
                if self.is_constant(ref):
                    continue
                self.need[ref.name] = _union(self.need.get(ref.name), region)
                known = self.parts.setdefault(ref.name, [])
                if region not in known:
                    known.append(region)
                if rule.is_view and call.name in self.time_last:
                    self.time_last.add(ref.name)
        return True

    def _wanted(self, call: Call) -> Any:
        """The region to compute of a call (several results: a list, None where nobody asks)."""
        if len(call.shapes) == 1 and f"{call.name}#0" not in self.need:
            return self._computed(call, call.name)
        found = [self._computed(call, f"{call.name}#{index}") for index in range(len(call.shapes))]
        return found if any(item is not None for item in found) else None

    def _computed(self, call: Call, name: str) -> Region | None:
        region = self.need.get(name)
        time = self.times.get(name)
        if region is None or time is None or RULES[call.op].is_view:
            return region
        return (*region[: time.dim], (self.newest(name),), *region[time.dim + 1 :])

    def _bind_input(self, name: str) -> None:
        shape = self.captured.input_shapes[name]
        dtype = str(self.captured.input_dtypes[name]).removeprefix("torch.")
        time = self.times.get(name)
        if time is not None:
            shape = (*shape[: time.dim], 1, *shape[time.dim + 1 :])
        view = whole(Buffer("input", int(np.prod(shape, dtype=np.int64)), name=name, dtype=dtype), shape)
        self.graph.inputs.append((name, view))
        self._define(name, view, full_region(self.captured.input_shapes[name]))

    def _lower(self, call: Call) -> None:
        wanted = self._wanted(call)
        if wanted is None:
            return
        if RULES[call.op].is_view:
            self.views[call.name] = call
            return
        self.origin = call.origin
        pieces = self._find_pieces(call)
        if pieces:
            self.pieces[call.name] = [
                Value(RULES[call.op].lower(self, call, region), region) for region in pieces
            ]
            return
        result = RULES[call.op].lower(self, call, wanted)
        if isinstance(result, list):
            for index, view in enumerate(result):
                if view is not None:
                    self._define(f"{call.name}#{index}", view, wanted[index])
        elif isinstance(wanted, list):
            self._define(f"{call.name}#0", result, wanted[0])
        else:
            self._define(call.name, result, wanted)

    def _find_pieces(self, call: Call) -> list[Region]:
        """The regions of a linear layer to compute one by one, where together they are much less than the smallest
        block around them: of queries, keys and values in one layer, say, only the last query."""
        listed = self.parts.get(call.name, [])
        if call.op != "linear" or len(listed) < 2 or call.name in self.times:
            return []
        largest = [a for a in listed if not any(a != b and _contains(b, a) for b in listed)]
        apart = sum(_volume(region) for region in largest)
        return largest if apart <= 0.8 * _volume(self.need[call.name]) else []

    def _define(self, name: str, view: View, region: Region) -> None:
        time = self.times.get(name)
        wanted = self.need.get(name)
        if time is None or wanted is None:
            self.values[name] = Value(view, region)
            return
        newest = self.newest(name)
        depth = newest - wanted[time.dim][0] + 1
        # a call that was asked for several regions has computed their union
        base = (*region[: time.dim], (newest,), *region[time.dim + 1 :])
        if depth == 1:
            self.values[name] = Value(view, base, view)
            return
        ring = self.ring(view, time.dim, depth, last=name in self.time_last)
        listed = tuple(range(newest - depth + 1, newest + 1))
        self.values[name] = Value(ring, (*region[: time.dim], listed, *region[time.dim + 1 :]), view)

    def ring(self, view: View, dim: int, length: int, *, last: bool = False, initial: float = 0.0) -> View:
        """Keep the last `length` positions of a value along `dim` (size 1 there); a view of them, oldest first."""
        rest = [d for d in range(len(view.shape)) if d != dim]
        flat = view.permute([*rest, dim])
        size = int(np.prod([view.shape[d] for d in rest], dtype=np.int64))
        source = self.reshape(flat, (size,))
        data = np.full(2 * length * size, initial, np.float32)
        buffer = Buffer("state", data.size, data, name=f"ring of {length}")
        stride, inner = (1, 2 * length) if last else (size, 1)
        symbol = f"ring{length}"
        if length not in self.graph.rings:
            self.graph.rings.append(length)
        target = View(buffer, (size,), (inner,), 0, ((symbol, stride),))
        self.emit(Push(source, target, length, stride))
        shape = [view.shape[d] for d in rest]
        strides = [s * inner for s in _row_strides(shape)]
        window = View(buffer, (*shape, length), (*strides, stride), stride, ((symbol, stride),))
        order = [*rest, dim]
        return window.permute([order.index(d) for d in range(len(order))])

    def _bind_outputs(self) -> None:
        for index, output in enumerate(self.captured.outputs):
            if isinstance(output, torch.Tensor):
                view = self.const(output.to(torch.float32).numpy())
                self.graph.output_rows.append(None)
            else:
                shape = self.shape(output)
                region = full_region(shape)
                time = self.times.get(output.name)
                if time is not None:
                    region = (*region[: time.dim], (self.newest(output.name),), *region[time.dim + 1 :])
                    self.graph.output_rows.append((time.dim, self.newest(output.name)))
                else:
                    self.graph.output_rows.append(None)
                view = self.take(output, region)
            out = whole(Buffer("output", view.count, name=f"output_{index}"), view.shape)
            self.origin = Origin("output")
            self.emit(Map(view.shape, [(out, load(view))]))
            self.graph.outputs.append((f"output_{index}", out))

    @contextmanager
    def before_event(self) -> Iterator[None]:
        """Nodes emitted inside go before all others: they read only what older events left."""
        saved, self.graph.nodes, self.in_early = self.graph.nodes, [], True
        try:
            yield
        finally:
            self.early += self.graph.nodes
            self.graph.nodes, self.in_early = saved, False

    def validity(self, length: int) -> View:
        """A mask over a ring of `length`: 0 where an event has been, minus infinity where none has yet."""
        key = (f"valid{length}", ())
        if key not in self.consts:
            # it depends on no input
            with self.before_event():
                zero = whole(self.const(np.zeros(1, np.float32)).buffer, (1,))
                self.consts[key] = self.ring(zero, 0, length, initial=-np.inf)
        return self.consts[key]

    def refuse(self, call: Call, why: str) -> UnsupportedOpError:
        """An error about a call whose rule does not cover what it asks."""
        return UnsupportedOpError(f"{call.origin}: {why}")


def _row_strides(shape: Sequence[int]) -> list[int]:
    strides, run = [], 1
    for size in reversed(shape):
        strides.append(run)
        run *= size
    return strides[::-1]


def _explain_unsupported(call: Call) -> str:
    import difflib

    base = call.op.partition(".")[0]
    near = difflib.get_close_matches(call.op, list(RULES), n=3, cutoff=0.5) or difflib.get_close_matches(
        base, list(RULES), n=3, cutoff=0.4
    )
    shapes = ", ".join(str(shape) for shape in call.shapes)
    nearest = f" Nearest supported: {', '.join(near)}." if near else ""
    return f"no C form for {call.origin}, result {shapes}.{nearest}"
