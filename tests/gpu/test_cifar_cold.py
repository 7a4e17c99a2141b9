"""The cold CIFAR-10 run on a CUDA device: its kernels by NVRTC against float64, its recorded updates against others."""

import pytest
import torch
import torch.nn.functional as F
from benchmarks.cifar_cold_child import recipe_of
from benchmarks.cifar_cold_kernels import Compilation, Kernels
from benchmarks.cifar_cold_layers import CudaLayers, TorchLayers
from benchmarks.cifar_cold_run import ColdRun
from benchmarks.cifar_cold_start import architecture
from benchmarks.cifar_net import MEAN, STD

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
MOMENTUM = recipe_of(("1x32",)).norm_momentum
# (channels, pixels a side, whether the layer pools) of the six layers at 32 pixels
LAYERS = [(64, 31, 1), (64, 15, 0), (256, 15, 1), (256, 7, 0), (256, 7, 1), (256, 3, 0)]
HALF, SINGLE = 5e-4, 2e-5


@pytest.fixture(scope="module")
def kernels():
    return Kernels(Compilation(architecture()).modules())


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def in_double(x, bias, mean, var, pool, training):
    x = F.max_pool2d(x, 2) if pool else x
    return F.silu(F.batch_norm(x, mean, var, None, None, training, MOMENTUM, 1e-12) + bias[:, None, None])


@pytest.mark.parametrize(("channels", "side", "pool"), LAYERS)
def test_a_layer_is_its_formula_in_float64(kernels, channels, side, pool):
    g = torch.Generator(DEVICE).manual_seed(side + channels)
    x = torch.randn(1536, channels, side, side, device=DEVICE, generator=g).half() + 0.3
    x = x.to(memory_format=torch.channels_last)
    bias = torch.randn(channels, device=DEVICE, generator=g)
    own = CudaLayers(recipe_of(("1x32",)), DEVICE, kernels).after
    results = []
    for layer, dtype in ((own, torch.half), (in_double, torch.double)):
        wide = torch.float if dtype == torch.half else dtype
        xs, bs = x.to(dtype).requires_grad_(), bias.to(wide).requires_grad_()
        mean = torch.full((channels,), 0.25, device=DEVICE, dtype=wide)
        var = torch.full((channels,), 2.0, device=DEVICE, dtype=wide)
        y = layer(xs, bs, mean, var, bool(pool), True)
        if not results:
            slope = (
                torch.randn(y.shape, device=DEVICE, generator=g).half().to(memory_format=torch.channels_last)
            )
        dx, db = torch.autograd.grad(y, (xs, bs), slope.to(dtype))
        with torch.no_grad():
            z = layer(xs, bs, mean, var, bool(pool), False)
        results.append((y.detach(), dx, z, db, mean, var))
    far = [distance(a, b) for a, b in zip(*results, strict=True)]
    print(channels, side, pool, " ".join(f"{d:.1e}" for d in far))
    assert max(far[:3]) < HALF
    assert max(far[3:]) < SINGLE


@pytest.mark.parametrize("size", [24, 32])
def test_the_first_layer_is_its_formula_in_float64(kernels, size):
    g = torch.Generator(DEVICE).manual_seed(size)
    images = torch.randint(0, 256, (300, size, size, 3), dtype=torch.uint8, device=DEVICE, generator=g)
    index = torch.randint(300, (256,), device=DEVICE, generator=g)
    moves = torch.randint(-2, 3, (256, 3), device=DEVICE, generator=g).int()
    moves[:, 2] %= 2
    tone = torch.tensor([[1 / (255 * s) for s in STD], [-m / s for m, s in zip(MEAN, STD, strict=True)]])
    tone = tone.to(DEVICE) * (1 + 0.1 * torch.rand(256, 2, 3, device=DEVICE, generator=g))
    filters = (torch.randn(32, 3, 2, 2, device=DEVICE, generator=g) / 3).half()
    filters = filters.to(memory_format=torch.channels_last)
    recipe = recipe_of(("1x32",))
    found = CudaLayers(recipe, DEVICE, kernels).first(images, index, moves, tone, filters)
    wanted = TorchLayers(recipe, DEVICE).first(images, index, moves, tone.double(), filters.double())
    assert distance(found, wanted) < 2 * HALF


@pytest.mark.parametrize("own", [True, False])
def test_recorded_updates_are_those_made_one_by_one(kernels, monkeypatch, own):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    g = torch.Generator().manual_seed(0)
    data = []
    for n in (6144, 64):
        images = torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=g)
        data += [images.to(DEVICE), torch.randint(10, (n,), generator=g).to(DEVICE)]
    recipe, weights = recipe_of(("1x24", "1x32")), []
    layers = CudaLayers(recipe, DEVICE, kernels) if own else TorchLayers(recipe, DEVICE)
    for graph in (False, True):
        with torch.cuda.stream(torch.cuda.Stream()):
            run = ColdRun(recipe, tuple(data), layers, graph=graph, mark=lambda name: None)
            run.reset(3)
            first = [p.detach().clone() for p in run.filters]
            run.train(lambda: None)
            assert int(run.counter) == run.steps == 8
            weights.append([p.detach().clone() for p in (*run.filters, *run.biases, run.net.head)])
        torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    assert min(distance(a, b) for a, b in zip(first, weights[0], strict=False)) > 0.1
    assert max(distance(a, b) for a, b in zip(*weights, strict=True)) < 0.02
