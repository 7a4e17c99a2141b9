"""Draws the measured pictures of docs/recipes.md and docs/schedules.md.

    python docs/pictures/draw_recipes.py [--ablation ablation.json] [--gpt gpt.log]

The ablation is what `benchmarks.cifar_ablation --only sizes,schedules --json ablation.json` wrote, the character GPT's
schedules are what `benchmarks.gpt_schedules > gpt.log` printed.
"""

import argparse
import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hotloop.data import Resizing
from hotloop.optim import Curve, draw_svg

HERE = Path(__file__).parent
Points = dict[str, list[tuple[float, float]]]

COURSES = {
    "the recipe": "a line down over 80 %",
    "cosine": "cosine",
    "one-cycle": "one-cycle",
    "constant": "constant, looked at on the way",
}
"""Of the character GPT, by how their names begin; the others lie on top of these."""


def draw_sizes() -> None:
    plans = {
        "steps": Resizing([(3, 16), (2, 24), (3, 32)], batch_size=8),
        "ramp": Resizing.ramp(16, 32, 8, batch_size=8),
    }
    times = tuple(k / 100 for k in range(800))
    curves = [Curve(name, times, tuple(float(p.at(t).size) for t in times)) for name, p in plans.items()]
    svg = draw_svg(curves, title="pixels a side", x_label="epochs")
    (HERE / "resizing.svg").write_text(svg + "\n")


def as_curves(points: Points) -> Sequence[Curve]:
    return [
        Curve(name, *(tuple(v) for v in zip(*sorted(some), strict=True))) for name, some in points.items()
    ]


def draw_ablation(path: Path) -> None:
    figures = {f["name"]: f["value"] for f in json.loads(path.read_text())["figures"]}
    points: Points = {}
    for name, value in figures.items():
        found = re.fullmatch(r"(.*), epochs x ([\d.]+): seconds \(n=(\d+)\)", name)
        if found:
            what, stretch, n = found.groups()
            accuracy = figures[f"{what}, epochs x {stretch}: mean accuracy (n={n})"]
            if accuracy > 93:  # a constant rate's would press the others together
                points.setdefault(what.removesuffix(", peaks x 1"), []).append((value, accuracy))
    svg = draw_svg(as_curves(points), title="CIFAR-10: mean test accuracy, %", x_label="seconds")
    (HERE / "cifar_ablation.svg").write_text(svg + "\n")


def read_gpt(said: str) -> Points:
    """(seconds, loss) at the end of each length of a course; of the constant one, at each look of its long run."""
    rows: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    row = r"^  (.+?) +(\d+) updates, peaks x (\S+) +loss ([\d.]+) .* ([\d.]+) s$"
    for name, updates, factor, loss, seconds in re.findall(row, said, re.MULTILINE):
        rows.setdefault(name, {}).setdefault(factor, {})[updates] = float(seconds), float(loss)
    # other lengths were run with the best peaks alone
    points = {name: list(max(found.values(), key=len).values()) for name, found in rows.items()}
    looks = re.search(
        r"^  constant: (\[.*\]); first at the target: \((\d+), [\d.]+, ([\d.]+)\)", said, re.MULTILINE
    )
    if looks:
        pace = float(looks[3]) / int(looks[2])
        points["constant"] = [(pace * k, loss) for k, loss in ast.literal_eval(looks[1])]
    return points


def draw_gpt(path: Path) -> None:
    points = read_gpt(path.read_text())
    shown: Points = {}
    for begins, title in COURSES.items():
        (some,) = [rows for name, rows in points.items() if name.startswith(begins)]
        shown[title] = [(s, loss) for s, loss in some if 0.6 <= s <= 1.6]
    svg = draw_svg(as_curves(shown), title="validation loss, nat", x_label="seconds")
    (HERE / "gpt_schedules.svg").write_text(svg + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ablation", type=Path)
    parser.add_argument("--gpt", type=Path)
    args = parser.parse_args()
    draw_sizes()
    if args.ablation:
        draw_ablation(args.ablation)
    if args.gpt:
        draw_gpt(args.gpt)
