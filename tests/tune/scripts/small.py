"""A small classifier that trains in a second: what the tests tune."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop


def make_data(n: int = 480) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 16, generator=generator)
    y = (x[:, :4].sum(1) + 0.5 * torch.randn(n, generator=generator) > 0).long()
    return TensorDataset(x, y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    loop = hotloop.Loop(seed=0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = make_data()
    train, test = torch.utils.data.random_split(data, [320, 160], torch.Generator().manual_seed(0))
    loader, held_out = DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=80)
    model, optimizer, loader, held_out = loop.prepare(model, optimizer, loader, held_out)
    for _ in loop.epochs(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loop.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss=loss)
        with torch.no_grad():
            for x, y in held_out:
                loop.mean("accuracy", model(x).argmax(1) == y)
        loop.log(val_accuracy=loop.mean("accuracy"))
    loop.end_training()


if __name__ == "__main__":
    main()
