"""A character GPT of nanoGPT's size to validation loss 1.50 on tiny Shakespeare, in seconds: a recipe made for time.

python examples/gpt_chars_fast.py input.txt --runs 3

10.6 M parameters (6 layers, 6 heads, width 384, context 256). The last tenth of the text is the validation split: all
of it, cut into windows of the context, is the target, and the recipe was tuned for it. Text, order and weights lie on
the device, each shape of the step is one launch. The first run of a process records its steps; later runs find them.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop import kernels, optim


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How it is trained. Rates are peaks; `stages` are (share of the updates, context, batch)."""

    updates: int = 240
    stages: tuple[tuple[float, int, int], ...] = ((1.0, 256, 32),)
    rates: tuple[float, float, float] = (0.06, 0.03, 0.001)  # Muon's matrices; Adam's embedding and head
    weight_decay: float = 0.0
    warm: float = 0.05
    decay: float = 0.6
    momentum: tuple[float, float] = (0.85, 0.95)
    betas: tuple[float, float] = (0.8, 0.95)
    ns_steps: int = 5
    dropout: float = 0.0
    activation: str = "relu2"
    history: int = 1
    spread: float = 0.7
    cap: float = 15.0
    kernels: bool = True
    first_look: float = 0.8
    look_every: int = 10
    target: float = 1.50


class Block(nn.Module):
    def __init__(self, width: int, heads: int, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.dropout = heads, recipe.dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        names = ("layer_norm", "split_heads", "squared_relu")
        self.norm, self.split, self.act = (
            getattr(kernels, n if recipe.kernels else f"{n}_eager") for n in names
        )
        if recipe.activation == "gelu":
            self.act = kernels.bias_gelu if recipe.kernels else F.gelu

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None, ones: torch.Tensor, angles: tuple
    ) -> tuple:
        """The stream and the branch to be added to it: norms take the sum along."""
        B, T, C = x.shape
        x, h = self.norm(x, ones, branch=branch)
        qkv = F.linear(h, torch.cat([self.q.weight, self.k.weight, self.v.weight]))
        a = F.scaled_dot_product_attention(*self.split(qkv, *angles, self.heads), is_causal=True)
        a = F.dropout(self.out(a.transpose(1, 2).reshape(B, T, C)), self.dropout, self.training)
        x, h = self.norm(x, ones, branch=a)
        return x, F.dropout(self.down(self.act(self.up(h))), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, vocab: int, recipe: Recipe, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.recipe = recipe
        self.embed = nn.Linear(vocab * recipe.history, width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads, recipe) for _ in range(layers))
        cos, sin = kernels.rotary_tables(256, width // heads, base=1024.0)
        for name, value in {
            "cos": cos,
            "sin": sin,
            "ones": torch.ones(width),
            "one_hot": torch.eye(vocab),
        }.items():
            self.register_buffer(name, value)

    def reset(self) -> None:
        """Draw the weights anew, in place; branches and head begin at zero."""
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(p)
            else:
                nn.init.normal_(
                    p, std=1.0 if name == "embed.weight" else self.recipe.spread * p.shape[1] ** -0.5
                )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # a product with one-hot rows: its gradient is a product too, not a sort of all tokens
        seen = self.one_hot[tokens]
        if self.recipe.history > 1:
            seen = torch.cat(
                [F.pad(seen, (0, 0, i, 0))[:, : tokens.shape[1]] for i in range(self.recipe.history)], 2
            )
        norm = self.blocks[0].norm
        x, branch = norm(self.embed(seen), self.ones)[1], None
        angles = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x, branch = block(x, branch, self.ones, angles)
        logits = self.head(norm(x, self.ones, branch=branch)[1]).float()
        return self.recipe.cap * torch.tanh(logits / self.recipe.cap) if self.recipe.cap else logits


def read_text(path: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Characters to train on, whole windows of 256 to validate on (and what follows each), how many there are."""
    data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).to(device)
    characters, data = data.unique(return_inverse=True)
    train, held = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    windows = (len(held) - 1) // 256
    return train, torch.stack([held[i : i + windows * 256].view(-1, 256) for i in (0, 1)]), len(characters)


def batches(text: torch.Tensor, recipe: Recipe):
    """Windows [B, T + 1] in random order; each pass over the text is cut at other places."""
    for share, T, B in recipe.stages:
        left, span = round(share * recipe.updates), torch.arange(T + 1, device=text.device)
        while left > 0:
            starts = torch.randperm(len(text) // T - 1, device=text.device) * T
            starts += torch.randint(T, (), device=text.device)
            for some in starts.split(B)[: min(left, len(starts) // B)]:
                yield text[some[:, None] + span]
                left -= 1


def make_run(path: str, recipe: Recipe, capture: str = "graph"):
    """Everything that a run needs, made once. Returns `run`."""
    loop = hotloop.Loop(capture=capture, nonfinite="ignore", record=False)
    text, held, vocab = read_text(path, loop.device)
    # bfloat16 throughout; the optimizer keeps float32 masters
    model = loop.prepare(GPT(vocab, recipe).to(torch.bfloat16))
    groups = [list(model.blocks.parameters()), [model.embed.weight], [model.head.weight]]
    optimizer = optim.Muon(
        [
            {"params": group, "lr": rate, "use_muon": group is groups[0], "weight_decay": recipe.weight_decay}
            for group, rate in zip(groups, recipe.rates, strict=True)
        ],
        adamw_betas=recipe.betas,
        ns_steps=recipe.ns_steps,
    )
    n = recipe.updates
    rate = optim.warmup_stable_decay(1.0, n, warm=recipe.warm * n, decay=recipe.decay * n)
    rates = [rate.with_momentum(optim.linear(*recipe.momentum, 0.3 * n)), rate, rate]
    scheduler = optim.RateScheduler(optimizer, rates, relative=True)
    optimizer, scheduler = loop.prepare(optimizer, scheduler)
    at_start = scheduler.state_dict()

    @loop.capture(outputs="static")
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loop.backward(loss)
        loop.update(optimizer, scheduler)
        return loss

    @loop.capture(outputs="static")
    def look() -> torch.Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(held[0]).flatten(0, 1), held[1].flatten())

    def run(seed: int) -> tuple[float, list[tuple[int, float]]]:
        """Train from new weights to the target: (seconds, [(update, validation loss)]), all looks counted."""
        began, looks = time.perf_counter(), []
        torch.manual_seed(seed)
        model.reset()
        for p, state in optimizer.state.items():
            for name, value in state.items():
                value.copy_(p) if name == "master" else value.zero_()
        scheduler.load_state_dict(at_start)
        for k, batch in enumerate(batches(text, recipe), 1):
            step(batch)
            if k >= n or (k >= recipe.first_look * n and k % recipe.look_every == 0):
                model.eval()
                looks.append((k, loop.read(look())))
                model.train()
                if looks[-1][1] <= recipe.target:
                    break
        return time.perf_counter() - began, looks

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="tiny Shakespeare: input.txt")
    parser.add_argument(
        "--runs", type=int, default=1, help="with seeds 0, 1, …; the first one is the cold one"
    )
    parser.add_argument("--capture", default="graph", help="graph, full (compiled too) or off")
    args = parser.parse_args()
    run = make_run(args.text, Recipe(), args.capture)
    for seed in range(args.runs):
        seconds, looks = run(seed)
        print(
            f"seed {seed}: validation loss {looks[-1][1]:.4f} after {looks[-1][0]} updates, {seconds:.2f} s"
        )


if __name__ == "__main__":
    main()
