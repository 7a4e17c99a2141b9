"""Draws the pictures of docs/schedules.md: python docs/pictures/draw.py"""

from pathlib import Path

import torch
import torch.nn.functional as F
from examples.digits import make_model, read_digits
from torch.utils.data import DataLoader

import hotloop
from hotloop import optim

HERE = Path(__file__).parent
RATES = {
    "one_cycle": optim.one_cycle(1.0, 100),
    "warmup_cosine": optim.warmup_cosine(1.0, 100, warm=10),
    "warmup_linear": optim.warmup_linear(1.0, 100, warm=10),
    "warmup_stable_decay": optim.warmup_stable_decay(1.0, 100, warm=10, decay=25, shape="1-sqrt"),
    "warmup_inverse_sqrt": optim.warmup_inverse_sqrt(1.0, warm=10).until(100),
    "piecewise": optim.piecewise([(0, 1.0), (40, 0.3), (70, 0.1), (100, 0.1)], shape="constant").until(100),
}


def find_digits_rate() -> optim.RangeTest:
    torch.set_num_threads(1)
    loop = hotloop.Loop(device="cpu", record=False, seed=0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    data, _ = read_digits()
    model, optimizer, loader = loop.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    return optim.find_rate(loop, model, optimizer, loader, F.cross_entropy, low=1e-5, high=10.0)


def main() -> None:
    for name, rate in RATES.items():
        (HERE / f"{name}.svg").write_text(rate.svg(title=name, width=420, height=170) + "\n")
    (HERE / "range_test.svg").write_text(find_digits_rate().svg() + "\n")


if __name__ == "__main__":
    main()
