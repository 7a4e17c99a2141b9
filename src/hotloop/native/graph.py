"""The intermediate form: buffers, strided views on them, expressions, and the few kinds of node that C is made of.

All shapes are known. Values are float32; integers are carried as floats, exact up to 2**24. A view is a torch-like
(shape, strides, offset) over one buffer, so permuting, slicing and expanding cost nothing. `terms` add a runtime
offset, symbol times stride: the position of a ring (streaming) or the counter of a loop over time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Buffer",
    "Expr",
    "Graph",
    "Lookup",
    "Loop",
    "Map",
    "MatMul",
    "Node",
    "Norm",
    "Origin",
    "Push",
    "Reduce",
    "Softmax",
    "Taps",
    "View",
    "constant",
    "contiguous_strides",
    "load",
    "whole",
]

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Origin:
    """Where in the user's model a node comes from."""

    operation: str = ""
    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = f" in module {self.module!r}" if self.module else ""
        return f"{self.operation}{where}" + (f" ({self.line})" if self.line else "")


@dataclass(eq=False)
class Buffer:
    """A run of `size` elements. Kinds: input and output (the caller's memory), temp (arena), state (arena, kept
    between calls, starts as `data`), fixed (arena, filled with `data` once), const (weights, `data`)."""

    kind: str
    size: int
    data: Array | None = None
    name: str = ""
    dtype: str = "float32"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array of that shape."""
    strides, run = [], 1
    for size in reversed(shape):
        strides.append(run)
        run *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class View:
    """A strided window on a buffer, in elements; `terms` are (symbol, stride) added at run time."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def permute(self, dims: Sequence[int]) -> View:
        """Reorder dimensions."""
        return replace(
            self, shape=tuple(self.shape[d] for d in dims), strides=tuple(self.strides[d] for d in dims)
        )

    def slice(self, dim: int, start: int, count: int, step: int = 1) -> View:
        """`count` positions along `dim`, from `start` in steps of `step` (which may be negative)."""
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = count, strides[dim] * step
        offset = self.offset + start * self.strides[dim]
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def select(self, dim: int, index: int) -> View:
        """One position along `dim`, which disappears."""
        return self.slice(dim, index, 1).drop(dim)

    def drop(self, dim: int) -> View:
        """Remove a dimension of size 1."""
        return replace(
            self,
            shape=self.shape[:dim] + self.shape[dim + 1 :],
            strides=self.strides[:dim] + self.strides[dim + 1 :],
        )

    def insert(self, dim: int) -> View:
        """Add a dimension of size 1."""
        return replace(
            self,
            shape=(*self.shape[:dim], 1, *self.shape[dim:]),
            strides=(*self.strides[:dim], 0, *self.strides[dim:]),
        )

    def expand(self, shape: Sequence[int]) -> View:
        """Broadcast to `shape` as numpy does."""
        extra = len(shape) - len(self.shape)
        strides = [0] * extra
        for size, stride, wanted in zip(self.shape, self.strides, shape[extra:], strict=True):
            strides.append(0 if size == 1 and wanted != 1 else stride)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def reshape(self, shape: Sequence[int]) -> View | None:
        """The same elements under another shape, or None where strides cannot say that."""
        if math.prod(shape) != self.count:
            raise ValueError(f"{self.shape} cannot become {tuple(shape)}")
        if 0 in shape:
            return replace(self, shape=tuple(shape), strides=contiguous_strides(shape))
        old = [(s, t) for s, t in zip(self.shape, self.strides, strict=True) if s != 1]
        merged: list[tuple[int, int]] = []
        for size, stride in old:
            if merged and merged[-1][1] == stride * size:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        strides: list[int] = []
        place = len(merged) - 1
        left, stride = merged[place] if merged else (1, 1)
        for size in reversed(shape):
            if size == 1:
                strides.append(0)
                continue
            if left == 1 and place > 0:
                place -= 1
                left, stride = merged[place]
            if left % size:
                return None
            strides.append(stride)
            left //= size
            stride *= size
        return replace(self, shape=tuple(shape), strides=tuple(reversed(strides)))

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another, in order."""
        run = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                return False
            run *= size
        return True


def whole(buffer: Buffer, shape: Sequence[int], offset: int = 0) -> View:
    """A contiguous view of that shape on a buffer."""
    return View(buffer, tuple(shape), contiguous_strides(shape), offset)


@dataclass(frozen=True, eq=False)
class Expr:
    """A scalar expression, evaluated for every position: an operation on others, a load, a number, or `acc` (what
    a contraction has summed at that position). Identity matters: one object is computed once."""

    op: str
    args: tuple[Expr, ...] = ()
    view: View | None = None
    value: float = 0.0

    def loads(self) -> Iterator[View]:
        """All views read."""
        if self.view is not None:
            yield self.view
        for arg in self.args:
            yield from arg.loads()


def load(view: View) -> Expr:
    """Read an element of a view."""
    return Expr("load", view=view)


def constant(value: float) -> Expr:
    """A number."""
    return Expr("const", value=float(value))


@dataclass(eq=False)
class Node:
    """One step of the computation."""

    origin: Origin = field(default_factory=Origin, kw_only=True)

    def reads(self) -> list[View]:
        """Views read."""
        return []

    def writes(self) -> list[View]:
        """Views written."""
        return []


@dataclass(eq=False)
class Map(Node):
    """Elementwise: for every position of `shape` evaluate each expression and store it."""

    shape: tuple[int, ...]
    stores: list[tuple[View, Expr]]

    def reads(self) -> list[View]:
        """Views read."""
        return [view for _, expr in self.stores for view in expr.loads()]

    def writes(self) -> list[View]:
        """Views written."""
        return [view for view, _ in self.stores]


@dataclass(eq=False)
class Taps(Node):
    """Contraction with weights: out[i, n] = f(bias[n] + sum_kc source[rows[i, k] + c * step] * weight[k, c, n]).

    Linear layers have one tap; a convolution has one per kernel position, its rows say where each reads.
    `epilogue` is f, with `acc` for the sum; the views in it have the shape of `out`, [M, N]. `scale` not None:
    int8, the value of one
    step of the quantised input. `reach` is all that may be read.
    """

    source: View
    rows: npt.NDArray[np.int64]
    step: int
    weight: Array
    bias: Array | None
    out: View
    epilogue: Expr | None = None
    scale: float | None = None
    reach: View | None = None

    def reads(self) -> list[View]:
        """Views read."""
        return [self.source, *(self.epilogue.loads() if self.epilogue else ())]

    def writes(self) -> list[View]:
        """Views written."""
        return [self.out]


@dataclass(eq=False)
class MatMul(Node):
    """Contraction of two computed values: out[b, m, n] = alpha * sum over k of a[b, m, k] * b[b, k, n]."""

    a: View
    b: View
    out: View
    alpha: float = 1.0

    def reads(self) -> list[View]:
        """Views read."""
        return [self.a, self.b]

    def writes(self) -> list[View]:
        """Views written."""
        return [self.out]


@dataclass(eq=False)
class Reduce(Node):
    """out[...] = scale * (sum, max or min over the last dimension of source)."""

    kind: str
    source: View
    out: View
    scale: float = 1.0

    def reads(self) -> list[View]:
        """Views read."""
        return [self.source]

    def writes(self) -> list[View]:
        """Views written."""
        return [self.out]


@dataclass(eq=False)
class Softmax(Node):
    """Softmax over the last dimension, of source plus mask if there is one; `log` for its logarithm."""

    source: View
    out: View
    mask: View | None = None
    log: bool = False

    def reads(self) -> list[View]:
        """Views read."""
        return [self.source] + ([self.mask] if self.mask else [])

    def writes(self) -> list[View]:
        """Views written."""
        return [self.out]


@dataclass(eq=False)
class Norm(Node):
    """Normalise the last dimension: layer (mean and variance) or rms; then weight and bias, shaped as source."""

    kind: str
    source: View
    out: View
    weight: View | None
    bias: View | None
    eps: float

    def reads(self) -> list[View]:
        """Views read."""
        return [view for view in (self.source, self.weight, self.bias) if view is not None]

    def writes(self) -> list[View]:
        """Views written."""
        return [self.out]


@dataclass(eq=False)
class Lookup(Node):
    """out[i, :] = table[index[i], :]; an index outside the table is clamped into it."""

    table: View
    index: View
    out: View

    def reads(self) -> list[View]:
        """Views read."""
        return [self.table, self.index]

    def writes(self) -> list[View]:
        """Views written."""
        return [self.out]


@dataclass(eq=False)
class Push(Node):
    """Write the newest row into a ring: both copies, so that a window on it is always contiguous."""

    source: View
    ring: View
    length: int
    stride: int

    def reads(self) -> list[View]:
        """Views read."""
        return [self.source]

    def writes(self) -> list[View]:
        """Views written."""
        return [self.ring]


@dataclass(eq=False)
class Loop(Node):
    """Run `body` for symbol = 0 … count - 1; views inside may have terms in `symbol`."""

    symbol: str
    count: int
    body: list[Node]

    def reads(self) -> list[View]:
        """Views read."""
        return [view for node in self.body for view in node.reads()]

    def writes(self) -> list[View]:
        """Views written."""
        return [view for node in self.body for view in node.writes()]


@dataclass(eq=False)
class Graph:
    """A whole model: `nodes` in order; of a state machine those in `prep` run before the event is there.

    `time_inputs`: the time dimension of inputs that have one; `output_rows`: for each output, (dimension, index) of
    the position that is computed of it, or None where all of it is.
    """

    name: str
    inputs: list[tuple[str, View]]
    outputs: list[tuple[str, View]]
    nodes: list[Node] = field(default_factory=list)
    prep: list[Node] = field(default_factory=list)
    rings: list[int] = field(default_factory=list)
    streaming: bool = False
    window: int = 0
    time_inputs: dict[str, int] = field(default_factory=dict)
    output_rows: list[tuple[int, int] | None] = field(default_factory=list)

    def all_nodes(self) -> list[Node]:
        """Both parts, loops opened."""
        found: list[Node] = []

        def visit(nodes: list[Node]) -> None:
            for node in nodes:
                found.append(node)
                if isinstance(node, Loop):
                    visit(node.body)

        visit(self.prep)
        visit(self.nodes)
        return found
