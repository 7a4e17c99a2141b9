"""Steps per second of captured steps beside eager, compiled and reduce-overhead loops and Accelerate, in one run.

    python -m benchmarks.step_rate [--quick] [--json FILE] [--model mlp|gpt|both] [--compile 1]

Counts: whole training steps in bf16 (forward, backward, clip at norm 1, fused AdamW), batches resident on the device,
wall time with the device synchronised at the end of each timed stretch. Warm-up of every variant (compilation and
recording too) is left out and shown apart, in seconds. Host time per step is the time in which calls return while the
device is kept busy elsewhere, median. Accelerate is written as its users write it (`loss.item()` each step).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import hotloop
from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.loop_rate import work

Step = Callable[[], None]


def batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    _, _, data, batch = work(name)
    return [tuple(t[i : i + batch].cuda() for t in data.tensors) for i in range(0, 8 * batch, batch)]  # type: ignore[misc]


def build(kind: str, name: str) -> Step:
    make, loss_fn, _, _ = work(name)
    held = batches(name)
    torch.manual_seed(0)
    model: nn.Module = make().cuda()
    count = 0

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal count
        count += 1
        return held[count % len(held)]

    if kind.startswith("hotloop"):
        mode = kind.split()[1]
        loop = hotloop.Loop(precision="bf16", record=False, nonfinite="stop")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = loop.prepare(model, optimizer)

        @loop.capture(mode=mode, outputs="static")
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(model(x), y)
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        def step() -> None:
            train(*batch())

        step.captured = train  # type: ignore[attr-defined]
        return step
    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step() -> None:
            x, y = batch()
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

        return step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if kind == "raw compiled":
        forward = torch.compile(model)
    if kind == "raw reduce-overhead":
        forward = torch.compile(model, mode="reduce-overhead")

    def step() -> None:
        x, y = batch()
        if kind == "raw reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            out = forward(x)
        loss_fn(out.float(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def host_time_us(step: Step, steps: int) -> float:
    """Median microseconds until a call returns, the device synchronised before each."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)[len(times) // 2]


def main() -> None:
    args = arguments(__doc__, model="both", compile=1)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.step_rate needs a CUDA device")
    torch.set_float32_matmul_precision("highest")
    kinds = ["raw", "accelerate", "hotloop off", "hotloop graph"]
    if args.compile:
        kinds += ["hotloop full", "raw compiled", "raw reduce-overhead"]
    figures: list[Figure] = []
    for name in ("mlp", "gpt") if args.model == "both" else (args.model,):
        variants: dict[str, Step] = {}
        for kind in kinds:
            start = time.perf_counter()
            variants[kind] = build(kind, name)
            for _ in range(20):
                variants[kind]()
            torch.cuda.synchronize()
            figures.append(Figure(f"{name}: {kind}, warm-up of 20 steps", time.perf_counter() - start, "s"))
        steps = (20 if args.quick else 40) if name == "gpt" else (100 if args.quick else 300)
        times = interleave(
            variants, repeats=5 if args.quick else 9, steps=steps, finish=torch.cuda.synchronize
        )
        for kind in kinds:
            rate, spread = median_with_spread([1 / t for t in times[kind]])
            peer = "raw" if kind == "accelerate" else "accelerate"
            ratio, _ = paired_ratio(times[kind], times[peer])
            figures.append(Figure(f"{name}: {kind}", rate, "steps/s", spread, peer, ratio))
        for kind in kinds:
            figures.append(Figure(f"{name}: {kind}, host", host_time_us(variants[kind], 100), "us/step"))
            captured = getattr(variants[kind], "captured", None)
            if captured is not None and captured.reason:
                raise SystemExit(f"{name}: {kind} fell back: {captured.reason}")
    report("training steps per second, bf16, clipping, resident batches", figures, args.json)


if __name__ == "__main__":
    main()
