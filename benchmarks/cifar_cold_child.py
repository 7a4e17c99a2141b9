"""The cold process of `benchmarks.cifar_cold`: one run, from nothing to the number of right answers.

    python -m benchmarks.cifar_cold_child FOLDER KIND [--seed N] [--seeds COUNT] [--epochs 9.5x32 ...] [--detail]

It prints one line of JSON: when each part was done (seconds since the epoch), and the accuracies.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cifar_cold_kernels import Compilation, Kernels
from benchmarks.cifar_cold_start import Beside, architecture, load_libraries, read_stored, start_context

if TYPE_CHECKING:
    import mmap

    import torch

    from benchmarks.cifar_net import Recipe

__all__ = ["EPOCHS", "OURS", "main", "recipe_of"]

OURS = ("cuda", "graph", "triton")
EPOCHS = ("5.25x24", "5.25x32")
"""Lengths and sizes: longer than the warm run's, as that costs a cold one little."""


def recipe_of(epochs: tuple[str, ...]) -> Recipe:
    """The recipe with these lengths, "epochs x pixels" each; rates fall on a line, every layer learns all the time."""
    from benchmarks.cifar_net import Recipe

    sizes = tuple((float(a), int(b)) for a, b in (e.split("x") for e in epochs))
    return Recipe(sizes=sizes, features=32, smoothing=0.15, bias_rate=0.09, tta_share=0.3)


def ours(
    folder: Path, kind: str, seeds: list[int], epochs: tuple[str, ...], detail: bool, marks: dict[str, float]
) -> list[float]:
    """Test accuracies of runs of kind "cuda", "graph" or "triton"; marks are the first one's."""
    gc.disable()  # what an import makes stays
    # it would read the entry points of every installed package
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    starting, opening = Beside(start_context), Beside(load_libraries)
    reading = Beside(lambda: [read_stored(folder / f"{split}.pt") for split in ("train", "test")])
    compiling = Beside(lambda: Kernels(Compilation(architecture()).modules())) if kind == "cuda" else None
    import torch

    marks["import torch"] = time.time()
    from benchmarks.cifar_cold_layers import CudaLayers, TorchLayers, TritonLayers
    from benchmarks.cifar_cold_run import ColdRun

    marks["import the recipe"] = time.time()
    starting.result()
    kernels = compiling.result() if compiling is not None else None
    opening.result()
    device = torch.device("cuda")
    data = tuple(t for part in reading.result() for t in tensors(part, device))
    torch.cuda.synchronize()
    marks["start CUDA, copy"] = time.time()

    def mark(name: str) -> None:
        if detail:
            torch.cuda.synchronize()
            note(name)

    def note(name: str) -> None:
        marks.setdefault(name, time.time())

    def one(seed: int) -> float:
        run = ColdRun(recipe, data, layers, graph=True, mark=mark)
        run.reset(seed)
        note("new weights, whitening, order")
        run.train(lambda: note("first updates, recording"))
        torch.cuda.synchronize()
        note("updates")
        right, _ = run.evaluate()
        share = int(right) / len(data[3])
        note("evaluation")
        return share

    with torch.cuda.stream(torch.cuda.Stream()):
        recipe = recipe_of(epochs)
        layers: TorchLayers
        if kernels is not None:
            layers = CudaLayers(recipe, device, kernels)
        else:
            layers = (TritonLayers if kind == "triton" else TorchLayers)(recipe, device)
        found = [one(seeds[0])]
        for seed in seeds[1:]:
            gc.collect()
            torch.cuda.empty_cache()  # the last run's recordings
            found.append(one(seed))
    return found


def tensors(part: tuple[mmap.mmap, mmap.mmap], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of `read_stored` on the device."""
    import torch

    images = torch.frombuffer(part[0], dtype=torch.uint8).view(-1, 32, 32, 3)
    return images.to(device), torch.frombuffer(part[1], dtype=torch.int64).to(device)


def plain(folder: Path, seed: int, epochs: tuple[str, ...], marks: dict[str, float]) -> float:
    """Test accuracy of the same recipe as one writes it in PyTorch, in the usual order."""
    import torch

    marks["import torch"] = time.time()
    torch.zeros(1).cuda()
    torch.cuda.synchronize()
    marks["start CUDA"] = time.time()
    from benchmarks.cifar_peers import PlainRun
    from benchmarks.cifar_recipe import read_cifar

    marks["import the recipe"] = time.time()
    data = tuple(t.cuda() for t in read_cifar(folder))
    marks["read, copy"] = time.time()
    outcome = PlainRun(recipe_of(epochs), data).run(seed)
    marks["training, evaluation"] = time.time()
    return outcome.accuracy


def airbench94(folder: Path, marks: dict[str, float]) -> float:
    """Test accuracy of the package's 94 % network, its `train94` called at once."""
    import contextlib
    import io
    import re
    import tempfile

    import airbench  # type: ignore[import-not-found,unused-ignore]

    marks["import airbench"] = time.time()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        Path("cifar10").symlink_to(folder.resolve())
        with contextlib.redirect_stdout(said):
            airbench.train94()
    marks["training, evaluation"] = time.time()
    last = [line for line in said.getvalue().splitlines() if "eval" in line][-1]
    numbers = [float(word) for word in last.split("|") if re.fullmatch(r"\s*\d+\.\d+\s*", word)]
    return numbers[-2]


def main() -> None:
    marks: dict[str, float] = {"python": time.time()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=(*OURS, "plain", "airbench"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many runs of ours, one after the other")
    parser.add_argument("--epochs", nargs="+", default=EPOCHS)
    parser.add_argument("--detail", action="store_true", help="wait for the device after each part")
    args = parser.parse_args()
    epochs = tuple(args.epochs)
    if args.kind == "plain":
        found = [plain(args.folder, args.seed, epochs, marks)]
    elif args.kind == "airbench":
        found = [airbench94(args.folder, marks)]
    else:
        seeds = list(range(args.seed, args.seed + args.seeds))
        found = ours(args.folder, args.kind, seeds, epochs, args.detail, marks)
    print(json.dumps({"marks": marks, "accuracies": found}), flush=True)


if __name__ == "__main__":
    main()
