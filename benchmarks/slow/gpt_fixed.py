"""The character GPT of `gpt.py` with what the doctor names repaired: five lines of hotloop, the step as a function."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import hotloop
from benchmarks.models import CharGPT
from benchmarks.slow.gpt import Windows, read_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--text", type=Path, default=Path(".carry/shakespeare.txt"))
    args = parser.parse_args()
    loop = hotloop.Loop(seed=0)
    tokens, letters = read_tokens(args.text)
    model = CharGPT(letters).to(loop.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    loader = DataLoader(Windows(tokens, 256), batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)

    @loop.capture
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    for _ in loop.epochs(args.epochs):
        for inputs, targets in loader:
            loop.log(loss=train(inputs, targets))
    loop.end_training()


if __name__ == "__main__":
    main()
