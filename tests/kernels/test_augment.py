"""The augmentation's twin and the window cutter; their programs against the twins where Triton runs them."""

import itertools

import pytest
import torch

from hotloop.errors import KernelError
from hotloop.kernels.augment import (
    Augment,
    augment,
    augment_eager,
    augment_filtered,
    augment_labelled,
    targets_eager,
)
from hotloop.kernels.language import runs_on
from hotloop.kernels.windows import cut_windows, cut_windows_eager

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
programs = pytest.mark.skipif(not runs_on(DEVICE), reason="Triton runs no programs here")
# its interpreter on the CPU cuts bfloat16 off instead of rounding
ROUNDS = [torch.bfloat16] if DEVICE.type == "cuda" else []

WAYS = list(itertools.product(("reflect", "zero"), ("none", "random", "alternating"), (0, 3), (0.0, 0.14)))
if DEVICE.type == "cuda":  # where each way is a program to compile
    WAYS = WAYS[::7]


def images(n, *size):
    return torch.randint(0, 256, (n, *size), dtype=torch.uint8, device=DEVICE)


@programs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *ROUNDS])
@pytest.mark.parametrize("shape", [(8, 8, 3), (9, 7, 1)])
def test_the_program_gives_the_twins_bits(shape, dtype):
    x, y = images(40, *shape), torch.randint(0, 10, (40,), device=DEVICE)
    index = torch.randint(0, 40, (6,), device=DEVICE)
    for each, (padding, flip, cutout, tone) in itertools.product((False, True), WAYS):
        how = Augment(2, padding, flip, cutout, tone, tone * 0.9, (0.49,), (0.24,), crop=5 if cutout else 0)
        epoch = torch.randint(0, 9, (6,) if each else (), device=DEVICE)
        ours, targets = augment_labelled(
            x, y, index, epoch, how, seed=2**60 + 7, dtype=dtype, classes=10, smoothing=0.1
        )
        assert torch.equal(ours, augment_eager(x, index, epoch, how, seed=2**60 + 7, dtype=dtype))
        assert torch.equal(targets, targets_eager(y, index, 10, 0.1))
    assert torch.equal(augment_labelled(x, y, index, epoch, how, seed=1)[1], y[index])
    assert ours.is_contiguous(memory_format=torch.channels_last)


@programs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *ROUNDS])
def test_windows_are_the_twins_to_the_bit(dtype):
    data = torch.randn(300, 7, device=DEVICE)
    starts = torch.randint(0, 300 - 190, (5,), device=DEVICE)
    mean, scale = data.mean(0), data.std(0).reciprocal()
    for given in ({}, {"mean": mean, "scale": scale}):
        for length in (1, 190):
            ours = cut_windows(data, starts, length, dtype=dtype, **given)
            assert torch.equal(ours, cut_windows_eager(data, starts, length, dtype=dtype, **given))


def test_what_a_sample_becomes_does_not_depend_on_its_batch():
    x = images(50, 8, 8, 3)
    how = Augment(2, "reflect", "random", 2, 0.1, 0.1)
    index, epoch = torch.arange(50, device=DEVICE), torch.tensor(4, device=DEVICE)
    whole = augment(x, index, epoch, how, seed=5)
    turned = augment(x, index.flip(0), epoch, how, seed=5).flip(0)
    alone = torch.cat([augment(x, index[i : i + 1], epoch, how, seed=5) for i in range(50)])
    assert torch.equal(whole, turned)
    assert torch.equal(whole, alone)
    mixed = augment(x, index, torch.where(index < 25, 4, 5), how, seed=5)
    assert torch.equal(mixed[:25], whole[:25])
    assert not torch.equal(mixed[25:], whole[25:])


def test_unknown_words_and_wrong_channels_are_named():
    with pytest.raises(KernelError, match="valid values are: none, random, alternating"):
        Augment(flip="sometimes")
    with pytest.raises(KernelError, match="reflect, zero"):
        Augment(padding="edge")
    with pytest.raises(KernelError, match="counts"):
        Augment(cutout=-1)
    with pytest.raises(KernelError, match="2 means"):
        augment(
            images(2, 4, 4, 3),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
            torch.zeros((), dtype=torch.int64, device=DEVICE),
            Augment(mean=(0.0, 0.0)),
            seed=0,
        )


def test_statistics_may_be_lists_or_tensors():
    images = torch.arange(32, dtype=torch.uint8).reshape(1, 4, 4, 2)
    index, zero = torch.zeros(1, dtype=torch.int64), torch.tensor(0)
    mean, std = (0.5, 0.25), (0.25, 0.5)
    wanted = (images.double() / 255 - torch.tensor(mean).double()) / torch.tensor(std).double()
    for kind in (tuple, list, torch.tensor):
        x = augment(images, index, zero, Augment(mean=kind(mean), std=kind(std)), seed=0)
        assert (x.permute(0, 2, 3, 1) - wanted).abs().max() < 1e-6


def test_a_fixed_view_is_a_crop_of_the_padded_image():
    x = images(5, 8, 8, 3)
    index, epoch = torch.arange(5, device=DEVICE), torch.tensor(0, device=DEVICE)
    plain = augment_eager(x, index, epoch, Augment(), seed=0)
    padded = torch.nn.functional.pad(plain, (2,) * 4, mode="reflect")
    for down, right, mirror in itertools.product((-2, 0, 1), (-1, 0, 2), (False, True)):
        view = augment(x, index, epoch, Augment(offset=(down, right), mirror=mirror), seed=0)
        crop = padded[:, :, 2 + down : 10 + down, 2 + right : 10 + right]
        if mirror:
            crop = padded[:, :, 2 + down : 10 + down, 2 + right : 10 + right].flip(-1)
        assert torch.equal(view, crop)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=programs)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_fixed_first_layer_is_the_convolution_it_stands_for(dtype, eager):
    x, y = images(20, 9, 9, 3), torch.arange(20, device=DEVICE)
    index, epoch = torch.randint(0, 20, (6,), device=DEVICE), torch.tensor(3, device=DEVICE)
    how = Augment(2, "reflect", "alternating", 0, 0.1, 0.1, (0.5,), (0.25,))
    filters = torch.randn(24, 3, 2, 2, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
    ours, targets = augment_filtered(x, y, index, epoch, how, filters, seed=1, eager=eager)
    plain = augment_eager(x, index, epoch, how, seed=1, dtype=dtype)
    wanted = torch.nn.functional.silu(torch.nn.functional.conv2d(plain.double(), filters.double()))
    assert ours.dtype == dtype
    assert (ours.double() - wanted).norm() / wanted.norm() < (1e-6 if dtype == torch.float32 else 2e-3)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(targets, y[index])
    edged, targets = augment_filtered(x, y, index, epoch, how, filters, seed=1, edge=True, eager=eager)
    assert torch.equal(edged, torch.nn.functional.pad(ours, (1, 0, 1, 0)))
    assert edged.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(targets, y[index])


def test_a_shifted_crop_stays_inside_the_image():
    x = images(200, 8, 8, 3)
    index, epoch = torch.arange(200, device=DEVICE), torch.tensor(1, device=DEVICE)
    plain = augment_eager(x, index, epoch, Augment(), seed=0)
    for crop, reach in ((6, 1), (4, 2), (5, 1)):
        crops = augment(x, index, epoch, Augment(translate=reach, crop=crop), seed=3)
        assert crops.shape == (200, 3, crop, crop)
        middle = (8 - crop) // 2
        places = torch.zeros(2 * reach + 1, 2 * reach + 1)
        for one, whole in zip(crops, plain, strict=True):
            found = [
                (i, j)
                for i in range(2 * reach + 1)
                for j in range(2 * reach + 1)
                if torch.equal(one, whole[:, middle - reach + i :, middle - reach + j :][:, :crop, :crop])
            ]
            assert len(found) == 1
            places[found[0]] += 1
        assert (places > 0).all()
    with pytest.raises(KernelError, match="cannot be cut out"):
        augment(x, index, epoch, Augment(crop=9), seed=0)
