"""Steps per second of captured steps beside eager, compiled and reduce-overhead loops and Accelerate, in one run.

    python -m benchmarks.step_rate [--quick] [--json FILE] [--model mlp|gpt|lstm|conv|both|all]
        [--feed resident|end|both] [--compile 1]

Models: the MLP and the character GPT of `loop_rate` ("both"); an LSTM and a causal convolution over windows of 64 steps
of 32 features, batch 512.

Counts: whole training steps in bf16 (forward, backward, clip at norm 1, fused AdamW), wall time with the device
synchronised at the end of each timed stretch. Two feeds. "resident": eight batches that lie on the device, the same for
all. "end": from data in host memory; Accelerate and "hotloop, same DataLoader" iterate over a shuffled torch DataLoader
without workers, "hotloop" over a shuffled `ResidentLoader`: the data set lies on the device, and each epoch has a new
order. "bf16-true" stores weights in bf16, with float32 masters in the optimizer. Warm-up of every variant (compilation
and recording too) is left out and shown apart, in seconds.
Host time per step is the time until a call returns, the device idle before it, median. Accelerate is written as its
users write it (`loss.item()` each step).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.loop_rate import LossFn, forever
from benchmarks.loop_rate import work as loop_work
from benchmarks.series_models import CausalConv, SeriesLSTM
from hotloop.data import ResidentLoader

Step = Callable[[], None]
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
MODELS = ("mlp", "gpt", "lstm", "conv")


def work(name: str) -> tuple[Callable[[], nn.Module], LossFn, TensorDataset, int]:
    """Model, loss, data set and batch size."""
    if name not in ("lstm", "conv"):
        return loop_work(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16 * 512, 64, 32, generator=generator)
    data = TensorDataset(x, x[:, -8:, 0].sum(1, keepdim=True))
    return (SeriesLSTM if name == "lstm" else CausalConv), F.mse_loss, data, 512


def resident(name: str) -> Batches:
    """Eight batches on the device, again and again."""
    _, _, data, batch = work(name)
    held = [tuple(t[i : i + batch].cuda() for t in data.tensors) for i in range(0, 8 * batch, batch)]
    return forever(held)


def build(kind: str, name: str, feed: str = "resident") -> Step:
    """One step of a variant, with its own model, optimizer and feed."""
    make, loss_fn, data, batch_size = work(name)
    torch.manual_seed(0)
    model: nn.Module = make().cuda()
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)

    if kind.startswith("hotloop"):
        mode = kind.split()[1].rstrip(",")
        precision = "bf16-true" if "bf16-true" in kind else "bf16"
        loop = hotloop.Loop(precision=precision, record=False, nonfinite="stop")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = loop.prepare(model, optimizer)
        if feed == "resident":
            batches = resident(name)
        elif "DataLoader" in kind:
            batches = forever(loop.prepare(loader))
        else:
            held = tuple(t.cuda() for t in data.tensors)
            batches = forever(loop.prepare(ResidentLoader(held, batch_size, drop_last=True)))

        @loop.capture(mode=mode, outputs="static")
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(model(x), y)
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        def step() -> None:
            train(*next(batches))

        step.captured = train  # type: ignore[attr-defined]
        return step
    if kind.startswith("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        batches = resident(name) if feed == "resident" else forever(accelerator.prepare(loader))

        def step() -> None:
            x, y = next(batches)
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
    batches = resident(name)

    def step() -> None:
        x, y = next(batches)
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


def measure(name: str, feed: str, kinds: list[str], quick: bool) -> list[Figure]:
    """Rates of `kinds` in one interleaved run; a variant that fails is left out, and why is printed."""
    figures: list[Figure] = []
    variants: dict[str, Step] = {}
    for kind in kinds:
        start = time.perf_counter()
        try:
            step = build(kind, name, feed)
            for _ in range(20):
                step()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}: {kind} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        variants[kind] = step
        title = f"{name}, {feed}: {kind}, warm-up of 20 steps"
        figures.append(Figure(title, time.perf_counter() - start, "s"))
    steps = (20 if quick else 40) if name == "gpt" or feed == "end" else (100 if quick else 300)
    times = interleave(variants, repeats=5 if quick else 9, steps=steps, finish=torch.cuda.synchronize)
    for kind in variants:
        rate, spread = median_with_spread([1 / t for t in times[kind]])
        peer = "raw" if kind == "accelerate" and "raw" in variants else "accelerate"
        ratio = paired_ratio(times[kind], times[peer])[0] if peer in variants else None
        figures.append(Figure(f"{name}, {feed}: {kind}", rate, "steps/s", spread, peer, ratio))
        if kind.startswith("hotloop") and "raw reduce-overhead" in variants:
            faster, spread = paired_ratio(times[kind], times["raw reduce-overhead"])
            figures.append(Figure(f"{name}, {feed}: {kind} over reduce-overhead", faster, "times", spread))
    for kind, step in variants.items():
        if feed == "resident":
            figures.append(Figure(f"{name}, {feed}: {kind}, host", host_time_us(step, 100), "us/step"))
        captured = getattr(step, "captured", None)
        if captured is not None and captured.reason and captured.mode != "off":
            print(f"{name}: {kind} fell back: {captured.reason}", flush=True)
    return figures


def main() -> None:
    args = arguments(__doc__, model="both", compile=1, feed="both")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.step_rate needs a CUDA device")
    torch.set_float32_matmul_precision("highest")
    kinds = ["raw", "accelerate", "hotloop off", "hotloop graph"]
    if args.compile:
        kinds += ["hotloop full", "raw compiled", "raw reduce-overhead"]
    ends = ["accelerate", "hotloop graph, same DataLoader", "hotloop graph"]
    if args.compile:
        ends.append("hotloop full")
    figures: list[Figure] = []
    for name in {"both": MODELS[:2], "all": MODELS}.get(args.model, (args.model,)):
        if args.feed in ("resident", "both"):
            more = ["hotloop full, bf16-true"] if name == "gpt" and args.compile else []
            figures += measure(name, "resident", kinds + more, args.quick)
        if args.feed in ("end", "both"):
            figures += measure(name, "end", ends, args.quick)
    report("training steps per second, bf16, clipping", figures, args.json)


if __name__ == "__main__":
    main()
