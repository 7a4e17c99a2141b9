"""The cold CIFAR-10 run: its kernels (compiled for the CPU here), its updates, its whitening, its reading."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import cifar_cold, cifar_cold_layers
from benchmarks.cifar_cold_child import recipe_of
from benchmarks.cifar_cold_kernels import Kernels
from benchmarks.cifar_cold_layers import CudaLayers, TorchLayers
from benchmarks.cifar_cold_run import ColdRun
from benchmarks.cifar_cold_start import read_stored
from benchmarks.cifar_net import MEAN, STD, Recipe
from benchmarks.cifar_recipe import Filters, Trainer

from hotloop.kernels.augment import Augment, augment_eager
from hotloop.kernels.pooled_norm import pooled_norm_silu_eager

SOURCE = Path(__file__).parents[2] / "benchmarks" / "cifar_cold.cu"
CPU = torch.device("cpu")

# blocks run in turn, the threads of one beside each other
HOST = r"""
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>
struct Place { unsigned x, y; };
static thread_local Place threadIdx;
static Place blockIdx, gridDim;
static std::unique_ptr<std::barrier<>> together;
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
static void __syncthreads() { together->arrive_and_wait(); }
static float half(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static unsigned bits(float v) { _Float16 h = (_Float16)v; unsigned short b; memcpy(&b, &h, 2); return b; }
static void host_unpack(unsigned w, float& low, float& high) { low = half(w & 0xffff); high = half(w >> 16); }
static unsigned host_pack(float low, float high) { return bits(low) | bits(high) << 16; }
#define POOL_AND_SUM
#define ADD_UP
#define SCALE_AND_GATE
#define SLOPE_AND_SUM
#define SLOPE_AND_SCATTER
#define FILTERED
#include "cifar_cold.cu"
template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) { kernel(*(A*)values[I]...); }
template <class... A> static void run(void (*kernel)(A...), unsigned x, unsigned y, unsigned n, void** values) {
    gridDim = {x, y};
    for (unsigned b = 0; b < x * y; ++b) {
        blockIdx = {b % x, b / x};
        together = std::make_unique<std::barrier<>>(n);
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < n; ++t)
            threads.emplace_back([=] {
                threadIdx = {t, 0};
                call(kernel, values, std::index_sequence_for<A...>{});
                together->arrive_and_drop();
            });
        for (auto& t : threads) t.join();
    }
}
extern "C" int launch(const char* name, unsigned x, unsigned y, unsigned n, void** values) {
#define KNOW(K) if (!strcmp(name, #K)) { run(K, x, y, n, values); return 0; }
    KNOW(pool_and_sum_0) KNOW(pool_and_sum_1) KNOW(add_up) KNOW(scale_and_gate_0) KNOW(infer_0) KNOW(infer_1)
    KNOW(slope_and_sum) KNOW(slope_and_scatter_0) KNOW(slope_and_scatter_1) KNOW(filtered)
    return 1;
}
"""


class OnHost(Kernels):
    """`Kernels` for tensors of the CPU."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: tuple[int, int], threads: int, stream: int, *values: Any) -> None:
        held = [v if isinstance(v, ctypes._SimpleCData) else ctypes.c_void_p(v.data_ptr()) for v in values]
        array = (ctypes.c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
        assert self.library.launch(name.encode(), *grid, threads, array) == 0


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> CudaLayers:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    place = tmp_path_factory.mktemp("cold")
    (place / "host.cc").write_text(HOST)
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", f"-I{SOURCE.parent}"]
    done = subprocess.run([*command, "host.cc", "-o", "host.so"], cwd=place, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"g++ cannot compile for the CPU: {done.stderr[:200]}")
    return CudaLayers(Recipe(), CPU, OnHost(place / "host.so"))


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar_cold_layers, "_stream", lambda: 0)
    monkeypatch.setattr(cifar_cold_layers, "_blocks", lambda pixels, channels, turns: 3)


def images_like(n: int, channels: int, height: int, width: int) -> torch.Tensor:
    x = torch.randn(n, channels, height, width, generator=torch.Generator().manual_seed(n + channels)) + 0.5
    return x.half().to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("pool", "channels", "height", "width"), [(1, 64, 7, 5), (0, 256, 2, 3)])
def test_the_kernels_are_the_eager_norm(
    layers: CudaLayers, pool: int, channels: int, height: int, width: int
) -> None:
    results = []
    for own in (True, False):
        x = images_like(5, channels, height, width).requires_grad_()
        bias = torch.linspace(-1, 1, channels).requires_grad_()
        mean, var = torch.full((channels,), 0.25), torch.full((channels,), 2.0)
        momentum = layers.recipe.norm_momentum
        if own:
            y = layers.after(x, bias, mean, var, bool(pool), True)
        else:
            y = pooled_norm_silu_eager(
                x, bias, mean, var, pool=bool(pool), training=True, momentum=momentum, eps=1e-12
            )
        y.backward(images_like(*y.shape))
        with torch.no_grad():
            if own:
                z = layers.after(x, bias, mean, var, bool(pool), False)
            else:
                z = pooled_norm_silu_eager(
                    x, bias, mean, var, pool=bool(pool), training=False, momentum=momentum, eps=1e-12
                )
        results.append((y.detach(), x.grad, bias.grad, mean, var, z))
    for mine, theirs in zip(*results, strict=True):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=4e-3, atol=4e-3)


def test_the_first_layer_is_the_augmented_convolution(layers: CudaLayers) -> None:
    torch.manual_seed(0)
    size, batch = 9, 6
    images = torch.randint(0, 256, (8, size, size, 3), dtype=torch.uint8)
    index = torch.randint(8, (batch,))
    filters = (torch.randn(32, 3, 2, 2) / 3).half().to(memory_format=torch.channels_last)
    scale, shift = (
        torch.tensor([1 / (255 * s) for s in STD]),
        torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)]),
    )
    for move in ((0, 0, 0), (-2, 1, 0), (1, 2, 1), (0, 0, 1)):
        how = Augment(mean=MEAN, std=STD, offset=move[:2], mirror=bool(move[2]))
        x = augment_eager(images, index, torch.zeros((), dtype=torch.int64), how, seed=0, dtype=torch.half)
        wanted = F.silu(F.conv2d(x.float(), filters.float()))
        moves = torch.tensor(move, dtype=torch.int32).expand(batch, 3)
        tone = torch.stack((scale, shift)).expand(batch, 2, 3)
        for made in (layers, TorchLayers(layers.recipe, CPU)):
            found = made.first(images, index, moves, tone, filters)
            torch.testing.assert_close(found.float(), wanted, rtol=4e-3, atol=4e-3)


def small(**changes: Any) -> tuple[Recipe, tuple[torch.Tensor, ...]]:
    recipe = replace(
        recipe_of(("1x32",)),
        batch=16,
        dtype="float32",
        widths=(64, 64, 64),
        kernels=False,
        capture="eager",
        **changes,
    )
    g = torch.Generator().manual_seed(0)
    parts = [
        (
            torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=g),
            torch.randint(0, 10, (n,), generator=g),
        )
        for n in (64, 32)
    ]
    return recipe, (*parts[0], *parts[1])


def cold_run(recipe: Recipe, data: tuple[torch.Tensor, ...]) -> ColdRun:
    run = ColdRun(recipe, data, TorchLayers(recipe, CPU), graph=False, mark=lambda name: None)
    run.reset(0)
    return run


def test_updates_are_those_of_the_optimizers() -> None:
    recipe, data = small()
    run = cold_run(recipe, data)
    weights = [*run.filters, *run.biases, run.net.head]
    twins = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    k = len(run.filters)
    rates = torch.tensor([0.2, 0.05, 0.4])
    muon = Filters(list(twins[:k]), rates[0], recipe.filter_momentum, recipe)
    decay = recipe.decay * recipe.batch
    sgd = torch.optim.SGD(
        [
            {"params": twins[k:-1], "lr": 0.05, "weight_decay": decay / recipe.bias_rate},
            {"params": twins[-1:], "lr": 0.4, "weight_decay": decay / recipe.head_rate},
        ],
        momentum=recipe.momentum, nesterov=True,
    )  # fmt: skip
    for p in twins[k:]:
        sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in twins]
        with torch.no_grad():
            run.update([g.clone() for g in gradients], rates)
        for p, g in zip(twins, gradients, strict=True):
            p.grad = g
        muon.step()
        sgd.step()
    for mine, theirs in zip(weights, twins, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=2e-4, atol=2e-4)


def test_whitening_is_the_recipes() -> None:
    recipe, data = small()
    run, trainer = cold_run(recipe, data), Trainer(recipe, data)
    trainer.reset(0)
    # eigenvectors have no sign; the filters come in both
    for mine, theirs in zip(run.net.whiten[:12], trainer.net.whiten[:12], strict=True):
        torch.testing.assert_close(mine * torch.sign((mine * theirs).sum()), theirs, rtol=1e-3, atol=1e-3)


def test_a_gradient_is_that_of_the_smoothed_cross_entropy() -> None:
    recipe, data = small()
    run = cold_run(recipe, data)
    seen: list[list[torch.Tensor]] = []
    run.update = lambda gradients, rates: seen.append(gradients)  # type: ignore[method-assign]
    run.step(32)
    index = run.order[: recipe.batch]
    x = run.layers.first(data[0], index, run.moves[: len(index)], run.tone[: len(index)], run.net.whiten)
    loss = F.cross_entropy(
        run.logits(x, True), data[1][index], label_smoothing=recipe.smoothing, reduction="sum"
    )
    loss.backward()
    for p, g in zip((*run.filters, *run.biases, run.net.head), seen[0], strict=True):
        assert p.grad is not None
        torch.testing.assert_close(g, p.grad, rtol=1e-3, atol=1e-4)


def test_stored_tensors_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    _, (images, labels, *_) = small()
    torch.save({"images": images, "labels": labels, "classes": ["a"] * 10}, tmp_path / "train.pt")
    pixels, numbers = read_stored(tmp_path / "train.pt")
    assert torch.equal(torch.frombuffer(pixels, dtype=torch.uint8).view_as(images), images)
    assert torch.equal(torch.frombuffer(numbers, dtype=torch.int64), labels)
    torch.save({"images": images, "labels": labels[1:].clone()}, tmp_path / "test.pt")
    with pytest.raises(ValueError, match="not images and labels"):
        read_stored(tmp_path / "test.pt")


def test_kinds_take_turns_and_the_filled_cache_is_the_last_empty_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str | None]] = []

    def process(folder: Path, kind: str, *, triton: Path | None, **rest: Any) -> dict[str, Any]:
        if triton is not None:
            assert triton.exists() == (kind == "triton-filled")
            triton.mkdir(exist_ok=True)
        seen.append((kind, triton and triton.name))
        return {"answer": float(len(seen)), "end": 10.0 * len(seen), "accuracies": [90.0 + len(seen)]}

    monkeypatch.setattr(cifar_cold, "process", process)
    kinds = {"cuda": 3, "triton": 2, "triton-filled": 2}
    figures = {f.name: f for f in cifar_cold.cold(tmp_path, kinds)}
    assert [k for k, _ in seen] == ["cuda", "triton", "triton-filled"] * 2 + ["cuda"]
    assert seen[1][1] == seen[2][1] != seen[4][1] == seen[5][1]
    answer = figures["hotloop, CUDA kernels by NVRTC, bytecode as-is: to the answer (n=3)"]
    assert (answer.value, answer.spread) == (4.0, 3.0)
    assert figures["    mean accuracy (n=3)"].value == 94.0


def test_a_filled_cache_is_made_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def process(folder: Path, kind: str, *, triton: Path, **rest: Any) -> dict[str, Any]:
        seen.append(triton.exists())
        triton.mkdir(exist_ok=True)
        return {"answer": 1.0, "end": 2.0, "accuracies": [94.0]}

    monkeypatch.setattr(cifar_cold, "process", process)
    cifar_cold.cold(tmp_path, {"triton-filled": 2})
    assert seen == [False, True, True]


def test_a_process_tells_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "{'marks': {'a': 101, 'b': 103}, 'accuracies': [float(os.path.exists(p))]}"
    program = f"import json, os; p = os.environ['TRITON_CACHE_DIR']; print('said'); print(json.dumps({told}))"
    # when each process begins, answers and ends
    clock = iter([100.0, 104.5, 106.0, 100.0, 104.5, 106.0, 100.0, 106.0])
    monkeypatch.setattr(cifar_cold, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setattr(cifar_cold, "FLOOR", program)
    row = cifar_cold.process(tmp_path, "floor", triton=tmp_path)
    assert row == {"a": 1, "b": 2, "answer": 4.5, "end": 6, "accuracies": [100]}
    assert cifar_cold.process(tmp_path, "floor")["accuracies"] == [0]
    monkeypatch.setattr(cifar_cold, "FLOOR", "raise SystemExit('no device')")
    with pytest.raises(RuntimeError, match="no device"):
        cifar_cold.process(tmp_path, "floor")


def test_kept_bytecode_is_what_python_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(cifar_cold.sys, "path", [str(package)])
    cifar_cold.keep_bytecode(tmp_path / "kept")
    env = {"PYTHONPYCACHEPREFIX": str(tmp_path / "kept"), "PYTHONPATH": str(package)}
    program = "import one, os; print(os.path.exists(one.__cached__), one.__cached__)"
    command = [sys.executable, "-B", "-c", program]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"True {tmp_path / 'kept'}")
