"""CIFAR-10 to 94 % test accuracy from the start of a new process: cold seconds, part by part, beside peers.

    python -m benchmarks.cifar_cold --data FOLDER [--repeats N] [--kinds graph,cuda,plain,...] [--bytecode as-is,kept]

FOLDER holds train.pt and test.pt as airbench writes them. Each run is a process of its own, one after the other,
kinds interleaved; files are in the page cache, since processes before have read them. Nothing compiled is kept
(caches of Triton, Inductor and the CUDA driver are new, empty folders), but for "triton, cache filled", whose Triton
cache an earlier process filled. Seconds count from just before the process is spawned: to the line with the accuracy,
and to the end of the process. Accuracy is that of those same runs.

Kinds: "eager" and "graph" use torch's own kernels; "triton" adds hotloop's Triton kernels; "cuda" has CUDA C++ kernels,
which NVRTC compiles in threads beside `import torch`, every time. In all four CUDA is started and the images are read
beside the import, too, and no torch.optim.Optimizer is made (its constructor imports torch's compiler). "plain" is the
same recipe as one writes it in PyTorch; "airbench" calls the package's `train94` at once. "floor" is
`import torch; torch.zeros(1).cuda()`.

Bytecode: "as-is" leaves the environment alone. "kept" is Python's default, whatever this environment says: one process
before leaves the bytecode of what it imported in a folder, where all later ones find it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cifar_cold_child import EPOCHS
from benchmarks.harness import Figure, report

__all__ = ["cold", "main", "process"]

FLOOR = "import torch; torch.zeros(1).cuda(); torch.cuda.synchronize(); print('{}', flush=True)"
NAMES = {
    "floor": "floor: import torch, start CUDA",
    "eager": "hotloop, torch's kernels",
    "graph": "hotloop, torch's kernels, a graph",
    "triton": "hotloop, Triton's kernels, a graph, cache empty",
    "triton-filled": "hotloop, Triton's kernels, a graph, cache filled",
    "cuda": "hotloop, CUDA kernels by NVRTC, a graph",
    "plain": "plain PyTorch",
    "airbench": "airbench94",
}


def process(
    folder: Path,
    kind: str,
    *,
    seed: int,
    bytecode: Path | None,
    triton: Path | None,
    epochs: tuple[str, ...] = EPOCHS,
    more: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run one cold process; seconds of its parts in turn, to the "answer", to its "end", and its accuracy.

    Args:
        kind: a key of `NAMES`.
        bytecode: where Python keeps it; None to leave the environment alone.
        triton: its cache; None for an empty one.

    Raises:
        RuntimeError: the process failed; what it said is in the message.
    """
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "TRITON_CACHE_DIR": str(triton or Path(empty) / "triton")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "CUDA_CACHE_PATH": f"{empty}/cuda"}
        if bytecode is not None:
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            env["PYTHONPYCACHEPREFIX"] = str(bytecode)
        command = [sys.executable, "-c", FLOOR]
        if kind != "floor":
            command = [
                sys.executable,
                "-m",
                "benchmarks.cifar_cold_child",
                str(folder),
                kind.removesuffix("-filled"),
            ]
            command += ["--seed", str(seed), "--epochs", *epochs, *more]
        with (Path(empty) / "errors").open("w+") as errors:
            began = time.time()
            child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert child.stdout is not None
            told: dict[str, Any] | None = None
            for line in child.stdout:
                if line.startswith("{"):
                    told, answered = json.loads(line), time.time()
                else:
                    print(f"    {line.rstrip()}", flush=True)
            child.wait()
            ended = time.time()
            if child.returncode or told is None:
                errors.seek(0)
                raise RuntimeError(f"{kind} ended with {child.returncode}: {errors.read()[-1500:]}")
    row: dict[str, Any] = {}
    before = began
    for what, when in told.get("marks", {}).items():
        row[what], before = when - before, when
    row |= {"answer": answered - began, "end": ended - began}
    if "accuracy" in told:
        row["accuracy"] = 100 * told["accuracy"]
        print(f"  {kind}: modules {told['modules']}, dynamo {told['dynamo']}", flush=True)
    return row


def cold(
    folder: Path,
    kinds: list[str],
    repeats: int,
    bytecode: str,
    epochs: tuple[str, ...] = EPOCHS,
    more: tuple[str, ...] = (),
) -> list[Figure]:
    """Median seconds of each part, and mean accuracy, of `repeats` processes of each kind, interleaved.

    Args:
        bytecode: "as-is" or "kept".
    """
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as place:
        kept = Path(place) / "bytecode" if bytecode == "kept" else None
        filled = Path(place) / "triton"
        # a process before: files come into the page cache, bytecode and the filled cache are made
        before = [k for k in kinds if kept is not None or k == "triton-filled"] or ["floor"]
        for turn, kind in [(0, k) for k in before] + [(t, k) for t in range(1, repeats + 1) for k in kinds]:
            try:
                cache = filled if kind == "triton-filled" else None
                row = process(folder, kind, seed=turn, bytecode=kept, triton=cache, epochs=epochs, more=more)
            except RuntimeError as error:
                print(f"  {error}", flush=True)
                continue
            parts = ", ".join(f"{k} {v:.2f}" for k, v in row.items())
            print(f"  {kind}, {bytecode}, {'run' if turn else 'before'} {turn}: {parts}", flush=True)
            if turn:
                rows[kind].append(row)
    figures: list[Figure] = []
    for kind, found in rows.items():
        for what in found[0] if found else ():
            values = [r[what] for r in found if what in r]
            if what == "accuracy":
                half = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
                figures.append(
                    Figure(f"    mean accuracy (n={len(values)})", statistics.mean(values), "%", half)
                )
            elif what == "answer":
                name = f"{NAMES[kind]}, bytecode {bytecode}: to the answer"
                spread = (max(values) - min(values)) / 2
                figures.append(Figure(name, statistics.median(values), "s", spread))
            else:
                figures.append(Figure(f"    {what}", statistics.median(values), "s"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default="floor,graph,cuda,plain,airbench")
    parser.add_argument("--bytecode", default="as-is,kept")
    parser.add_argument("--epochs", nargs="+", default=EPOCHS, metavar="EPOCHSxPIXELS")
    parser.add_argument("--detail", action="store_true", help="wait for the device after each part of ours")
    parser.add_argument("--quick", action="store_true", help="one run of each: a check, not a figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(NAMES):
        raise SystemExit(f"unknown kinds {sorted(unknown)}; there are {', '.join(NAMES)}")
    figures: list[Figure] = []
    for bytecode in args.bytecode.split(","):
        more = ("--detail",) if args.detail else ()
        repeats = 1 if args.quick else args.repeats
        figures += cold(args.data, kinds, repeats, bytecode, tuple(args.epochs), more)
    report("CIFAR-10 to 94 %, cold", figures, args.json)


if __name__ == "__main__":
    main()
