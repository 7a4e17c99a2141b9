"""Where C text is gathered: lines, the packed constants, and how a buffer is addressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotloop.native.graph import Array, Buffer, View

__all__ = ["Target", "Writer"]


@dataclass(frozen=True)
class Target:
    """What the compiler may use. `accumulators`: vectors of 16 that fit in registers beside operands."""

    name: str
    flags: tuple[str, ...]
    accumulators: int
    vnni: bool = False


@dataclass
class Writer:
    """Text of one function body so far; constants are appended to one array, each at a multiple of 16 elements.
    `observe`: for calibration, where in the arena each contraction (by id) notes what it reads."""

    target: Target
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    counter: int = 0
    words: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    word_count: int = 0
    tables: list[str] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)
    kept: list[Buffer] = field(default_factory=list)
    observe: dict[int, int] | None = None

    def line(self, text: str) -> None:
        """Append one line."""
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def block(self, head: str = "") -> Iterator[None]:
        """Lines inside braces, after `head`."""
        self.line(f"{head} {{".strip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def name(self, stem: str) -> str:
        """A new identifier."""
        self.counter += 1
        return f"{stem}{self.counter}"

    def pack(self, data: Array | npt.NDArray[np.int8] | npt.NDArray[np.int32]) -> str:
        """Append constants; returns the C expression of their address (as const F *)."""
        raw = np.ascontiguousarray(data).reshape(-1)
        pad = -raw.nbytes % 64
        if pad:
            raw = np.concatenate([raw, np.zeros(pad // raw.itemsize, raw.dtype)])
        start = self.word_count
        self.words.append(raw.view(np.uint32))
        self.word_count += raw.nbytes // 4
        return f"(W + {start})"

    def table(self, values: npt.NDArray[np.int64]) -> str:
        """A static table of int32; returns its name."""
        name = f"T{len(self.tables)}"
        listed = ",".join(str(v) for v in values.reshape(-1).tolist())
        self.tables.append(f"static const int32_t {name}[{values.size}] = {{{listed}}};")
        return name

    def place(self, buffer: Buffer, text: str) -> None:
        """Say how a buffer is addressed."""
        self.places[id(buffer)] = text
        self.kept.append(buffer)

    def base(self, buffer: Buffer) -> str:
        """The address of a buffer."""
        if id(buffer) not in self.places:
            assert buffer.kind == "const", f"{buffer.kind} buffer has no place"
            assert buffer.data is not None
            self.place(buffer, self.pack(buffer.data))
        return self.places[id(buffer)]

    def address(self, view: View, indices: list[tuple[str, int]] | None = None) -> str:
        """The address of a view's first element, plus index times stride for each pair."""
        parts = [self.base(view.buffer)]
        if view.offset:
            parts.append(str(view.offset))
        for symbol, stride in (*view.terms, *(indices or ())):
            if stride and symbol != "0":
                text = f"({symbol})" if " " in symbol else symbol
                parts.append(text if stride == 1 else f"{text} * {stride}")
        return " + ".join(parts).replace("+ -", "- ")
