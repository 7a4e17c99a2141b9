"""LSTM, GRU and plain RNN: a projection of the inputs at once, then a loop over time; or one step, with state kept.

Formulas are torch.nn.LSTM's and torch.nn.GRU's (gate order i, f, g, o and r, z, n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Array, Expr, Loop, Map, Node, Taps, View, constant, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, full_region, register
from hotloop.native.lowering.contraction import project
from hotloop.native.lowering.pointwise import binary, unary

__all__: list[str] = []


@dataclass
class _Cell:
    """One layer in one direction: weights, biases, sizes."""

    kind: str
    input_weight: Array
    hidden_weight: Array
    input_bias: Array | None
    hidden_bias: Array | None
    projection: Array | None

    @property
    def units(self) -> int:
        return self.hidden_weight.shape[0] // {"lstm": 4, "gru": 3}.get(self.kind, 1)

    @property
    def outputs(self) -> int:
        return self.units if self.projection is None else int(self.projection.shape[0])

    def biases(self) -> tuple[Array | None, Array | None]:
        """What is added to the input's part and to the hidden part; only GRU must keep them apart."""
        a, b = self.input_bias, self.hidden_bias
        if self.kind == "gru" or a is None or b is None:
            return a, b
        return (a.astype(np.float64) + b).astype(np.float32), None


@dataclass
class _Stack:
    """A whole recurrent call: cells by layer and direction, and how it was called."""

    kind: str
    cells: list[list[_Cell]]
    batch_first: bool
    initial: list[Any]

    @property
    def directions(self) -> int:
        return len(self.cells[0])


def _read(context: Context, call: Call) -> _Stack:
    kind = call.op.partition(".")[0]
    initial, flat, has_bias, layers, _, _, bidirectional, batch_first = call.args[1:9]
    per_cell = 4 if has_bias else 2
    directions = 2 if bidirectional else 1
    if kind == "lstm" and len(flat) == (per_cell + 1) * layers * directions:
        per_cell += 1
    cells = []
    for layer in range(layers):
        row = []
        for direction in range(directions):
            start = (layer * directions + direction) * per_cell
            arrays = [context.array(ref) for ref in flat[start : start + per_cell]]
            biases = arrays[2:4] if has_bias else [None, None]
            projected = kind == "lstm" and per_cell == 2 + 2 * bool(has_bias) + 1
            row.append(
                _Cell(kind, arrays[0], arrays[1], biases[0], biases[1], arrays[-1] if projected else None)
            )
        cells.append(row)
    return _Stack(kind, cells, bool(batch_first), list(initial) if kind == "lstm" else [initial])


def _pull(context: Context, call: Call, regions: Any) -> list[tuple[Ref, Region]]:
    stack = _read(context, call)
    ref = call.args[0]
    region = list(full_region(context.shape(ref)))
    time = context.times.get(f"{call.name}#0")
    if time is not None:
        region[time.dim] = (context.window - 1 - context.times[ref.name].shift,)
    found = [(ref, tuple(region))]
    found += [(value, full_region(context.shape(value))) for value in stack.initial]
    return found


def _time(context: Context, call: Call) -> list[Time | None] | None:
    time = context.time(call.args[0])
    stack = _read(context, call)
    own = 1 if stack.batch_first and len(context.shape(call.args[0])) == 3 else 0
    # what is right at the newest position only has no history that a state could have seen
    if time is None or time.dim != own or time.pinned or stack.directions == 2:
        return None
    if not all(context.is_constant(value) for value in stack.initial):
        return None
    return [time] + [None] * (len(call.shapes) - 1)


def _lower(context: Context, call: Call, regions: Any) -> Any:
    stack = _read(context, call)
    pulled = _pull(context, call, regions)
    view = context.take(*pulled[0])
    batched = len(view.shape) == 3
    if not batched:
        view = view.insert(1)
    elif stack.batch_first:
        view = view.permute([1, 0, 2])
    initial = [context.take(*item) for item in pulled[1:]]
    if not batched:
        initial = [item.insert(1) for item in initial]
    streaming = f"{call.name}#0" in context.times
    final: list[list[View]] = []
    for layer, cells in enumerate(stack.cells):
        outputs = []
        for direction, cell in enumerate(cells):
            place = layer * stack.directions + direction
            states = [item.select(0, place) for item in initial]
            run = _run_step if streaming else _run_window
            out, ends = run(context, cell, view, states, direction == 1)
            outputs.append(out)
            final.append(ends)
        view = outputs[0] if len(outputs) == 1 else _side_by_side(context, outputs)
    results: list[View | None] = [_arrange(view, batched, stack.batch_first)]
    full = full_region(call.shapes[0])
    if regions[0] is None:
        results[0] = None
    elif not streaming and results[0] is not None:
        results[0] = context.subset(results[0], full, regions[0])
    elif results[0] is not None:
        have = list(full)
        time = context.times[f"{call.name}#0"]
        have[time.dim] = regions[0][time.dim]
        results[0] = context.subset(results[0], tuple(have), regions[0])
    for index in range(1, len(call.shapes)):
        if index >= len(regions) or regions[index] is None:
            results.append(None)
            continue
        ends = [item[index - 1] for item in final]
        out = context.temp((len(ends), *ends[0].shape))
        for place, end in enumerate(ends):
            context.emit(Map(end.shape, [(out.select(0, place), load(end))]))
        result = out if batched else out.select(1, 0)
        results.append(context.subset(result, full_region(call.shapes[index]), regions[index]))
    return results


def _arrange(view: View, batched: bool, batch_first: bool) -> View:
    if not batched:
        return view.select(1, 0)
    return view.permute([1, 0, 2]) if batch_first else view


def _side_by_side(context: Context, parts: list[View]) -> View:
    time, batch, units = parts[0].shape
    out = context.temp((time, batch, units * len(parts)))
    for place, part in enumerate(parts):
        context.emit(Map(part.shape, [(out.slice(2, place * units, units), load(part))]))
    return out


def _gates(context: Context, cell: _Cell, hidden: View, epilogue: Expr | None) -> tuple[Taps, View]:
    """The hidden part of all gates, [B, gates]; the node is not yet emitted."""
    out = context.temp((hidden.shape[0], cell.hidden_weight.shape[0]))
    rows = (np.arange(hidden.shape[0]) * hidden.strides[0]).astype(np.int64).reshape(-1, 1)
    base = View(hidden.buffer, (), (), hidden.offset, hidden.terms)
    weight = np.ascontiguousarray(cell.hidden_weight.T[None])
    return Taps(base, rows, 1, weight, cell.biases()[1], out, epilogue, reach=hidden), out


def _update(
    cell: _Cell, gates: View, before: View | None, hidden: View, state: View | None, stores: list[View]
) -> Map:
    """The cell's elementwise part. `gates`: summed parts (GRU: the hidden part, with the input's in `before`);
    `stores`: where the new hidden value (and the new cell value) go."""
    units = cell.units
    shape = (gates.shape[0], units)

    def gate(view: View, index: int) -> Expr:
        return load(view.slice(1, index * units, units))

    if cell.kind == "lstm":
        assert state is not None
        i, f, o = (unary("sigmoid", gate(gates, k)) for k in (0, 1, 3))
        g = unary("tanh", gate(gates, 2))
        new = binary("add", binary("mul", f, load(state)), binary("mul", i, g))
        return Map(shape, [(stores[1], new), (stores[0], binary("mul", o, unary("tanh", new)))])
    if cell.kind == "gru":
        assert before is not None
        r, z = (unary("sigmoid", binary("add", gate(before, k), gate(gates, k))) for k in (0, 1))
        n = unary("tanh", binary("add", gate(before, 2), binary("mul", r, gate(gates, 2))))
        new = binary("add", n, binary("mul", z, binary("sub", load(hidden), n)))
        return Map(shape, [(stores[0], new)])
    return Map(shape, [(stores[0], unary("tanh" if cell.kind == "rnn_tanh" else "relu", gate(gates, 0)))])


def _project_hidden(context: Context, cell: _Cell, raw: View, target: View) -> Node:
    assert cell.projection is not None
    rows = (np.arange(raw.shape[0]) * raw.strides[0]).astype(np.int64).reshape(-1, 1)
    base = View(raw.buffer, (), (), raw.offset, raw.terms)
    return Taps(base, rows, 1, np.ascontiguousarray(cell.projection.T[None]), None, target, reach=raw)


def _run_window(
    context: Context, cell: _Cell, view: View, states: list[View], reverse: bool
) -> tuple[View, list[View]]:
    """All of [T, B, F]; returns the outputs [T, B, H] and the last states."""
    steps, batch = view.shape[:2]
    before = project(context, view, cell.input_weight, cell.biases()[0])
    width = before.shape[1]
    before = before.reshape((steps, batch, width))  # type: ignore[assignment]
    # row 0 (or, backwards, row T) is the state before the first step
    zero = all(item.buffer.kind == "const" and not np.any(item.buffer.data) for item in states)
    shape = (steps + 1, batch, cell.outputs)
    history = context.fixed(shape) if zero else context.temp(shape)
    if not zero:
        context.emit(Map(states[0].shape, [(history.select(0, steps if reverse else 0), load(states[0]))]))
    memory = None
    if cell.kind == "lstm":
        memory = context.temp((batch, cell.units))
        context.emit(Map(memory.shape, [(memory, constant(0.0) if zero else load(states[1]))]))
    symbol = f"step{len(context.graph.nodes)}"

    def at(start: View, index: int) -> View:
        stride = start.strides[0]
        first = start.select(0, index)
        return View(
            first.buffer,
            first.shape,
            first.strides,
            first.offset,
            (*first.terms, (symbol, -stride if reverse else stride)),
        )

    old, new = (at(history, steps), at(history, steps - 1)) if reverse else (at(history, 0), at(history, 1))
    inputs = at(before, steps - 1 if reverse else 0)
    adds = None if cell.kind == "gru" else binary("add", Expr("acc"), load(inputs))
    node, gates = _gates(context, cell, old, adds)
    target = new if cell.projection is None else context.temp((batch, cell.units))
    stores = [target] + ([memory] if memory is not None else [])
    body: list[Node] = [node, _update(cell, gates, inputs, old, memory, stores)]
    if cell.projection is not None:
        body.append(_project_hidden(context, cell, target, new))
    context.emit(Loop(symbol, steps, body))
    for item in body:
        item.origin = context.origin
    out = history.slice(0, 0 if reverse else 1, steps)
    last = history.select(0, 0 if reverse else steps)
    return out, [last] + ([memory] if memory is not None else [])


def _run_step(
    context: Context, cell: _Cell, view: View, states: list[View], _reverse: bool
) -> tuple[View, list[View]]:
    """The newest event alone, [1, B, F]; the states live between calls."""

    def keep(item: View) -> View:
        data = item.buffer.data
        assert data is not None
        listed = np.lib.stride_tricks.as_strided(
            data[item.offset :], item.shape, [s * data.itemsize for s in item.strides]
        )
        return context.state(item.shape, np.ascontiguousarray(listed))

    hidden = keep(states[0])
    memory = keep(states[1]) if cell.kind == "lstm" else None
    batch = view.shape[1]
    node, old = _gates(context, cell, hidden, None)
    node.origin = context.origin
    context.early.append(node)
    adds = None if cell.kind == "gru" else binary("add", Expr("acc"), load(old))
    new = project(context, view.select(0, 0), cell.input_weight, cell.biases()[0], adds)
    target = hidden if cell.projection is None else context.temp((batch, cell.units))
    stores = [target] + ([memory] if memory is not None else [])
    if cell.kind == "gru":
        context.emit(_update(cell, old, new, hidden, None, stores))
    else:
        context.emit(_update(cell, new, None, hidden, memory, stores))
    if cell.projection is not None:
        context.emit(_project_hidden(context, cell, target, hidden))
    return hidden.insert(0), [hidden] + ([memory] if memory is not None else [])


register("lstm.input gru.input rnn_tanh.input rnn_relu.input", Rule(_pull, _lower, _time))
