"""A classifier of handwritten digits: real 8 x 8 scans that ship with scikit-learn. A plain loop, five lines changed.

python examples/digits.py --epochs 30
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 16, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint", default="checkpoint/digits")
    parser.add_argument("--resume", metavar="FOLDER", help="go on from the checkpoint there")
    args = parser.parse_args()

    loop = hotloop.Loop(seed=0, config=vars(args))
    train, test = read_digits()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True)
    model, optimizer, loader, test_loader = loop.prepare(
        model, optimizer, loader, DataLoader(test, batch_size=256)
    )
    # after prepare: with several processes the prepared loader is shorter
    steps = args.epochs * len(loader)
    scheduler = loop.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps))

    if args.resume:
        loop.load_state(args.resume)
    accuracy = float("nan")
    for _ in loop.epochs(args.epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loop.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loop.log(loss=loss)
        model.eval()
        with torch.no_grad():
            for x, y in test_loader:
                loop.mean("accuracy", model(x).argmax(1) == y)
        accuracy = loop.mean("accuracy")
        loop.log(val_accuracy=accuracy)
    loop.save_state(args.checkpoint)
    loop.end_training()
    loop.print(f"test accuracy {accuracy:.2%}; saved in {args.checkpoint}; record in {loop.record_folder}")


if __name__ == "__main__":
    main()
