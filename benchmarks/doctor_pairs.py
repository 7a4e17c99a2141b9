"""The doctor against reality: programs with one fault, the price it gives, and what the repair really saves.

Each pair is a training step with a fault and the same step repaired. The faulty one is recorded twice, without Python
stacks for the price and with them for the source line; both are timed without a profiler. Reported are the first
finding, the predicted and the real saving of a step, whether the line is the one marked FAULT, and what is found in
the repaired step (which should be nothing). Needs a CUDA GPU.

    python -m benchmarks.doctor_pairs [--quick] [--json FILE] [--keep FOLDER | --kept FOLDER]

`--keep` leaves the traces and times in a folder; `--kept` judges such a folder, without a GPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import Figure, arguments, report
from hotloop.doctor import Finding, read
from hotloop.stalls import record_syncs

Step = Callable[[], None]


@dataclass(frozen=True)
class Pair:
    """`rule` is the finding that is expected, `make(repaired)` builds a step."""

    name: str
    rule: tuple[str, ...]
    make: Callable[[bool], Step]


def network(width: int, depth: int, dtype: torch.dtype) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    return torch.nn.Sequential(*layers).to("cuda", dtype)


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


def item_idle(repaired: bool) -> Step:
    train = training(512, 8, 256)

    def step() -> None:
        for _ in range(4):
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
    train = training(512, 8, 256)

    def step() -> None:
        for _ in range(4):
            loss = train()
            if not repaired and torch.isnan(loss):  # FAULT NaN check
                raise FloatingPointError

    return step


def pageable_copy(repaired: bool) -> Step:
    train = training(2048, 6, 2048)
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
    train = training(2048, 6, 2048)
    loader = torch.utils.data.DataLoader(
        _Slow(), batch_size=4, num_workers=6 if repaired else 0, persistent_workers=repaired
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
        return torch.rand(200_000, generator=generator).sort().values[:64]


def printing(repaired: bool) -> Step:
    train = training(512, 8, 256)

    def step() -> None:
        loss = train()
        if not repaired:
            with contextlib.redirect_stdout(io.StringIO()):
                print(loss)  # FAULT printing
        train()

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
    train = training(4096, 6, 4096, torch.bfloat16 if repaired else torch.float32)

    def step() -> None:
        train()

    return step


def thrash(repaired: bool) -> Step:
    train = training(2048, 6, 2048)

    def step() -> None:
        train()
        torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        if not repaired:
            torch.cuda.empty_cache()  # FAULT allocator thrash

    return step


def looped_optimizer(repaired: bool) -> Step:
    model = network(256, 120, torch.float32)
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
    Pair("looped optimizer", ("optimizer", "launch-bound"), looped_optimizer),
)


def record(step: Step, path: Path, *, stacks: bool, active: int) -> None:
    """Profile `active` steady steps and write the trace to `path`."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(
        activities=activities,
        schedule=schedule(wait=3, warmup=3, active=active, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
        with_stack=stacks,
        record_shapes=True,
    ) as profiler:
        for _ in range(6 + active):
            step()
            profiler.step()


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
    """Time a pair, the two in turn, and leave its traces and times in the folder."""
    steps, active = (10, 5) if quick else (40, 10)
    faulty, repaired = pair.make(False), pair.make(True)
    for step in (faulty, repaired):
        for _ in range(8):
            step()
    times: dict[str, list[float]] = {"slow": [], "fast": []}
    for _ in range(5):
        times["slow"].append(step_ms(faulty, steps=steps))
        times["fast"].append(step_ms(repaired, steps=steps))
    record(faulty, folder / "price.json.gz", stacks=False, active=active)
    record(faulty, folder / "line.json.gz", stacks=True, active=3)
    record(repaired, folder / "left.json.gz", stacks=False, active=active)
    with record_syncs(torch.device("cuda"), copies=True) as seen:
        faulty()
    (folder / "times.json").write_text(
        json.dumps({**times, "syncs": [[sync.file, sync.line, sync.reason] for sync in seen]})
    )


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
        """Of the predicted saving, against the real one, or against the step where nothing is to be saved."""
        return (self.predicted - self.real) / (self.real if abs(self.real) > 0.02 * self.slow else self.slow)


def judge(pair: Pair, folder: Path) -> Verdict:
    """Compare what the doctor says about a pair's traces with what was measured."""
    priced, placed, left = (read(folder / f"{name}.json.gz") for name in ("price", "line", "left"))
    times = json.loads((folder / "times.json").read_text())
    slow, fast = statistics.median(times["slow"]), statistics.median(times["fast"])
    mine = [f for f in priced.findings() if f.rule in pair.rule]
    edits = [f.edit for f in mine if f.edit is not None]
    # the repair is made alone; the page prices a finding with those above it repaired before
    alone = priced.what_if(edits).saved_s / max(priced.timeline.steps, 1) if edits else 0.0
    stalls: list[Finding] = [*placed.findings(), *placed.diagnosis.harmless]
    places = [f.place for f in stalls if f.rule in pair.rule and f.place is not None]
    line = marked_line(pair.name)
    seen = {number for file, number, _ in times["syncs"] if file.endswith("doctor_pairs.py")}
    replay = priced.case.replay
    text = (
        f"findings {[(f.rule, round(1000 * (f.per_step or 0), 3)) for f in priced.findings()]}, harmless "
        f"{[f.rule for f in priced.diagnosis.harmless]}; marked {line}, found {[str(p) for p in places]}, "
        f"hooks saw {sorted(seen)}; {replay.why_not or f'replay {replay.error:+.2%}'}; "
        f"traced step {priced.timeline.step_us / 1000:.3f} ms"
    )
    return Verdict(
        1000 * alone,
        sum(1000 * (f.per_step or 0.0) for f in mine),
        slow - fast,
        slow,
        any(place.line == line and place.exact for place in places) or seen == {line},
        tuple(f.rule for f in left.findings()),
        text,
    )


def main() -> None:
    """Measure each pair in a process of its own (`--only` does one), and tell; `--kept` judges what was kept."""
    options = arguments(__doc__, keep="", kept="", only="")
    if options.only:
        measure(
            next(pair for pair in PAIRS if pair.name == options.only), Path(options.keep), quick=options.quick
        )
        return
    if not options.kept and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for pair in PAIRS:
            folder = Path(options.kept or options.keep or scratch) / re.sub(r"\W+", "-", pair.name)
            try:
                if not options.kept:
                    folder.mkdir(parents=True, exist_ok=True)
                    command = [sys.executable, "-m", "benchmarks.doctor_pairs", "--only", pair.name]
                    command += ["--keep", str(folder), *(["--quick"] if options.quick else [])]
                    subprocess.run(command, check=True, timeout=90)
                verdicts[pair.name] = verdict = judge(pair, folder)
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
    figures.append(Figure("exact lines", sum(v.line for v in verdicts.values()), f"of {len(PAIRS)}"))
    figures.append(
        Figure(
            "repaired steps without a finding", sum(not v.left for v in verdicts.values()), f"of {len(PAIRS)}"
        )
    )
    report("prices against repairs", figures, options.json)


if __name__ == "__main__":
    main()
