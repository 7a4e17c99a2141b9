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
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, arguments, report
from hotloop.tune import write_report, write_tuned
from hotloop.tune.climb import Climb
from hotloop.tune.measure import Contender, Gain, compare
from hotloop.tune.page import format_result
from hotloop.tune.rung import Rung
from hotloop.tune.trial import Nursery, Script, TrialError

HERE = Path(__file__).parent / "slow"


def diagnose(nursery: Nursery, script: Script) -> None:
    trial = nursery.start([], "doctor", script=script, skip=15, active=3)
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


def race(first: Contender, second: Contender, rounds: int) -> Gain:
    """How many times as fast the second is; stretches of about 0.3 s each."""
    lengths = [max(2, min(5000, round(0.3 / max(side.run(10, 120), 1e-6)))) for side in (first, second)]
    return compare(first, second, (lengths[0], lengths[1]), limit_s=120, looks=(rounds,))


def work_on(
    nursery: Nursery, name: str, more: list[str], budget_s: float, rounds: int, out: Path
) -> list[Figure]:
    slow = Script(f"benchmarks.slow.{name}", more, module=True)
    fixed = Script(f"benchmarks.slow.{name}_fixed", more, module=True)
    began = time.monotonic()

    def tell(kind: str, text: str) -> None:
        if kind == "line":
            print(f"{time.monotonic() - began:4.0f} s  {text}", flush=True)

    print(f"\n== {name} as it is often written")
    diagnose(nursery, slow)
    texts = [(HERE / f"{file}.py").read_text().splitlines() for file in (name, f"{name}_fixed")]
    diff = difflib.unified_diff(*texts, lineterm="", n=0)
    changed = [line for line in diff if line[:2] not in ("--", "++", "@@")]
    (out / f"{name}.diff").write_text("\n".join(changed) + "\n")
    print(f"the repair changes {len(changed)} lines: {out / f'{name}.diff'}")
    start = Contender(nursery, [], warm_up=30, seed=None, script=slow)
    start.start(180)
    figures = [measure(f"{name}: repaired", nursery, start, fixed, [], rounds)]
    nursery.script = fixed
    climb = Climb(nursery, budget_s=budget_s, exact=False, seeds=3, rungs=(), only=None, tell=tell)
    climb.run()
    result = climb.finish()
    if result.kept:
        figures.append(measure(f"{name}: repaired and tuned", nursery, start, fixed, result.kept, rounds))
    start.stop()
    print(format_result(result))
    write_report(result, out / f"{name}.tuned.html")
    (out / f"{name}.json").write_text(json.dumps(result.to_plain(), indent=1, default=str))
    if result.kept:
        write_tuned(result, out / f"{name}.tuned.toml")
    return figures


def measure(
    text: str, nursery: Nursery, start: Contender, script: Script, rungs: list[Rung], rounds: int
) -> Figure:
    side = Contender(nursery, rungs, warm_up=30, seed=None, script=script)
    side.start(180)
    gain = race(start, side, rounds)
    side.stop()
    rate = statistics.median([1 / s for s in gain.second])
    half = (max(gain.second) - min(gain.second)) / 2 * rate**2
    print(f"{text}: {gain} over the start, {rate:.4g} steps/s", flush=True)
    return Figure(text, rate, "steps/s", half, "as often written", gain.ratio)


def main() -> None:
    args = arguments(__doc__, model="both", budget=60.0, out="tuned")
    import torch

    # trials are started from here and have this folder's modules
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    # the repaired scripts begin with graphs of eager kernels: what "auto" would do depends on the length of the run
    os.environ.setdefault("HOTLOOP_CAPTURE", "graph")
    small = [] if torch.cuda.is_available() else ["--epochs", "2"]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    with Nursery(Script("benchmarks.slow.gpt", module=True)) as nursery:
        for name in ("gpt", "mlp") if args.model == "both" else (args.model,):
            more = [*small, "--batch", "4"] if small and name == "gpt" else small
            began = time.monotonic()
            # compiling the GPT takes longer than all of the MLP
            budget_s = args.budget * (1.5 if name == "gpt" else 1.0)
            try:
                figures += work_on(nursery, name, more, budget_s, 4 if args.quick else 8, out)
            except Exception:
                traceback.print_exc()
            print(f"{name}: {time.monotonic() - began:.0f} s in all", flush=True)
    report("scripts with the usual mistakes, repaired and tuned", figures, args.json)


if __name__ == "__main__":
    main()
