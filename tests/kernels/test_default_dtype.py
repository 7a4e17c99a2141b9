"""torch's default dtype is the models' affair: what the kernels hold beside their arguments stays what it was."""

import pytest
import torch

from hotloop.data import resizing
from hotloop.data.resizing import resize_images
from hotloop.kernels import augment as augment_module
from hotloop.kernels.augment import Augment, augment_filtered, augment_labelled
from hotloop.kernels.pooled_norm import PooledNormSiLU
from hotloop.optim import SGD, AdamW, Muon

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pooled():
    torch.manual_seed(0)
    layer = PooledNormSiLU(64, pool=True).to(DEVICE)
    x = torch.randn(4, 64, 6, 6, dtype=torch.float32).to(DEVICE).requires_grad_()
    out = layer(x.contiguous(memory_format=torch.channels_last))
    out.backward(torch.ones_like(out))
    layer.eval()
    return [out.detach(), x.grad, layer.bias.grad, *layer.buffers(), layer(x).detach()]


def augmented(filtered):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (9, 8, 8, 3), dtype=torch.uint8).to(DEVICE)
    labels, index = torch.randint(0, 10, (9,)).to(DEVICE), torch.arange(5).to(DEVICE)
    how = Augment(1, flip="random", cutout=2, brightness=0.1, contrast=0.1, mean=(0.4,), std=(0.2,))
    epoch = torch.zeros((), dtype=torch.int64, device=DEVICE)
    options = {"seed": 3, "classes": 10, "smoothing": 0.2}
    if not filtered:
        return augment_labelled(images, labels, index, epoch, how, dtype=torch.float32, **options)
    filters = torch.randn(16, 3, 2, 2, dtype=torch.float32).to(DEVICE)
    return augment_filtered(images, labels, index, epoch, how, filters, **options)


def resized():
    torch.manual_seed(0)
    return [resize_images(torch.randint(0, 256, (3, 9, 9, 3), dtype=torch.uint8).to(DEVICE), 5)]


def climbed(make):
    """Weights that climb by gradients with a scale and a flag, as a kernel on the device is told of both."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float32).to(DEVICE))]
    optimizer = make(weights)
    optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for _ in range(3):
        weights[0].grad = torch.randn(4, 3, dtype=torch.float32).to(DEVICE)
        optimizer.step()
    return [weights[0].detach()]


CASES = {
    "pooled": pooled,
    "augmented": lambda: augmented(False),
    "filtered": lambda: augmented(True),
    "resized": resized,
    "adamw": lambda: climbed(lambda p: AdamW(p, maximize=True)),
    "sgd": lambda: climbed(lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True)),
    "muon": lambda: climbed(lambda p: Muon(p, maximize=True, fused=True)),
}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CASES))
def test_results_are_the_same_under_another_default(name, default):
    before = torch.get_default_dtype()
    results = []
    for dtype in (torch.float32, default):
        # what they remember was made under the default of its time
        augment_module._affine.cache_clear()
        resizing._weights.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            results.append(CASES[name]())
        finally:
            torch.set_default_dtype(before)
    augment_module._affine.cache_clear()
    resizing._weights.cache_clear()
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        if name in ("adamw", "sgd", "muon"):
            # numbers of the host are rounded once more or less
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(a, b)
