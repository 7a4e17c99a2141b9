"""A character GPT as it is often written: every step waits for the device, in float32, with an unfused optimizer."""

import argparse
import inspect
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.models import CharGPT


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // 8 - self.context // 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = self.tokens[8 * i : 8 * i + self.context + 1]
        return part[:-1], part[1:]


def read_tokens(path: Path) -> tuple[torch.Tensor, int]:
    text = path.read_text() if path.exists() else inspect.getsource(argparse)
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text]), len(letters)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--text", type=Path, default=Path(".carry/shakespeare.txt"))
    args = parser.parse_args()
    torch.manual_seed(0)
    tokens, letters = read_tokens(args.text)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = CharGPT(letters).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, foreach=False)
    loader = DataLoader(Windows(tokens, 256), batch_size=args.batch, shuffle=True, drop_last=True)
    for epoch in range(args.epochs):
        total = 0.0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            if torch.isnan(loss):
                raise RuntimeError("the loss is not a number")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
