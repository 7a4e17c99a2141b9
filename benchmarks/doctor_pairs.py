"""The doctor against reality: programs with one fault, the price it gives, and what the repair really saves.

Each pair is a training step with a fault and the same step repaired. The faulty one is recorded twice, without Python
stacks for the price and with them for the source line; both are timed without a profiler. Reported are the first
finding, the predicted and the real saving of a step, whether the line is the one marked FAULT, and what is found in
the repaired step (which should be nothing). Needs a CUDA GPU.

    python -m benchmarks.doctor_pairs [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import Figure, arguments, report
from hotloop.doctor import Finding, Trace, read

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
        loss = model(x).float().square().mean()
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

    def forever() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    batches = forever()

    def step() -> None:
        next(batches)
        train()

    return step


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

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
        return ((x * 1.1 + 0.3).tanh() * 0.5 + 0.1).sigmoid() * 2.0 - 1.0

    chosen = torch.compile(chain) if repaired else chain

    def step() -> None:
        chosen(x)
        weight @ weight

    return step


def single_precision(repaired: bool) -> Step:
    torch.backends.cuda.matmul.allow_tf32 = False
    train = training(4096, 6, 4096, torch.bfloat16 if repaired else torch.float32)
    return lambda: (train(), None)[1]


def thrash(repaired: bool) -> Step:
    train = training(2048, 6, 2048)

    def step() -> None:
        train()
        torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        if not repaired:
            torch.cuda.empty_cache()

    return step


def looped_optimizer(repaired: bool) -> Step:
    model = network(256, 120, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=repaired, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return optimizer.step


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


def record(step: Step, path: Path, *, stacks: bool, active: int) -> Trace:
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
    return read(path)


def step_ms(step: Step, *, steps: int) -> float:
    """Median over five rounds of milliseconds a step, the device's work included."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) * 1000 / steps)
    return statistics.median(rounds)


def marked_line(name: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"# FAULT {name}")), 0)


def main() -> None:
    options = arguments(__doc__)
    steps, active = (10, 5) if options.quick else (40, 10)
    figures: list[Figure] = []
    errors: list[float] = []
    lines: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in PAIRS:
            faulty = pair.make(False)
            for _ in range(8):
                faulty()
            priced = record(faulty, Path(folder) / "price.json", stacks=False, active=active)
            placed = record(faulty, Path(folder) / "line.json", stacks=True, active=active)
            slow = step_ms(faulty, steps=steps)
            repaired = pair.make(True)
            for _ in range(8):
                repaired()
            left = record(repaired, Path(folder) / "left.json", stacks=False, active=active)
            fast = step_ms(repaired, steps=steps)
            mine = [f for f in priced.findings() if f.rule in pair.rule]
            predicted = 1000 * sum(f.per_step or 0.0 for f in mine)
            real = slow - fast
            error = (predicted - real) / real if abs(real) > 0.02 * slow else (predicted - real) / slow
            errors.append(abs(error))
            first = priced.findings()[0].rule if priced.findings() else "none"
            line = told(placed, pair)
            if line is not None:
                lines.append(line)
            print(
                f"{pair.name:20} first {first:14} predicted {predicted:7.3f} ms, real {real:7.3f} of {slow:.3f} ms, "
                f"error {error:+.0%}, line {line}, left: {[f.rule for f in left.findings()]}; "
                f"{priced.case.replay.why_not or f'replay {priced.case.replay.error:+.2%}'}"
            )
            figures.append(Figure(f"{pair.name}: predicted saving", predicted, "ms/step", limit=real))
            del faulty, repaired
            torch.cuda.empty_cache()
    figures.append(Figure("median error of the price", 100 * statistics.median(errors), "%"))
    figures.append(Figure("exact lines", 100 * sum(lines) / max(len(lines), 1), "%"))
    report("prices against repairs", figures, options.json)


def told(trace: Trace, pair: Pair) -> bool | None:
    """Whether the finding names the marked line; None if the pair marks none."""
    line = marked_line(pair.name)
    if not line:
        return None
    stalls: list[Finding] = [*trace.findings(), *trace.diagnosis.harmless]
    found = [f.place for f in stalls if f.rule in pair.rule and f.place is not None]
    return any(place.line == line and place.exact for place in found)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    F.relu(torch.zeros(1, device="cuda"))
    main()
