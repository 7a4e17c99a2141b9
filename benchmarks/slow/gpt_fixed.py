"""The character GPT of `gpt.py` with what the doctor names repaired: hotloop's lines, resident data, capture."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import hotloop
from benchmarks.models import CharGPT
from benchmarks.slow.gpt import read_tokens
from hotloop.data import ResidentLoader


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
    windows = tokens.unfold(0, 257, 8).contiguous().to(loop.device)
    loader = ResidentLoader(windows, batch_size=args.batch, drop_last=True)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)

    @loop.capture
    def train(window: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    for _ in loop.epochs(args.epochs):
        for window in loader:
            loop.log(loss=train(window))
    loop.end_training()


if __name__ == "__main__":
    main()
