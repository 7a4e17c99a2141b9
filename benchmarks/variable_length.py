"""Batches of 16 to 512 tokens: buckets in a captured step beside eager steps and padding to the longest.

    python -m benchmarks.variable_length [--quick] [--json FILE] [--most 6] [--only VARIANT+VARIANT]

Lengths are log-normal (median 96, sigma 0.8), cut to 16..512, the same sequence for all; batch 32; the character GPT
with a context of 512; bf16, clip at norm 1, fused AdamW. Targets of padding are ignored by the loss. Counted: steps per
second over the sequence, in a process for each variant, after 64 steps of warm-up in which buckets are chosen and
recorded; and the peak of reserved device memory of the whole process, beside that of a recording of the longest bucket
alone. "eager" pads nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import Figure, arguments, median_with_spread, paired_ratio, report

VARIANTS = ("eager", "eager, padded to the longest", "graph, padded to the longest", "graph, buckets")
WARM = 64


def draw_lengths(n: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.exp(torch.randn(n, generator=generator) * 0.8 + torch.tensor(96.0).log())
    return drawn.round().clamp(16, 512).long().tolist()


def run(kind: str, steps: int, repeats: int, most: int, path: str) -> None:
    """In a process of its own: rates of `repeats` passes over the lengths, and memory, to `path`."""
    try:
        Path(path).write_text(json.dumps(measure(kind, steps, repeats, most)))
    except Exception:
        traceback.print_exc()


def measure(kind: str, steps: int, repeats: int, most: int) -> dict[str, object]:
    import hotloop
    from benchmarks.models import CharGPT
    from hotloop.capture import Buckets

    torch.manual_seed(0)
    lengths = draw_lengths(steps)
    generator = torch.Generator().manual_seed(1)
    # fresh text in each step, and nothing to learn from it: losses stay large, so that their differences mean something
    text = torch.randint(65, (WARM * 32, 513), generator=generator).cuda()
    loop = hotloop.Loop(precision="bf16", record=False, nonfinite="stop")
    model = CharGPT(context=512)
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    step = train
    if kind.startswith("graph"):
        longest = (512,) if "longest" in kind else ()
        step = loop.capture(
            train,
            mode="graph",
            outputs="static",
            buckets=Buckets(pad=(0, -100), most=most, lengths=longest, longest=512),
        )

    count = 0

    def one(length: int) -> torch.Tensor:
        nonlocal count
        rows = text[count % WARM * 32 : count % WARM * 32 + 32]
        count += 1
        x, y = rows[:, :length], rows[:, 1 : length + 1]
        if kind == "eager, padded to the longest":
            x, y = F.pad(x, (0, 512 - length)), F.pad(y, (0, 512 - length), value=-100)
        return step(x, y)

    # the longest length comes once in the warm-up: every variant has met it
    losses = [one(length).detach().clone() for length in [*lengths[: WARM - 1], 512]]
    if kind == "graph, buckets":
        for length in sorted(set(step._padding.lengths)) * 3:
            one(length)
    torch.cuda.synchronize()
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        for length in lengths:
            one(length)
        torch.cuda.synchronize()
        rates.append(steps / (time.perf_counter() - start))
    said: dict[str, object] = {"rates": rates, "losses": torch.stack(losses).tolist()}
    said["reserved_bytes"] = torch.cuda.max_memory_reserved()
    said["allocated_bytes"] = torch.cuda.max_memory_allocated()
    if kind.startswith("graph"):
        said |= {"lengths": step._padding.lengths, "captures": step.captures, "reason": step.reason}
        said["pool_bytes"] = step._recorder.pool_bytes() if step._recorder is not None else 0
    return said


def main() -> None:
    args = arguments(__doc__, most=6, only="")
    steps, repeats = (100, 3) if args.quick else (300, 5)
    found = {}
    for kind in VARIANTS:
        if args.only and kind not in args.only.split("+"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "result.json")
            child = multiprocessing.get_context("fork").Process(
                target=run, args=(kind, steps, repeats, args.most, path)
            )
            child.start()
            child.join()
            if not os.path.exists(path):
                print(f"{kind}: ended with {child.exitcode}", flush=True)
                continue
            found[kind] = json.loads(Path(path).read_text())
    figures: list[Figure] = []
    for kind, said in found.items():
        rate, spread = median_with_spread(said["rates"])
        ratio = None
        if "eager" in found:
            ratio = paired_ratio([1 / r for r in said["rates"]], [1 / r for r in found["eager"]["rates"]])[0]
        figures.append(Figure(kind, rate, "steps/s", spread, "eager", ratio))
        print(
            f"{kind}: lengths {said.get('lengths')}, recordings {said.get('captures')}, {said.get('reason') or 'ok'}"
        )
    if "eager" in found:
        for kind, said in found.items():
            pairs = zip(said["losses"], found["eager"]["losses"], strict=True)
            worst = max(abs(a - b) / b for a, b in pairs)
            figures.append(Figure(f"{kind}: largest difference of a loss to eager", worst, "of it"))
    alone = found.get("graph, padded to the longest")
    for kind, said in found.items():
        for what in ("reserved_bytes", "pool_bytes"):
            if what in said:
                ratio = said[what] / alone[what] if alone and alone.get(what) else None
                name = what.removesuffix("_bytes")
                figures.append(
                    Figure(f"{kind}: memory {name}", said[what] / 2**20, "MiB", None, "longest alone", ratio)
                )
    report(f"variable lengths, {steps} steps of 32 sequences", figures, args.json)


if __name__ == "__main__":
    main()
