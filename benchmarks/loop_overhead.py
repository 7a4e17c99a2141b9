"""What a wrapper costs per step on the CPU: hotloop beside Accelerate and Fabric, over raw PyTorch, in one process.

    python -m benchmarks.loop_overhead [--quick] [--json FILE]

Counts thread-CPU microseconds of the training thread per step (one torch thread), variants in a new random order each
round, and gives the median over rounds of the paired difference to raw with a 95 % bootstrap interval. The table's
last columns are the whole process's CPU (all threads: the logging thread too) and wall time.
Work: MLP 32-64-1, batch 32, SGD, MSE. Warm-up: 100 steps of each variant. Left out: building, imports (those are
measured at the end, in fresh processes). Every variant must end with raw's weights, to the bit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from benchmarks.harness import Figure, arguments, median_with_spread, report
from benchmarks.models import make_mlp

BATCH = 32


@dataclass
class Variant:
    """A step and the model it trains."""

    step: Callable[[], None]
    model: nn.Module
    thread_us: list[float] = field(default_factory=list)
    process_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * BATCH, 32, generator=generator)
    return TensorDataset(x, x[:, :1] * 2)


def forever(loader: object) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from loader  # type: ignore[misc]


def build(who: str, case: str) -> Variant:
    """One step of `who` in a case: "step" (a fixed batch), "clip", or "loop" (loader, accumulation of 2, log)."""
    torch.manual_seed(0)
    model: nn.Module = make_mlp((32, 64, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: object = DataLoader(data(), batch_size=BATCH)
    micro = 2 if case == "loop" else 1
    seen: list[torch.Tensor] = []
    fixed = data()[:BATCH]
    count = 0

    if who == "raw":
        batches = forever(loader)

        def step() -> None:
            nonlocal count
            x, y = next(batches) if case == "loop" else fixed
            loss = F.mse_loss(model(x), y)
            if micro > 1:
                (loss / micro).backward()
            else:
                loss.backward()
            count += 1
            if count % micro == 0:
                if case == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if case == "loop":
                seen.append(loss.detach())

        return Variant(step, model)

    if who == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
        plain = model
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches = forever(loader)

        def step() -> None:
            x, y = next(batches) if case == "loop" else fixed
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if case == "clip":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if case == "loop":
                seen.append(loss.detach())

        return Variant(step, plain)

    if who == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        plain = model
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        batches = forever(loader)

        def step() -> None:
            nonlocal count
            x, y = next(batches) if case == "loop" else fixed
            count += 1
            done = count % micro == 0
            with fabric.no_backward_sync(model, enabled=not done):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss / micro if micro > 1 else loss)
            if done:
                if case == "clip":
                    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
            if case == "loop":
                seen.append(loss.detach())

        return Variant(step, plain)

    loop = hotloop.Loop(
        device="cpu",
        accumulation=micro,
        nonfinite="ignore" if who == "hotloop, bare" else "stop",
        record="/dev/shm/hotloop-overhead" if case == "loop" and os.path.isdir("/dev/shm") else False,
    )
    model, optimizer, loader = loop.prepare(model, optimizer, loader)
    batches = forever(loader)

    def step() -> None:
        x, y = next(batches) if case == "loop" else fixed
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        if case == "clip":
            loop.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if case == "loop":
            loop.log(loss=loss)

    return Variant(step, model)


CASES = {
    "step": ("raw", "hotloop, bare", "hotloop, guard", "fabric", "accelerate"),
    "clip": ("raw", "hotloop, bare", "hotloop, guard", "fabric", "accelerate"),
    "loop": ("raw", "hotloop, loader + accumulation + log + guard", "fabric", "accelerate"),
}


def measure(variants: dict[str, Variant], *, rounds: int, steps: int) -> None:
    order = list(variants)
    for variant in variants.values():
        for _ in range(100):
            variant.step()
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        for i in torch.randperm(len(order), generator=generator).tolist():
            variant = variants[order[i]]
            wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
            for _ in range(steps):
                variant.step()
            variant.thread_us.append((time.thread_time() - thread) / steps * 1e6)
            variant.process_us.append((time.process_time() - process) / steps * 1e6)
            variant.wall_us.append((time.perf_counter() - wall) / steps * 1e6)


def import_costs(repeats: int) -> list[Figure]:
    """CPU seconds and peak memory of `import X` in fresh processes."""
    program = (
        "import json, time\nstart = time.process_time()\n{}\nused = time.process_time() - start\n"
        # ru_maxrss would include the parent's pages from before exec
        "peak = next(x for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "print(json.dumps([used, int(peak.split()[1]) / 1024]))"
    )
    # hotloop's names are found on first use: ask for the one that brings everything
    lines = {
        "torch": "import torch",
        "hotloop": "from hotloop import Loop",
        "accelerate": "from accelerate import Accelerator",
        "lightning_fabric": "from lightning_fabric import Fabric",
    }
    names = tuple(lines)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            out = subprocess.run(
                [sys.executable, "-c", program.format(lines[name])],
                capture_output=True,
                text=True,
                check=True,
            )
            found[name].append(json.loads(out.stdout))
    figures = []
    base = [statistics.median(row[i] for row in found["torch"]) for i in (0, 1)]
    for i, unit in ((0, "CPU s"), (1, "MiB")):
        for name in names:
            value, spread = median_with_spread([row[i] for row in found[name]])
            figures.append(Figure(f"import {name}", value, unit, spread, "torch", value / base[i]))
    return figures


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    os.environ["HOTLOOP_PROGRESS"] = "0"
    figures: list[Figure] = []
    for case, names in CASES.items():
        variants = {name: build(name, case) for name in names}
        measure(variants, rounds=30 if args.quick else 200, steps=50)
        raw = variants["raw"]
        base = statistics.median(raw.thread_us)
        figures.append(Figure(f"{case}: raw", base, "CPU us/step"))
        for name, variant in variants.items():
            same = all(
                torch.equal(p, q)
                for p, q in zip(variant.model.parameters(), raw.model.parameters(), strict=True)
            )
            if not same:
                raise SystemExit(f"{case}: {name} did not end with raw's weights")
            if variant is raw:
                continue
            for what in ("thread", "process", "wall"):
                mine, theirs = getattr(variant, f"{what}_us"), getattr(raw, f"{what}_us")
                value, spread = median_with_spread([a - b for a, b in zip(mine, theirs, strict=True)])
                ratio = statistics.median(mine) / statistics.median(theirs)
                figures.append(Figure(f"{case}: {name}, {what}", value, "us over raw", spread, "raw", ratio))
    figures += import_costs(3 if args.quick else 7)
    report("overhead per step on the CPU", figures, args.json)


if __name__ == "__main__":
    main()
