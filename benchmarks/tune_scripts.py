"""Scripts with the usual mistakes, put right step by step: doctor, the named repair, tune, verify.

    python -m benchmarks.tune_scripts [--quick] [--json FILE] [--model mlp|gpt|both] [--budget 60] [--out tuned]

For each of the MLP (256-512-512-1, batch 1024) and the character GPT (6 layers, 6 heads, width 384, context 256, batch
64): the doctor looks at `benchmarks/slow/NAME.py`; `benchmarks/slow/NAME_fixed.py` is that script with what it names
repaired (the difference is printed); `hotloop tune` takes that from there. Counts: whole steps from the loader to the
update, alternating stretches of both scripts in living processes, warm-up left out; the ratio is paired, its interval
Student's at 99 %. On a CPU the same scripts run, smaller.
"""

from __future__ import annotations

import difflib
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, arguments, report
from hotloop.tune import tune, write_report, write_tuned
from hotloop.tune.measure import Contender, Gain, compare
from hotloop.tune.page import format_result
from hotloop.tune.rung import Rung
from hotloop.tune.trial import Nursery, Script, TrialError

HERE = Path(__file__).parent / "slow"


def diagnose(script: Script) -> dict[str, Any] | None:
    with Nursery(script) as nursery:
        trial = nursery.start([], "doctor", skip=15, active=3)
        try:
            facts: dict[str, Any] | None = trial.hear("doctor", 120)["facts"]
        except TrialError as error:
            print(f"doctor: {error}", *error.lines, sep="\n")
            facts = None
        finally:
            trial.kill()
    if facts is not None:
        print(f"doctor: {facts['verdict']}")
        for finding in facts["findings"]:
            place = finding["place"]["text"] if finding["place"] else ""
            saves = finding["saves_step_s"]
            worth = "" if saves is None else f", {saves * 1e3:.3g} ms a step"
            print(f"  {finding['rule']}{worth}: {finding['title']} {place}")
    return facts


def race(first: tuple[Script, list[Rung]], second: tuple[Script, list[Rung]], rounds: int) -> Gain:
    """How many times as fast the second is; stretches of at least 0.3 s each."""
    with Nursery(first[0]) as one, Nursery(second[0]) as other:
        sides = [
            Contender(one, first[1], warm_up=30, seed=None),
            Contender(other, second[1], warm_up=30, seed=None),
        ]
        steps = []
        for side in sides:
            side.start(180)
            steps.append(max(2, round(0.3 / max(side.run(10, 60), 1e-6))))
        gain = compare(*sides, (steps[0], steps[1]), limit_s=120, looks=(rounds,))
        for side in sides:
            side.stop()
    return gain


def work_on(name: str, more: list[str], budget_s: float, rounds: int, out: Path) -> list[Figure]:
    slow = Script(f"benchmarks.slow.{name}", more, module=True)
    fixed = Script(f"benchmarks.slow.{name}_fixed", more, module=True)
    print(f"\n== {name} as it is often written")
    diagnose(slow)
    texts = [(HERE / f"{file}.py").read_text().splitlines() for file in (name, f"{name}_fixed")]
    changed = [
        line for line in difflib.unified_diff(*texts, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
    ]
    print(f"\nthe repair, {len(changed)} lines:", *changed, sep="\n  ")
    result = tune(
        fixed.target,
        more,
        module=True,
        budget_s=budget_s,
        tell=lambda kind, text: print(text, flush=True) if kind == "line" else None,
    )
    print(format_result(result))
    out.mkdir(parents=True, exist_ok=True)
    write_report(result, out / f"{name}.tuned.html")
    (out / f"{name}.json").write_text(json.dumps(result.to_plain(), indent=1, default=str))
    if result.kept:
        write_tuned(result, out / f"{name}.tuned.toml")
    figures = []
    for text, side in (("repaired", (fixed, [])), ("repaired and tuned", (fixed, result.kept))):
        gain = race((slow, []), side, rounds)
        rates = [1 / s for s in gain.second]
        half = (gain.high - gain.low) / 2 * statistics.median([1 / s for s in gain.first])
        figures.append(
            Figure(
                f"{name}: {text}", statistics.median(rates), "steps/s", half, "as often written", gain.ratio
            )
        )
        print(f"{name}: {text}: {gain} over the start, {statistics.median(rates):.4g} steps/s", flush=True)
        if not result.kept:
            break
    return figures


def main() -> None:
    args = arguments(__doc__, model="both", budget=60.0, out="tuned")
    import torch

    # trials are started from here and have this folder's modules
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    small = [] if torch.cuda.is_available() else ["--epochs", "2"]
    figures: list[Figure] = []
    for name in ("mlp", "gpt") if args.model == "both" else (args.model,):
        more = [*small, "--batch", "4"] if small and name == "gpt" else small
        began = time.monotonic()
        try:
            figures += work_on(name, more, args.budget, 4 if args.quick else 8, Path(args.out))
        except Exception:
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - began:.0f} s in all", file=sys.stderr, flush=True)
    report("scripts with the usual mistakes, repaired and tuned", figures, args.json)


if __name__ == "__main__":
    main()
