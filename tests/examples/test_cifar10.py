"""The CIFAR-10 example on colours instead of photographs: it learns, at two sizes, and repeats itself."""

import torch
from examples.cifar10 import Recipe, make_run


def test_it_learns_and_repeats_itself(tmp_path):
    g = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 200, (10, 1, 1, 3), generator=g)
    for name, n in (("train", 240), ("test", 60)):
        labels = torch.arange(n) % 10
        images = colours[labels] + torch.randint(0, 50, (n, 32, 32, 3), generator=g)
        torch.save({"images": images.to(torch.uint8), "labels": labels}, tmp_path / f"{name}.pt")
    recipe = Recipe(sizes=((4, 16), (3, 32)), batch=40, widths=(8, 8, 16), dtype=torch.float32)
    run = make_run(str(tmp_path), recipe)
    accuracy, seconds = run(0)
    assert accuracy > 0.6
    assert seconds > 0
    assert run(0)[0] == accuracy
