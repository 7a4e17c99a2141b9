"""The doctor against reality: programs with one fault, the price it gives, and what the repair really saves.

Each pair is a training step with a fault and the same step repaired, timed in turn without a profiler and then
watched as `hotloop doctor SCRIPT` watches: a window for prices, one with Python stacks for lines. Reported are the
predicted and the real saving of a step, whether the line is the one marked FAULT, and what is found in the repaired
step (which should be nothing). Needs a CUDA GPU.

    python -m benchmarks.doctor_pairs [--quick] [--json FILE] [--keep FOLDER | --kept FOLDER]

`--keep` leaves the traces and times in a folder; `--kept` judges such a folder, without a GPU; `--only`
takes names of pairs with / between them.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Figure, arguments, report
from hotloop.doctor import Finding, Trace
from hotloop.doctor.live import Watch
from hotloop.doctor.live.windows import Notes, read_windows
from hotloop.stalls import mark_step

Step = Callable[[], None]
RECORDINGS = 3  # of the step with the fault; the median of what they promise counts


@dataclass(frozen=True)
class Pair:
    """`rule` is the finding that is expected, `make(repaired)` builds a step."""

    name: str
    rule: tuple[str, ...]
    make: Callable[[bool], Step]


def network(width: int, depth: int, dtype: torch.dtype) -> torch.nn.Module:
    # made on the device: the CPU takes seconds to initialise such a one
    layers = [torch.nn.Linear(width, width, device="cuda", dtype=dtype) for _ in range(depth)]
    return torch.nn.Sequential(*layers)


def training(
    width: int, depth: int, batch: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], torch.Tensor]:
    """A step of fused SGD on a plain network; returns the loss."""
    model = network(width, depth, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(batch, width, device="cuda", dtype=dtype)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()  # FAULT fp32 matmul
        loss.backward()
        optimizer.step()
        return loss

    return step


class Chores:
    """What a loop does on the host between two steps: sorting, a little less than a millisecond at a time."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.values = np.random.default_rng(0).random(10_000)

    def do(self) -> None:
        for _ in range(self.times):
            np.sort(self.values)


def item_idle(repaired: bool) -> Step:
    train, chores = training(4096, 8, 4096), Chores(28)

    def step() -> None:
        chores.do()
        loss = train()
        if not repaired:
            loss.item()  # FAULT item, idle device

    return step


def item_busy(repaired: bool) -> Step:
    train = training(8192, 8, 4096)

    def step() -> None:
        loss = train()
        if not repaired:
            loss.item()  # FAULT item, busy device

    return step


def nan_check(repaired: bool) -> Step:
    train, chores = training(4096, 8, 4096), Chores(28)

    def step() -> None:
        loss = train()
        if not repaired and torch.isnan(loss):  # FAULT NaN check
            raise FloatingPointError
        chores.do()

    return step


def pageable_copy(repaired: bool) -> Step:
    train = training(4096, 8, 4096)
    source = torch.randn(16, 1024, 1024)
    source = source.pin_memory() if repaired else source
    target = torch.empty_like(source, device="cuda")
    side = torch.cuda.Stream()

    def step() -> None:
        if repaired:
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)
        else:
            target.copy_(source, non_blocking=True)  # FAULT pageable copy
        train()

    return step


def loading(repaired: bool) -> Step:
    train = training(4096, 8, 4096)
    loader = torch.utils.data.DataLoader(
        _Slow(), batch_size=4, num_workers=8 if repaired else 0, persistent_workers=repaired
    )
    batches = iter(loader)

    def step() -> None:
        next(batches)  # FAULT no workers
        train()

    return step


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 65536

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(30_000, generator=generator).sort().values[:64]


def printing(repaired: bool) -> Step:
    train, chores = training(4096, 8, 4096), Chores(28)

    def step() -> None:
        chores.do()
        loss = train()
        if not repaired:
            with contextlib.redirect_stdout(io.StringIO()):
                print(loss)  # FAULT printing

    return step


def unfused(repaired: bool) -> Step:
    x = torch.randn(64, 1024, 1024, device="cuda")
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def chain(x: torch.Tensor) -> torch.Tensor:
        return ((x * 1.1 + 0.3).tanh() * 0.5 + 0.1).sigmoid() * 2.0 - 1.0  # FAULT unfused chain

    chosen = torch.compile(chain) if repaired else chain

    def step() -> None:
        chosen(x)
        weight @ weight

    return step


def single_precision(repaired: bool) -> Step:
    torch.backends.cuda.matmul.allow_tf32 = False
    train = training(4096, 3, 4096, torch.bfloat16 if repaired else torch.float32)

    def step() -> None:
        train()

    return step


def thrash(repaired: bool) -> Step:
    train = training(4096, 8, 4096)

    def step() -> None:
        train()
        torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        if not repaired:
            torch.cuda.empty_cache()  # FAULT allocator thrash

    return step


def looped_optimizer(repaired: bool) -> Step:
    model = network(256, 60, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=repaired, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        optimizer.step()  # FAULT looped optimizer

    return step


PAIRS = (
    Pair("item, idle device", ("host-sync",), item_idle),
    Pair("item, busy device", ("host-sync",), item_busy),
    Pair("NaN check", ("host-sync",), nan_check),
    Pair("pageable copy", ("blocking-copy",), pageable_copy),
    Pair("no workers", ("data-loading",), loading),
    Pair("printing", ("host-sync",), printing),
    Pair("unfused chain", ("fusion",), unfused),
    Pair("fp32 matmul", ("tensor-cores",), single_precision),
    Pair("allocator thrash", ("allocator",), thrash),
    Pair("looped optimizer", ("optimizer",), looped_optimizer),
)


def watch(step: Step, folder: Path, name: str) -> None:
    """Let the doctor watch the step, and keep its windows and notes in the folder."""
    me = object()
    with Watch(skip=13, active=6) as watched:
        mark_step(me)
        for _ in range(45):
            if len(watched.files) == 2:
                break
            step()
            mark_step(me)
    for number, file in enumerate(watched.files):
        (folder / f"{name}{number}.json.gz").write_bytes(gzip.compress(file.read_bytes(), 3))
    watched.make_notes().write(folder / f"{name}-notes.json")


def told(folder: Path, name: str) -> Trace:
    """What the doctor makes of what `watch` kept."""
    files = [folder / f"{name}{number}.json.gz" for number in range(2)]
    trace = read_windows(files, Notes.read(folder / f"{name}-notes.json"), name)
    if trace is None:
        raise RuntimeError(f"there is no trace in {folder}")
    return trace


def step_ms(step: Step, *, steps: int) -> float:
    """Milliseconds a step, the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / steps


def marked_line(name: str) -> int:
    """Line of this file that is marked as the fault of a pair; 0 if none is."""
    lines = Path(__file__).read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"# FAULT {name}")), 0)


def measure(pair: Pair, folder: Path, *, quick: bool) -> None:
    """Time a pair, the two in turn, and leave what a watch records of both in the folder."""
    faulty, repaired = pair.make(False), pair.make(True)
    for step in (faulty, repaired):
        for _ in range(8):
            step()
    steps = max(5, min(100, int((20 if quick else 80) / step_ms(faulty, steps=5))))
    times: dict[str, list[float]] = {"slow": [], "fast": []}
    # recorded between the timings: a shared machine's host is not the same for long
    for number in range(RECORDINGS):
        for _ in range(2 if quick else 3):
            times["slow"].append(step_ms(faulty, steps=steps))
            times["fast"].append(step_ms(repaired, steps=steps))
        watch(faulty, folder, f"faulty{number}-")
    watch(repaired, folder, "repaired")
    (folder / "times.json").write_text(json.dumps(times))


@dataclass(frozen=True)
class Verdict:
    """What came of a pair; milliseconds a step."""

    predicted: float
    shown: float
    real: float
    slow: float
    line: bool
    left: tuple[str, ...]
    text: str

    @property
    def error(self) -> float:
        """Of the predicted saving, against the real one; against the step where that is less than 3 % of it."""
        return (self.predicted - self.real) / (self.real if abs(self.real) > 0.03 * self.slow else self.slow)


def saving(trace: Trace, pair: Pair) -> float:
    """Seconds a step that the pair's repair saves by itself; the page prices it with those above it made before."""
    edits = [f.edit for f in trace.findings() if f.rule in pair.rule and f.edit is not None]
    return trace.what_if(edits).saved_s / max(trace.timeline.steps, 1) if edits else 0.0


def judge(pair: Pair, folder: Path) -> Verdict:
    """Compare what the doctor says about a pair with what was measured."""
    several = [told(folder, f"faulty{number}-") for number in range(RECORDINGS)]
    faulty, repaired = several[0], told(folder, "repaired")
    times = json.loads((folder / "times.json").read_text())
    slow, fast = statistics.median(times["slow"]), statistics.median(times["fast"])
    mine = [f for f in faulty.findings() if f.rule in pair.rule]
    savings = [saving(trace, pair) for trace in several]
    looked: list[Finding] = [*faulty.findings(), *faulty.diagnosis.harmless]
    places = [f.place for f in looked if f.rule in pair.rule and f.place is not None]
    line = marked_line(pair.name)
    replay = faulty.case.replay
    steps = max(faulty.timeline.steps, 1)
    found = [(f.rule, round(1000 * (f.per_step or 0.0), 3)) for f in faulty.findings()]
    text = (
        f"savings {[round(1000 * each, 3) for each in savings]}, findings {found}, harmless "
        f"{[f.rule for f in faulty.diagnosis.harmless]}, dropped {[f.rule for f in faulty.diagnosis.dropped]}; marked "
        f"{line}, found {[str(p) for p in places]}; {replay.why_not or f'replay {replay.error:+.2%}'}; step "
        f"{faulty.timeline.step_us / 1000:.3f} ms recorded, {replay.replayed_us / 1000 / steps:.3f} ms corrected by "
        f"{replay.event_us:.1f} us an event; {faulty.timeline.pace}; busy {faulty.case.busy_share:.0%}"
    )
    return Verdict(
        1000 * statistics.median(savings),
        sum(1000 * (f.per_step or 0.0) for f in mine),
        slow - fast,
        slow,
        any(place.line == line and place.exact for place in places),
        tuple(f"{f.rule} {1000 * (f.per_step or 0):.3f} ms" for f in repaired.findings()),
        text,
    )


def main() -> None:
    """Measure and judge each pair; `--kept` judges what was kept before."""
    options = arguments(__doc__, keep="", kept="", only="")
    chosen = [pair for pair in PAIRS if not options.only or pair.name in options.only.split("/")]
    if not options.kept and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(options.kept or options.keep or scratch)
        folders = {pair.name: root / re.sub(r"\W+", "-", pair.name) for pair in chosen}
        for pair in [] if options.kept else chosen:
            begun = time.perf_counter()
            try:
                folders[pair.name].mkdir(parents=True, exist_ok=True)
                measure(pair, folders[pair.name], quick=options.quick)
            except Exception:
                traceback.print_exc()
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{pair.name}: measured in {time.perf_counter() - begun:.0f} s", flush=True)
        for pair in chosen:
            try:
                verdicts[pair.name] = verdict = judge(pair, folders[pair.name])
            except Exception:
                print(f"{pair.name}: failed", flush=True)
                traceback.print_exc()
                continue
            print(
                f"{pair.name:20} predicted {verdict.predicted:7.3f} ms (shown {verdict.shown:.3f}), real "
                f"{verdict.real:7.3f} of {verdict.slow:.3f} ms, error {verdict.error:+.0%}, line {verdict.line}, "
                f"left {list(verdict.left)}\n    {verdict.text}",
                flush=True,
            )
    if not verdicts:
        raise SystemExit("no pair came through")
    figures = [
        Figure(f"{name}: predicted saving", v.predicted, "ms/step", limit=v.real)
        for name, v in verdicts.items()
    ]
    errors = [abs(v.error) for v in verdicts.values()]
    figures.append(Figure("median error of the price", 100 * statistics.median(errors), "%"))
    figures.append(Figure("exact lines", sum(v.line for v in verdicts.values()), f"of {len(chosen)}"))
    clean = sum(not v.left for v in verdicts.values())
    figures.append(Figure("repaired steps without a finding", clean, f"of {len(chosen)}"))
    report("prices against repairs", figures, options.json)


if __name__ == "__main__":
    main()
