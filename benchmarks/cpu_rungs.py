"""Rungs of the precision ladder on the CPU: bf16 and compiled forwards against fp32 in plain Python.

    python -m benchmarks.cpu_rungs [--quick] [--json FILE] [--threads N]

Counts: whole training steps (forward, backward, clip at norm 1, AdamW, the guard against non-finite losses) on batches
in memory; the digits example's model at its batch of 64, and a character GPT of 2 layers, width 256, on 16 x 64
tokens. Variants are interleaved; `ratio` is fp32 eager's time over the variant's in the same round. Left out: building
and compiling, which is shown apart. Beside it the CPU's own limit: the rate of one large product in bf16 over fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.models import CharGPT

RUNGS = {
    "fp32 eager": ("fp32", "off"),
    "bf16 eager": ("bf16", "off"),
    "bf16-true eager": ("bf16-true", "off"),
    "fp32 compiled": ("fp32", "compile"),
    "bf16 compiled": ("bf16", "compile"),
    "bf16-true compiled": ("bf16-true", "compile"),
}


def digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    from examples.digits import make_model

    torch.manual_seed(0)
    return make_model(), torch.rand(64, 1, 8, 8), torch.randint(10, (64,))


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = CharGPT(width=256, heads=4, layers=2, context=64)
    tokens = torch.randint(65, (16, 65))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(make: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]], rung: str) -> Callable[[], None]:
    """One training step of a rung, with a model of its own."""
    precision, mode = RUNGS[rung]
    model, x, y = make()
    loop = hotloop.Loop(precision, device="cpu", record=False, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = loop.prepare(model, optimizer)

    @loop.capture(mode=mode)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    def step() -> None:
        train(x, y)

    return step


def product_limit() -> float:
    """How much faster this CPU multiplies 1024 x 1024 matrices in bf16 than in fp32, medians of 15."""
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
        found = []
        for _ in range(18):
            start = time.perf_counter()
            a @ b
            found.append(time.perf_counter() - start)
        times.append(sorted(found[3:])[7])
    return times[0] / times[1]


def main() -> None:
    args = arguments(__doc__, threads=0)
    if args.threads:
        torch.set_num_threads(args.threads)
    limit = product_limit()
    chosen = hotloop.Loop("auto", device="cpu", record=False)
    print(f"{torch.get_num_threads()} threads; auto is {chosen.precision.name}: {chosen.precision.reason}")
    chosen.end_training()
    figures = [Figure("bf16 over fp32, product of 1024 x 1024", limit, "x")]
    for name, make, steps in (("digits", digits, 15), ("gpt", gpt, 3)):
        variants = {}
        for rung in RUNGS:
            start = time.perf_counter()
            variants[rung] = build(make, rung)
            variants[rung]()
            variants[rung]()
            print(f"{name}, {rung}: ready after {time.perf_counter() - start:.1f} s")
        times = interleave(variants, repeats=2 if args.quick else 9, steps=2 if args.quick else steps)
        for rung, seconds in times.items():
            rate, spread = median_with_spread([1 / s for s in seconds])
            figure = Figure(f"{name}, {rung}", rate, "steps/s", spread)
            if rung != "fp32 eager":
                figure.peer, figure.ratio = "fp32 eager", paired_ratio(seconds, times["fp32 eager"])[0]
            figures.append(figure)
    report("precision and compiled forwards on the CPU", figures, args.json)


if __name__ == "__main__":
    main()
