"""The MLP of `mlp.py` with what the doctor names repaired: hotloop's lines, resident data, the step as a function."""

import argparse

import torch
import torch.nn.functional as F

import hotloop
from benchmarks.models import make_mlp
from hotloop.data import ResidentLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args()
    loop = hotloop.Loop(seed=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 1024, 256, generator=generator)
    y = x[:, :8].sum(1, keepdim=True) + 0.1 * torch.randn(len(x), 1, generator=generator)
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ResidentLoader((x.to(loop.device), y.to(loop.device)), batch_size=1024, drop_last=True)
    model, optimizer, loader = loop.prepare(model.to(loop.device), optimizer, loader)

    @loop.capture
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(inputs), targets)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    for _ in loop.epochs(args.epochs):
        for inputs, targets in loader:
            loop.log(loss=train(inputs, targets))
    loop.end_training()


if __name__ == "__main__":
    main()
