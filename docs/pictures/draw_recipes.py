"""Draws the pictures of docs/recipes.md: python docs/pictures/draw_recipes.py [ablation.json]

The second picture is drawn from what `benchmarks.cifar_ablation --only schedules,sizes --json ablation.json` wrote.
"""

import json
import re
import sys
from pathlib import Path

from hotloop.data import Resizing
from hotloop.optim import Curve, draw_svg

HERE = Path(__file__).parent


def draw_sizes() -> None:
    plans = {
        "steps": Resizing([(3, 16), (2, 24), (3, 32)], batch_size=8),
        "ramp": Resizing.ramp(16, 32, 8, batch_size=8),
    }
    times = tuple(k / 100 for k in range(800))
    curves = [Curve(name, times, tuple(float(p.at(t).size) for t in times)) for name, p in plans.items()]
    svg = draw_svg(curves, title="pixels a side", x_label="epochs")
    (HERE / "resizing.svg").write_text(svg + "\n")


def draw_ablation(path: Path) -> None:
    figures = {f["name"]: f["value"] for f in json.loads(path.read_text())["figures"]}
    points: dict[str, list[tuple[float, float]]] = {}
    for name, value in figures.items():
        found = re.fullmatch(r"(.*), epochs x ([\d.]+): seconds \(n=(\d+)\)", name)
        if found:
            what, stretch, n = found.groups()
            accuracy = figures[f"{what}, epochs x {stretch}: mean accuracy (n={n})"]
            points.setdefault(what, []).append((value, accuracy))
    curves = [
        Curve(name, *(tuple(v) for v in zip(*sorted(some), strict=True))) for name, some in points.items()
    ]
    svg = draw_svg(curves, title="CIFAR-10: mean test accuracy, %", x_label="seconds")
    (HERE / "cifar_ablation.svg").write_text(svg + "\n")


if __name__ == "__main__":
    draw_sizes()
    if len(sys.argv) > 1:
        draw_ablation(Path(sys.argv[1]))
