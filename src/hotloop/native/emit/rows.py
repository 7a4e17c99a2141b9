"""Softmax and normalisations as C, one row after another; a short row stays in registers."""

from __future__ import annotations

from collections.abc import Callable

from hotloop.native.emit.expressions import number
from hotloop.native.emit.loops import collapse, open_loops, read_vector, write_vector
from hotloop.native.emit.writer import Writer
from hotloop.native.graph import Norm, Softmax, View

__all__ = ["emit_norm", "emit_softmax"]

_IN_REGISTERS = 8


def _lead(view: View) -> View:
    return View(view.buffer, view.shape[:-1], view.strides[:-1], view.offset, view.terms)


class _Rows:
    """Loops over the leading dimensions of some views, and access to a row of each."""

    def __init__(self, writer: Writer, views: list[View]) -> None:
        self.writer = writer
        self.leads = {id(view): _lead(view) for view in views}
        sizes, strides = collapse(views[0].shape[:-1], list(self.leads.values()))
        self.strides = {key: strides[id(lead)] for key, lead in self.leads.items()}
        self.length = views[0].shape[-1]
        self.counters = open_loops(writer, sizes)

    def address(self, view: View, index: str) -> tuple[str, int]:
        step = view.strides[-1] if self.length > 1 else 1
        pairs = list(zip(self.counters, self.strides[id(view)], strict=True))
        return self.writer.address(view, [*pairs, (index, step)]), step

    def read(self, view: View, index: str, count: int, fill: str = "0.0f") -> str:
        address, step = self.address(view, index)
        return read_vector(address, step, count, fill)

    def write(self, view: View, index: str, value: str, count: int) -> None:
        address, step = self.address(view, index)
        self.writer.line(write_vector(address, step, value, count))

    def each(self, body: Callable[[str, int], None]) -> None:
        """Run `body(index, count)` for each vector of a row."""
        full, rest = divmod(self.length, 16)
        if full > _IN_REGISTERS:
            index = self.writer.name("j")
            with self.writer.block(f"for (long {index} = 0; {index} < {full * 16}; {index} += 16)"):
                body(index, 16)
        else:
            for k in range(full):
                body(str(k * 16), 16)
        if rest:
            body(str(full * 16), rest)

    @property
    def short(self) -> bool:
        return self.length <= _IN_REGISTERS * 16

    def close(self) -> None:
        for _ in self.counters:
            self.writer.depth -= 1
            self.writer.line("}")


def emit_softmax(writer: Writer, node: Softmax) -> None:
    """exp(x - max) over its sum; a row whose every score is minus infinity gives not-a-number, as in torch."""
    views = [node.source, node.out] + ([node.mask] if node.mask else [])
    rows = _Rows(writer, views)
    kept: dict[str, str] = {}
    top, total = writer.name("m"), writer.name("s")
    writer.line(f"V {top}v = bc(-__builtin_inff()), {total}v = bc(0.0f);")

    def value(index: str, count: int) -> str:
        if index in kept:
            return kept[index]
        name = writer.name("x")
        text = rows.read(node.source, index, count, "-__builtin_inff()")
        if node.mask is not None:
            text += f" + {rows.read(node.mask, index, count)}"
        writer.line(f"V {name} = {text};")
        if rows.short:
            kept[index] = name
        return name

    rows.each(lambda index, count: writer.line(f"{top}v = max2({value(index, count)}, {top}v);"))
    writer.line(f"float {top} = hmax({top}v);")

    def power(index: str, count: int) -> None:
        name, x = writer.name("y"), value(index, count)
        writer.line(f"V {name} = vexp({x} - {top});")
        if not node.log:
            if rows.short:
                kept[index] = name
            else:
                rows.write(node.out, index, name, count)
        # what stands beyond the row is minus infinity, whose power is 0
        writer.line(f"{total}v += {name};")

    rows.each(power)
    writer.line(f"float {total} = hsum({total}v);")
    if node.log:
        writer.line(f"{total} = {top} + vlog(bc({total}))[0];")
        rows.each(lambda index, count: rows.write(node.out, index, f"{value(index, count)} - {total}", count))
    else:
        writer.line(f"{total} = 1.0f / {total};")

        def scale(index: str, count: int) -> None:
            x = kept[index] if rows.short else rows.read(node.out, index, count)
            rows.write(node.out, index, f"{x} * {total}", count)

        rows.each(scale)
    rows.close()


def emit_norm(writer: Writer, node: Norm) -> None:
    """(x - mean) / sqrt(variance + eps), variance from the centred values; or x / sqrt(mean square + eps)."""
    rows = _Rows(writer, [node.source, node.out])
    kept: dict[str, str] = {}
    count_of = float(rows.length)

    def value(index: str, count: int) -> str:
        if index in kept:
            return kept[index]
        name = writer.name("x")
        writer.line(f"V {name} = {rows.read(node.source, index, count)};")
        if rows.short:
            kept[index] = name
        return name

    mean = ""
    if node.kind == "layer":
        mean = writer.name("m")
        writer.line(f"V {mean}v = bc(0.0f);")
        rows.each(lambda index, count: writer.line(f"{mean}v += {value(index, count)};"))
        writer.line(f"float {mean} = hsum({mean}v) * {number(1 / count_of)};")
    square = writer.name("q")
    writer.line(f"V {square}v = bc(0.0f);")

    def add_square(index: str, count: int) -> None:
        name, x = writer.name("d"), value(index, count)
        writer.line(f"V {name} = {x}{f' - {mean}' if mean else ''};")
        if rows.short:
            kept[index] = name
        if count < 16 and mean:
            # beyond the row stands 0 - mean, which must not count
            masked = writer.name("d")
            lanes = ", ".join("-1" if i < count else "0" for i in range(16))
            writer.line(f"V {masked} = (V)((I){name} & (I){{{lanes}}});")
            name = masked
        writer.line(f"{square}v += {name} * {name};")

    rows.each(add_square)
    factor = writer.name("f")
    eps = number(node.eps)
    writer.line(f"float {factor} = 1.0f / __builtin_sqrtf(hsum({square}v) * {number(1 / count_of)} + {eps});")

    def scale(index: str, count: int) -> None:
        if rows.short:
            x = kept[index]
        else:
            x = f"({rows.read(node.source, index, count)}{f' - {mean}' if mean else ''})"
        text = f"{x} * {factor}"
        for sign, vector in (("*", node.weight), ("+", node.bias)):
            if vector is not None:
                address = writer.address(vector, [(index, 1)])
                text = f"{text} {sign} {read_vector(address, 1, count)}"
        rows.write(node.out, index, text, count)

    rows.each(scale)
    rows.close()
