"""Which of twelve public models a captured step takes whole: the reason for the others, trajectory, memory, speed.

    python -m benchmarks.captured_models [--quick] [--json FILE] [--only NAME] [--mode graph|full] [--device cuda|cpu]

Each model of `public_models`, in a process of its own, trains 20 steps in bf16 as an eager loop and, from the same
weights, batches and random numbers, with `@loop.capture`. Told are: whether calls were replays (or the reason that
hotloop gave), the largest difference of a loss relative to the eager one, the peak of allocated device memory over the
eager loop's, and steps per second of 50 further steps over the eager loop's. In mode "full", dropout draws other
numbers than eager, so that losses of models with dropout differ.

Left out of the rates: the first 20 steps. `--device cpu` only runs the models: a CPU records nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import hotloop
from benchmarks.harness import Figure, arguments, report
from benchmarks.public_models import SUBJECTS

STEPS = 20


def train(name: str, captured: bool, mode: str, device: str, steps: int, further: int) -> dict[str, Any]:
    """Losses, peak memory, rate and what hotloop said of one run."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    loop = hotloop.Loop(precision="bf16", record=False, seed=0, nonfinite="stop", device=device)
    prepared = loop.prepare(*subject.modules, *subject.optimizers)
    cut = len(subject.modules)
    run = subject.step(loop, list(prepared[:cut]), list(prepared[cut:]))
    if captured:
        run = loop.capture(run, mode=mode)
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(t.to(device) for t in subject.batch(generator)) for _ in range(8)]
    losses = torch.stack([run(*batches[i % 8]).detach().float() for i in range(steps)]).tolist()
    peak = torch.cuda.max_memory_allocated() - base if cuda else 0
    start = time.perf_counter()
    for i in range(further):
        run(*batches[i % 8])
    if cuda:
        torch.cuda.synchronize()
    rate = further / (time.perf_counter() - start)
    said = {"losses": losses, "peak_bytes": peak, "rate": rate}
    if captured:
        said |= {"reason": run.reason, "replays": run.replays, "captures": run.captures}
    loop.end_training()
    return said


def compare(name: str, mode: str, device: str, quick: bool, path: str) -> None:
    """Both runs of one model, in this process; writes what came of it to `path`."""
    further = 20 if quick else 50
    try:
        plain = train(name, False, mode, device, STEPS, further)
        replayed = train(name, True, mode, device, STEPS, further)
    except Exception as error:
        traceback.print_exc()
        Path(path).write_text(json.dumps({"error": f"{type(error).__name__}: {str(error)[:200]}"}))
        return
    pairs = zip(plain["losses"], replayed["losses"], strict=True)
    difference = max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)
    Path(path).write_text(json.dumps({"plain": plain, "replayed": replayed, "difference": difference}))


def main() -> None:
    args = arguments(__doc__, only="", mode="graph", device="cuda")
    # imported once and before any process is made; none of these starts CUDA
    for library in ("timm", "transformers"):
        try:
            __import__(library)
        except ImportError as error:
            print(f"{library}: {error}")
    figures: list[Figure] = []
    whole = 0
    names = [name for name in SUBJECTS if args.only in name]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "result.json")
            child = multiprocessing.get_context("fork").Process(
                target=compare, args=(name, args.mode, args.device, args.quick, path)
            )
            child.start()
            child.join()
            if not os.path.exists(path):
                print(f"{name}: ended with {child.exitcode}", flush=True)
                continue
            result = json.loads(Path(path).read_text())
        if "error" in result:
            print(f"{name}: failed: {result['error']}", flush=True)
            continue
        plain, replayed = result["plain"], result["replayed"]
        taken = replayed["reason"] is None and replayed["replays"] > STEPS // 2
        whole += taken
        memory = replayed["peak_bytes"] / max(plain["peak_bytes"], 1)
        print(f"{name}: {'captured whole' if taken else replayed['reason']}", flush=True)
        figures += [
            Figure(f"{name}: captured whole", float(taken), ""),
            Figure(f"{name}: largest difference of a loss", result["difference"], "of it"),
            Figure(f"{name}: peak memory", replayed["peak_bytes"] / 2**20, "MiB", peer="eager", ratio=memory),
            Figure(
                f"{name}: rate",
                replayed["rate"],
                "steps/s",
                peer="eager",
                ratio=replayed["rate"] / plain["rate"],
            ),
        ]
    figures.append(Figure(f"captured whole, of {len(names)}", whole, "models"))
    report(f"captured steps of public models, bf16, mode {args.mode}", figures, args.json)


if __name__ == "__main__":
    main()
