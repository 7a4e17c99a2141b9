"""Seconds from the start of a process to its first and its hundredth training step: auto, eager, reduce-overhead.

    python -m benchmarks.first_step [--quick] [--json FILE] [--model mlp|gpt|both] [--steps 100]
        [--repeats 5]

Each run is a process of its own with empty compile and kernel caches; the clock starts before it is made and is read
when the device has finished that step: imports, CUDA's start, building, compiling, recording and training all count.
Work as in `step_rate`: bf16, clip at norm 1, fused AdamW, eight batches on the device. "auto" is hotloop's default
mode in a loop that knows its length; "eager" is plain PyTorch; "reduce-overhead" is torch.compile's mode of that name.
Variants run in turns, so that a slow moment of the machine meets all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.harness import Figure, arguments, median_with_spread, report

KINDS = ("eager", "auto", "reduce-overhead")


def run(kind: str, name: str, steps: int, began: float) -> None:
    """In a process of its own: train, and print the seconds since `began` after the first and the last step."""
    import torch
    from torch import nn

    from benchmarks.loop_rate import work

    make, loss_fn, data, batch = work(name)
    torch.manual_seed(0)
    model: nn.Module = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [tuple(t[i : i + batch].cuda() for t in data.tensors) for i in range(0, 8 * batch, batch)]
    said: list[float] = []

    def note(step: int) -> None:
        if step in (1, steps):
            torch.cuda.synchronize()
            said.append(time.time() - began)

    if kind == "auto":
        import hotloop

        loop = hotloop.Loop(precision="bf16", record=False)
        model, optimizer = loop.prepare(model, optimizer)

        @loop.capture
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(model(x), y)
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        for step in loop.steps(steps):
            train(*batches[step % 8])
            note(step + 1)
    else:
        forward = torch.compile(model, mode="reduce-overhead") if kind == "reduce-overhead" else model
        for step in range(1, steps + 1):
            x, y = batches[step % 8]
            if kind == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                out = forward(x)
            loss_fn(out.float(), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            note(step)
    print(json.dumps(said))


def measure(kind: str, name: str, steps: int) -> tuple[float, float]:
    """Seconds to the first and the last step of a new process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
            "HOTLOOP_PROGRESS": "0",
        }
        code = f"from benchmarks.first_step import run; run({kind!r}, {name!r}, {steps}, {time.time()!r})"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True
        )
    if done.returncode != 0:
        raise RuntimeError(f"{kind}, {name}: {done.stderr[-800:]}")
    first, last = json.loads(done.stdout.strip().splitlines()[-1])
    return first, last


def main() -> None:
    args = arguments(__doc__, model="both", steps=100, repeats=5)
    figures: list[Figure] = []
    for name in ("mlp", "gpt") if args.model == "both" else (args.model,):
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        # the operating system's file cache is warm for all of them
        if not args.quick:
            measure("eager", name, args.steps)
        for _ in range(1 if args.quick else args.repeats):
            for kind in KINDS:
                times[kind].append(measure(kind, name, args.steps))
                print(f"{name}: {kind}", *times[kind][-1], flush=True)
        for i, which in enumerate(("step 1", f"step {args.steps}")):
            eager = statistics.median(t[i] for t in times["eager"])
            for kind in KINDS:
                value, spread = median_with_spread([t[i] for t in times[kind]])
                title = f"{name}: {kind}, to {which}"
                figures.append(Figure(title, value, "s", spread, "eager", eager / value))
    report("seconds from the start of the process", figures, args.json)


if __name__ == "__main__":
    main()
