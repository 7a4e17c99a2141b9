"""A character GPT on a text file, or on the source of Python's argparse; the step is one captured function."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, C // 32, 32).permute(2, 0, 3, 1, 4)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        a = (q @ k.transpose(2, 3) / 32**0.5).masked_fill(future, -torch.inf).softmax(3) @ v
        x = x + self.out(a.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, letters: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=argparse.__file__)
    for name, value in {"epochs": 3, "batch": 16, "context": 32, "width": 256, "layers": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.width % 32:
        parser.error(f"--width {args.width}: heads are 32 wide, so it has to be a multiple of 32")
    letters = sorted(set(text := args.text.read_text()))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    parts = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    if len(parts[1]) <= args.context:
        parser.error(
            f"{args.text}: a tenth of its {len(tokens)} characters is less than a context and one more"
        )
    train, test = (TensorDataset(t.unfold(0, args.context + 1, (args.context + 1) // 2)) for t in parts)

    loop = hotloop.Loop(seed=0, config=vars(args))
    model = GPT(len(letters), args.width, args.layers, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, tests = DataLoader(train, args.batch, shuffle=True, drop_last=True), DataLoader(test, 64)
    model, optimizer, loader, tests = loop.prepare(model, optimizer, loader, tests)

    def loss_of(window: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    @loop.capture
    def step(window: torch.Tensor) -> torch.Tensor:
        loss = loss_of(window)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    for _ in loop.epochs(args.epochs):
        for (window,) in loader:
            loop.log(loss=step(window))
        with torch.no_grad():
            for (window,) in tests:
                loop.mean("held out", loss_of(window), weight=len(window))
        loop.log(val_loss=loop.mean("held out"))
    loop.end_training()


if __name__ == "__main__":
    main()
