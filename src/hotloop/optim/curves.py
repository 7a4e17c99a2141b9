"""Curves drawn as characters for a terminal, and as SVG for a page: rates and range tests."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "Mark", "draw_page", "draw_svg", "draw_text"]

# Dot of a braille character by (column, row) inside it.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#0891b2", "#be185d")


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one line, x growing; what is not finite is left out."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def points(self) -> list[tuple[float, float]]:
        """The finite points."""
        return [
            (x, y) for x, y in zip(self.xs, self.ys, strict=True) if math.isfinite(x) and math.isfinite(y)
        ]


@dataclass(frozen=True)
class Mark:
    """A named vertical line at `x`."""

    name: str
    x: float


@dataclass(frozen=True)
class _Frame:
    """The part of the plane that is shown, on a linear or logarithmic x axis."""

    left: float
    right: float
    bottom: float
    top: float
    log_x: bool

    def place(self, x: float, y: float) -> tuple[float, float]:
        """(x, y) as shares of width and height, y from below."""
        at = math.log(x) if self.log_x else x
        across = (at - self.left) / (self.right - self.left)
        return across, (y - self.bottom) / (self.top - self.bottom)

    def x_at(self, share: float) -> float:
        """The x at a share of the width."""
        at = self.left + share * (self.right - self.left)
        return math.exp(at) if self.log_x else at


def _frame(curves: Sequence[Curve], log_x: bool) -> _Frame | None:
    points = [p for curve in curves for p in curve.points() if not log_x or p[0] > 0.0]
    if not points:
        return None
    xs = [math.log(x) if log_x else x for x, _ in points]
    ys = [y for _, y in points]
    left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
    if left == right:
        left, right = left - 0.5, right + 0.5
    if 0.0 <= bottom < top / 2:
        bottom = 0.0
    if bottom == top:
        # a flat line in the middle
        margin = abs(top) / 2 or 0.5
        bottom, top = bottom - margin, top + margin
    return _Frame(left, right, bottom, top, log_x)


def draw_text(
    curves: Sequence[Curve],
    *,
    marks: Sequence[Mark] = (),
    width: int = 72,
    height: int = 12,
    log_x: bool = False,
) -> str:
    """The curves in braille dots (2 by 4 to a character) with their range on both axes; marks are named below.

    >>> print(draw_text([Curve("a", (0.0, 1.0), (0.0, 1.0))], width=18, height=2))
      1  ⡠⠊
      0⡠⠊
       0  1
    """
    frame = _frame(curves, log_x)
    if frame is None:
        return "nothing finite to draw"
    labels = [f"{frame.top:.4g}", f"{frame.bottom:.4g}"]
    margin = max(len(label) for label in labels) + 2
    columns = max(width - margin - (8 if width > 30 else 12), 4)
    cells = [[0] * columns for _ in range(height)]
    for mark in marks:
        if mark.x > 0.0 or not log_x:
            across, _ = frame.place(mark.x, frame.bottom)
            if 0.0 <= across <= 1.0:
                column = round(across * (2 * columns - 1))
                for row in range(0, 4 * height, 2):
                    cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    for curve in curves:
        _draw_line(cells, [frame.place(x, y) for x, y in curve.points() if x > 0.0 or not log_x])
    lines = []
    for number, line in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        text = "".join(chr(0x2800 + cell) if cell else " " for cell in line).rstrip()
        lines.append(f"{label:>{margin}}{text}".rstrip())
    first, last = f"{frame.x_at(0.0):.4g}", f"{frame.x_at(1.0):.4g}"
    lines.append(f"{'':{margin}}{first}{last:>{max(columns - len(first), len(last) + 1)}}")
    lines += [f"{'':{margin}}{mark.name}: {mark.x:.3g}" for mark in marks]
    return "\n".join(lines)


def _draw_line(cells: list[list[int]], places: list[tuple[float, float]]) -> None:
    across, up = 2 * len(cells[0]) - 1, 4 * len(cells) - 1
    dots = [(round(x * across), round((1.0 - y) * up)) for x, y in places]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(steps + 1):
            x, y = round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)
            if 0 <= x <= across and 0 <= y <= up:
                cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]


def draw_svg(
    curves: Sequence[Curve],
    *,
    marks: Sequence[Mark] = (),
    title: str = "",
    x_label: str = "",
    width: int = 640,
    height: int = 240,
    log_x: bool = False,
) -> str:
    """The curves as one SVG element that needs nothing else; colours suit light and dark pages."""
    frame = _frame(curves, log_x)
    left, right, above, below = 64, 16, 30 if title else 12, 44
    inner, tall = width - left - right, height - above - below
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#808080">'
    ]
    if title:
        parts.append(f'<text x="{left}" y="18" font-size="14">{html.escape(title)}</text>')
    if frame is None:
        parts.append(f'<text x="{left}" y="{above + 20}">nothing finite to draw</text></svg>')
        return "\n".join(parts)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = frame.place(x, y)
        return round(left + across * inner, 1), round(above + (1.0 - up) * tall, 1)

    for i in range(5):
        y_value = frame.bottom + (frame.top - frame.bottom) * i / 4
        x_value = frame.x_at(i / 4)
        y = above + tall * (1 - i / 4)
        x = left + inner * i / 4
        parts.append(
            f'<path d="M{left} {y:g}h{inner}" stroke="#808080" stroke-opacity=".25"/>'
            f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{y_value:.3g}</text>'
            f'<text x="{x:g}" y="{above + tall + 16}" text-anchor="middle">{x_value:.3g}</text>'
        )
    if x_label:
        parts.append(
            f'<text x="{left + inner / 2:g}" y="{height - 8}" text-anchor="middle">{html.escape(x_label)}</text>'
        )
    for i, mark in enumerate(m for m in marks if m.x > 0.0 or not log_x):
        x, _ = at(mark.x, frame.bottom)
        parts.append(
            f'<path d="M{x:g} {above}v{tall}" stroke="#dc2626" stroke-dasharray="4 3"/>'
            f'<text x="{x + 4:g}" y="{above + 14 + 14 * i}">{html.escape(mark.name)} {mark.x:.3g}</text>'
        )
    for i, curve in enumerate(curves):
        path = " ".join(f"{x:g},{y:g}" for x, y in (at(*p) for p in curve.points() if p[0] > 0 or not log_x))
        colour = _COLOURS[i % len(_COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(curves) > 1:
            parts.append(
                f'<text x="{left + inner - 8}" y="{above + 14 + 14 * i}" text-anchor="end" fill="{colour}">'
                f"{html.escape(curve.name)}</text>"
            )
    return "\n".join([*parts, "</svg>"])


def draw_page(title: str, pictures: Sequence[str], paragraphs: Sequence[str] = ()) -> str:
    """One HTML page with SVG pictures inside it, which needs no other file."""
    words = "\n".join(f"<p>{html.escape(text)}</p>" for text in paragraphs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>:root{{color-scheme:light dark}}"
        "body{font:16px/1.5 sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}svg{width:100%}</style>"
        f"</head><body>\n<h1>{html.escape(title)}</h1>\n{words}\n"
        + "\n".join(pictures)
        + "\n</body></html>\n"
    )
