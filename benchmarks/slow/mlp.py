"""An MLP as it is often written: every step waits for the device, and the device for the loader."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import make_mlp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 1024, 256, generator=generator)
    y = x[:, :8].sum(1, keepdim=True) + 0.1 * torch.randn(len(x), 1, generator=generator)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=1024, shuffle=True, drop_last=True)
    for epoch in range(args.epochs):
        total = 0.0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            if torch.isnan(loss):
                raise RuntimeError("the loss is not a number")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
