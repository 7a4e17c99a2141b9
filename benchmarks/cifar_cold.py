"""CIFAR-10 to 94 % test accuracy from the start of a new process: cold seconds, part by part, beside peers.

    python -m benchmarks.cifar_cold --data FOLDER [--kinds floor:1,cuda:3,...] [--bytecode as-is,kept] [--seeds N]

FOLDER holds train.pt and test.pt as airbench writes them. Each run is a process of its own, one after the other,
kinds interleaved; "cuda:3" is three runs. Seconds count from just before the process is spawned: to the line with the
accuracy ("answer"), and to the end of the process ("end"). Accuracy is that of those same runs. The operating system
has all files in memory, since a process before has read them. What a process compiles goes to new, empty folders
(caches of Triton, Inductor and the CUDA driver), but for "triton-filled", which finds what an earlier run compiled.

Kinds: "cuda" has CUDA C++ kernels, which NVRTC compiles in threads beside `import torch`, every time; "graph" has
torch's own kernels alone; "triton" adds hotloop's Triton kernels to those. In all three an update is one CUDA graph,
CUDA is started and the images are read beside the import, and no torch.optim.Optimizer is made (its constructor
imports torch's compiler). "plain" is the same recipe as one writes it in PyTorch; "airbench" calls the package's
`train94` at once. "floor" is `import torch; torch.zeros(1).cuda()`.

Bytecode: "as-is" leaves the environment alone, which may have none of torch's and keep none. "kept" is what pip
leaves when it installs: all Python files are compiled beforehand, into a folder that all these processes read.

`--seeds N`: N runs of the first of "cuda", "graph" and "triton" in the list, all in one process, for a mean accuracy.
Its seconds are no cold ones.
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

from benchmarks.cifar_cold_child import EPOCHS, OURS
from benchmarks.harness import Figure, half_interval, report

__all__ = ["KINDS", "accuracy", "cold", "keep_bytecode", "main", "measure", "process"]

FLOOR = "import torch; torch.zeros(1).cuda(); torch.cuda.synchronize(); print('{}', flush=True)"
NAMES = {
    "floor": "floor: import torch, start CUDA",
    "cuda": "hotloop, CUDA kernels by NVRTC",
    "graph": "hotloop, torch's kernels",
    "triton": "hotloop, Triton's kernels, cache empty",
    "triton-filled": "hotloop, Triton's kernels, cache filled",
    "plain": "plain PyTorch",
    "airbench": "airbench94",
}
KINDS = "floor:1,cuda:3,graph:3,triton:1,triton-filled:2,plain:2,airbench:1"
"""What is measured, and how often."""


def process(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    bytecode: Path | None = None,
    triton: Path | None = None,
    epochs: tuple[str, ...] = EPOCHS,
    more: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run one cold process; seconds of its parts in turn, to the "answer" and to its "end", and its accuracies in %.

    Args:
        kind: a key of `NAMES`.
        bytecode: where Python finds it; None to leave the environment alone.
        triton: its cache; None for an empty one.
        epochs: lengths and sizes of ours and of the plain peer, as "epochs x pixels".
        more: options of `benchmarks.cifar_cold_child`.

    Raises:
        RuntimeError: the process failed; what it said is in the message.
    """
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "TRITON_CACHE_DIR": str(triton or Path(empty) / "triton")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "CUDA_CACHE_PATH": f"{empty}/cuda"}
        if bytecode is not None:
            env["PYTHONPYCACHEPREFIX"] = str(bytecode)
        command = [sys.executable, "-c", FLOOR]
        if kind != "floor":
            name = kind.removesuffix("-filled")
            command = [sys.executable, "-m", "benchmarks.cifar_cold_child", str(folder), name]
            command += ["--seed", str(seed), "--epochs", *epochs, *more]
        with (Path(empty) / "errors").open("w+") as errors:
            began = time.time()
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as child:
                assert child.stdout is not None
                told: dict[str, Any] | None = None
                for line in child.stdout:
                    if line.startswith("{"):
                        told, answered = json.loads(line), time.time()
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
    if "accuracies" in told:
        row["accuracies"] = [100 * a for a in told["accuracies"]]
    return row


def keep_bytecode(folder: Path) -> None:
    """Compile all that can be imported here, the standard library too, into `folder`."""
    here = Path(__file__).parent
    found = [p for p in sys.path if Path(p).is_dir() and Path(p).resolve() != here.parent]
    # files that are no valid Python are there to test compilers: they fail, and nobody imports them
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-q", "-j", "0", str(here), *found],
        env={**os.environ, "PYTHONPYCACHEPREFIX": str(folder)},
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def cold(
    folder: Path,
    kinds: dict[str, int],
    bytecode: Path | None = None,
    epochs: tuple[str, ...] = EPOCHS,
    more: tuple[str, ...] = (),
) -> list[Figure]:
    """Median seconds of each part and mean accuracy of some cold processes of each kind, interleaved.

    Args:
        kinds: how many of each.
        bytecode: as for `process`.
    """
    title = "as-is" if bytecode is None else "kept"
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    turns = [(turn, k) for turn in range(max(kinds.values())) for k in kinds if turn < kinds[k]]
    with tempfile.TemporaryDirectory() as place:
        for number, (turn, kind) in enumerate(turns):
            # the last run that began with an empty cache leaves a filled one
            cache = Path(place) / f"triton{number}" if kind == "triton" else None
            if kind == "triton-filled":
                earlier = [n for n, (_, k) in enumerate(turns[:number]) if k == "triton"]
                cache = Path(place) / f"triton{earlier[-1] if earlier else ''}"
            try:
                if kind == "triton-filled" and cache is not None and not cache.exists():
                    process(folder, kind, seed=turn, bytecode=bytecode, triton=cache, epochs=epochs)
                row = process(
                    folder, kind, seed=turn, bytecode=bytecode, triton=cache, epochs=epochs, more=more
                )
            except RuntimeError as error:
                print(f"  {error}", flush=True)
                continue
            row["accuracy"] = statistics.mean(row.pop("accuracies", [float("nan")]))
            parts = ", ".join(f"{k} {v:.2f}" for k, v in row.items() if v == v)
            print(f"  {kind}, bytecode {title}, {turn + 1}: {parts}", flush=True)
            rows[kind].append(row)
    figures: list[Figure] = []
    for kind, found in rows.items():
        for what in found[0] if found else ():
            values = [r[what] for r in found if what in r]
            if what == "answer":
                name = f"{NAMES[kind]}, bytecode {title}: to the answer (n={len(values)})"
                spread = (max(values) - min(values)) / 2
                figures.append(Figure(name, statistics.median(values), "s", spread))
            elif what != "accuracy":
                figures.append(Figure(f"    {what}", statistics.median(values), "s"))
            elif kind != "floor":
                figures.append(_mean("    mean accuracy", values))
    return figures


def accuracy(folder: Path, kind: str, seeds: int, epochs: tuple[str, ...] = EPOCHS) -> list[Figure]:
    """Mean accuracy of a kind of ours over `seeds` runs in one process."""
    found = process(folder, kind, epochs=epochs, more=("--seeds", str(seeds)))["accuracies"]
    print(f"  {kind}, {' '.join(epochs)}: accuracy {' '.join(f'{a:.2f}' for a in found)}", flush=True)
    return [_mean(f"{NAMES[kind]}: mean accuracy, one process", found)]


def _mean(name: str, values: list[float]) -> Figure:
    return Figure(f"{name} (n={len(values)})", statistics.mean(values), "%", half_interval(values))


def _kinds(text: str) -> dict[str, int]:
    kinds = {kind: int(count or 1) for kind, _, count in (part.partition(":") for part in text.split(","))}
    if unknown := set(kinds) - set(NAMES):
        raise SystemExit(f"unknown kinds {sorted(unknown)}; there are {', '.join(NAMES)}")
    return kinds


def measure(
    folder: Path,
    kinds: str = KINDS,
    bytecode: str = "as-is,kept",
    seeds: int = 20,
    epochs: tuple[str, ...] = EPOCHS,
    *,
    detail: bool = False,
    quick: bool = False,
) -> list[Figure]:
    """All figures; arguments are the command's options."""
    runs, more = _kinds(kinds), ("--detail",) if detail else ()
    if quick:
        runs, seeds = dict.fromkeys(runs, 1), min(seeds, 2)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as place:
        ours = [kind for kind in runs if kind in OURS]
        if seeds and ours:
            figures += accuracy(folder, ours[0], seeds, epochs)
        else:
            process(folder, "floor")  # reads torch's files
        for title in bytecode.split(","):
            kept = Path(place) / "bytecode" if title == "kept" else None
            if kept is not None:
                keep_bytecode(kept)
            figures += cold(folder, runs, kept, epochs, more)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kinds", default=KINDS, metavar="KIND:RUNS,...")
    parser.add_argument("--bytecode", default="as-is,kept")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="0 for none")
    parser.add_argument("--epochs", nargs="+", default=EPOCHS, metavar="EPOCHSxPIXELS")
    parser.add_argument("--detail", action="store_true", help="wait for the device after each part of ours")
    parser.add_argument("--quick", action="store_true", help="one run of each: a check, not a figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(
        args.data, args.kinds, args.bytecode, args.seeds, tuple(args.epochs),
        detail=args.detail, quick=args.quick,
    )  # fmt: skip
    report("CIFAR-10 to 94 %, cold", figures, args.json)


if __name__ == "__main__":
    main()
