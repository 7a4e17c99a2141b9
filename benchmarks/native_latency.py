"""Latency of compiled models beside ONNX Runtime, OpenVINO, AOTInductor, torch.compile and eager, in one run.

    python -m benchmarks.native_latency [--quick] [--json FILE] [--peers ort,openvino,aoti,compile,eager]

Counts: one call at batch 1 on one pinned core, real-time priority where allowed, inputs ready in memory, single
threads everywhere. Ours from C (the time-stamp counter around each call, its cost inside the figure) and from Python;
the peers from Python with their cheapest call: ONNX Runtime with I/O binding, OpenVINO with a shared infer request,
AOTInductor's package runner, all in `inference_mode`. Blocks of ours and of the peers take turns; per library the
quietest block and all blocks are both printed. Warm-up: one block of each. Left out: building and loading.

The floor is the larger of arithmetic at this core's measured multiply-add rate and reading the weights once from the
cache level that holds them (recurrent weights once a step), measured in the same run.

"STAC-like step" is one step of the shape LSTM_A (window 50, 100 features, 2 x 100 units): the state is carried, only
the newest event is timed, what could be computed before it is excluded. Random weights, no audit, not a STAC result.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Figure, arguments, report
from benchmarks.native_models import Example, make_models
from hotloop import native
from hotloop.native.library import Library, open_library
from hotloop.native.peers import measure_in_turns, prepare_peers, time_loop
from hotloop.native.timing import Core, measure_calls, measure_core, pinned


@dataclass
class Timed:
    """Nanoseconds by block."""

    blocks: list[np.ndarray[Any, np.dtype[np.float64]]]

    def quiet(self, q: float) -> float:
        best = min(self.blocks, key=lambda block: float(np.median(block)))
        return float(np.percentile(best, q)) / 1e3

    def every(self, q: float) -> float:
        return float(np.percentile(np.concatenate(self.blocks), q)) / 1e3


def floor_us(name: str, library: Library, core: Core) -> float:
    """Arithmetic, or reading the weights, whichever takes longer; recurrent weights are read at every step."""
    inside = library.description["weight_bytes"]
    rate = (
        core.l1_rate if inside <= core.l1_bytes else core.l2_rate if inside <= core.l2_bytes else core.l3_rate
    )
    macs = {
        "a": 32 * 64 + 64 * 64 + 64,
        "b": 256 * 512 + 512 * 512 + 512 * 8,
        "c": 4 * 64 * (32 + 64 * 3) + 64,
        "d": 64 * 4 * 64 * (32 + 64 * 3) + 64,
        "dA": 50 * 4 * 100 * 400 + 100,
        # the cone of the last output: 1, 3, 7, 15 rows from the last layer to the first
        "e": 3 * 32 * 32 * (1 + 3 + 7 + 15) + 32,
        "f": 32 * 32 * 64 + 32 * 32 + 2 * 32 * 32 + 32 * 32 + 2 * 32 * 64 + 32,
    }[name.split()[0]]
    steps = {"d": 64 * 2 * 4 * 64 * 64 * 4, "dA": 50 * 2 * 4 * 100 * 100 * 4}.get(name.split()[0], inside)
    return max(macs / core.multiply_rate, steps / rate) * 1e6


def in_c(library: Library, calls: int, blocks: int, *, prep: bool = False) -> Timed:
    return Timed(measure_calls(library, calls=calls, blocks=blocks, prep=prep).blocks)


def line(name: str, timed: Timed, note: str = "") -> None:
    quiet = "".join(f"{timed.quiet(q):10.3f}" for q in (50, 99, 99.9))
    every = "".join(f"{timed.every(q):10.3f}" for q in (50, 99, 99.9))
    print(f"  {name:34}{quiet}  |{every}   {note}", flush=True)


def run_model(
    name: str, model: nn.Module, example: Example, peers: list[str], core: Core, quick: bool, folder: Path
) -> list[Figure]:
    compiled = native.build(model, example, out=folder / "model.so", quiet=True)
    library = open_library(folder / "model.so")
    floor = floor_us(name, library, core)
    calls, blocks = (500, 3) if quick else (4000, 10)
    ready, failed = prepare_peers(peers, model, example, folder)
    for peer, why in failed.items():
        print(f"  {peer}: not measured, {why}")
    arrays = [x.numpy() for x in example]
    outputs = [np.zeros(item.shape, np.float32) for item in library.outputs]
    into, every = compiled.into, [*arrays, *outputs]

    def ours() -> None:
        into(*every)

    timed: dict[str, Timed] = {"hotloop, C": in_c(library, calls, blocks)}
    loops: list[float] = []
    python: dict[str, list[np.ndarray[Any, np.dtype[np.float64]]]] = {peer: [] for peer in ready}
    for _ in range(blocks):
        with pinned():
            loops.append(time_loop(ours, calls))
        for peer, measured in measure_in_turns(
            ready, count=calls, blocks=1, budget_s=0.02 if quick else 0.1
        ).items():
            python[peer] += measured
    timed |= {peer: Timed(blocks_of) for peer, blocks_of in python.items()}
    print(f"{name}: floor {floor:.3f} us; error {compiled.facts['report']['worst_relative_error']:.1e}")
    figures = []
    best = timed["hotloop, C"]
    for label, item in timed.items():
        ratio = item.quiet(50) / best.quiet(50)
        line(
            label,
            item,
            "" if label == "hotloop, C" else f"{ratio:.0f}x p50, {item.quiet(99) / best.quiet(99):.0f}x p99",
        )
        for q in (50, 99, 99.9):
            figures.append(
                Figure(
                    f"{name}, {label}, p{q:g}",
                    item.quiet(q),
                    "us",
                    peer="hotloop, C",
                    ratio=ratio,
                    limit=floor,
                )
            )
            figures.append(Figure(f"{name}, {label}, p{q:g}, all blocks", item.every(q), "us"))
    print(
        f"  {'hotloop, Python (into, a loop)':34}{min(loops) / 1e3:10.3f}{'':20}  |{np.median(loops) / 1e3:10.3f}",
        flush=True,
    )
    figures.append(Figure(f"{name}, hotloop, Python", min(loops) / 1e3, "us"))
    return figures


def run_machines(models: dict[str, tuple[nn.Module, Example]], quick: bool, folder: Path) -> list[Figure]:
    """State machines: one event, with and without what prep does before it."""
    calls, blocks = (500, 3) if quick else (10_000, 20)
    figures = []
    print("state machines, one event")
    cases = [
        ("d LSTM 64x(32-2x64)", "fp32", "LSTM step 2x64"),
        ("e TCN 64x32", "fp32", "TCN step"),
        ("f attention 32x32", "fp32", "attention step, key/value ring of 32"),
        ("dA LSTM 50x(100-2x100)", "fp32", "STAC-like step fp32 (unaudited)"),
        ("dA LSTM 50x(100-2x100)", "int8", "STAC-like step int8 (unaudited)"),
    ]
    for name, precision, label in cases:
        model, example = models[name]
        calibration = [torch.randn_like(example[0]) for _ in range(64)] if precision == "int8" else None
        try:
            compiled = native.build(
                model, example, streaming=True, precision=precision, calibration=calibration,
                out=folder / "machine.so", quiet=True, force=True,
            )  # fmt: skip
        except native.BuildError as error:
            print(f"  {label}: not measured, {error}")
            continue
        library = open_library(folder / "machine.so")
        error = compiled.facts["report"]["worst_relative_error"]
        for what, prep in (("commit, after prep", True), ("prep and commit", False)):
            timed = in_c(library, calls, blocks, prep=prep)
            line(f"{label}: {what}", timed, f"error {error:.1e}")
            for q in (50, 99, 99.9):
                figures.append(Figure(f"{label}, {what}, p{q:g}", timed.quiet(q), "us"))
                figures.append(Figure(f"{label}, {what}, p{q:g}, all blocks", timed.every(q), "us"))
    return figures


def main() -> None:
    options = arguments(__doc__, peers="ort,openvino,aoti,compile,eager", only="")
    torch.set_num_threads(1)
    core = measure_core()
    print(
        f"one core: L1 {core.l1_rate / 1e9:.0f} GB/s, L2 {core.l2_rate / 1e9:.0f} GB/s, "
        f"L3 {core.l3_rate / 1e9:.0f} GB/s, {2 * core.multiply_rate / 1e9:.0f} GFLOP/s; "
        f"load average {os.getloadavg()[0]:.2f}; the timer's 20 to 30 ns "
        "are in C figures"
    )
    print(
        f"  {'us':34}{'p50':>10}{'p99':>10}{'p99.9':>10}  |{'p50':>10}{'p99':>10}{'p99.9':>10}   "
        "quietest block | all blocks"
    )
    models = make_models()
    peers = [peer for peer in options.peers.split(",") if peer]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, example) in models.items():
            if options.only and name.split()[0] not in options.only.split(","):
                continue
            own = Path(folder) / name.split()[0]
            own.mkdir()
            figures += run_model(name, model, example, peers, core, options.quick, own)
        if not options.only or "machines" in options.only.split(","):
            figures += run_machines(models, options.quick, Path(folder))
    if options.json is not None:
        report("native latency", figures, options.json)


if __name__ == "__main__":
    main()
