"""A character GPT of nanoGPT's size to validation loss 1.50 on tiny Shakespeare, in seconds: a recipe made for time.

python examples/gpt_chars_fast.py input.txt 3          # three runs, with seeds 0, 1, 2

10.6 M parameters: 6 layers, 6 heads, width 384, context 256. The last tenth of the text is the validation split; all of
it, in windows of the context, is the target, and the recipe was tuned on it. Text, order and weights lie on the device,
each shape of the step is one launch. The first run of a process compiles kernels and records steps for the others.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop import optim
from hotloop.kernels import layer_norm, rotary_tables, split_heads, squared_relu


@dataclass(frozen=True)
class Recipe:
    """How it is trained. `rates` are peaks, `rate` their course; `stages`: (share of updates, context, batch)."""

    updates: int = 220
    stages: tuple[tuple[float, int, int], ...] = ((0.5, 128, 64), (0.5, 256, 32))
    rates: tuple[float, float, float] = (0.06, 0.1, 0.001)  # Muon's matrices; Adam's embedding and head
    rate: Callable = lambda n: optim.warmup_stable_decay(1.0, n, warm=0.02 * n, decay=0.8 * n)
    first_look: float = 0.85
    look_every: int = 5
    target: float = 1.50


class GPT(nn.Module):
    def __init__(self, characters: int, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        sizes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
        blocks = [{name: nn.Linear(*size, bias=False) for name, size in sizes.items()} for _ in range(layers)]
        self.heads, self.blocks = heads, nn.ModuleList(map(nn.ModuleDict, blocks))
        self.embed = nn.Linear(characters, width, bias=False)
        self.head = nn.Linear(width, characters, bias=False)
        cos, sin = rotary_tables(256, width // heads, base=1024.0)
        tables = {"eye": torch.eye(characters), "gain": torch.ones(width), "cos": cos, "sin": sin}
        for name, table in tables.items():
            self.register_buffer(name, table)

    def reset(self) -> None:
        """Draw the weights anew, in place; branches and head begin at zero."""
        for name, p in self.named_parameters():
            std = 1.0 if name == "embed.weight" else 0.7 * p.shape[1] ** -0.5
            nn.init.normal_(p, std=0.0 if name.endswith(("o.weight", "down.weight", "head.weight")) else std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        T = tokens.shape[1]
        # a product with one-hot rows: its gradient is a product too, not a sort of all tokens
        (_, x), branch = layer_norm(self.embed(self.eye[tokens]), self.gain), None
        for block in self.blocks:
            # each norm takes along the sum before it
            x, h = layer_norm(x, self.gain, branch=branch)
            qkv = F.linear(h, torch.cat([block[name].weight for name in "qkv"]))
            heads = split_heads(qkv, self.cos[:T], self.sin[:T], self.heads)
            a = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
            x, h = layer_norm(x, self.gain, branch=block["o"](a))
            branch = block["down"](squared_relu(block["up"](h)))
        _, h = layer_norm(x, self.gain, branch=branch)
        return 15 * torch.tanh(self.head(h).float() / 15)


def read_text(path: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Characters to train on, whole windows of 256 to validate on (and what follows each), how many there are."""
    data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).to(device)
    characters, data = data.unique(return_inverse=True)
    train, held = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    windows = (len(held) - 1) // 256
    return train, torch.stack([held[i : i + windows * 256].view(-1, 256) for i in (0, 1)]), len(characters)


def batches(text: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Windows [B, T + 1] in random order; each pass over the text is cut at other places."""
    k, end = 0, 0.0
    for share, T, B in recipe.stages:
        end, span = end + share * recipe.updates, torch.arange(T + 1, device=text.device)
        while k < round(end):
            starts = torch.randperm(len(text) // T - 1, device=text.device) * T
            starts += torch.randint(T, (), device=text.device)
            for some in starts.split(B)[: min(round(end) - k, len(starts) // B)]:
                yield text[some[:, None] + span]
                k += 1


def make_run(path: str, recipe: Recipe, capture: str = "graph") -> Callable[[int], tuple[float, list]]:
    """Everything that a run needs, made once."""
    loop, n = hotloop.Loop(capture=capture, nonfinite="ignore", record=False), recipe.updates
    text, held, characters = read_text(path, loop.device)
    if len(text) < (least := max(T * (B + 1) for _, T, B in recipe.stages)) or not held.numel():
        raise ValueError(f"{path} is too short: training takes {least} characters, the tenth held out 257")
    # bfloat16 throughout; the optimizer keeps float32 masters
    model = loop.prepare(GPT(characters).to(torch.bfloat16))
    groups = [list(model.blocks.parameters()), [model.embed.weight], [model.head.weight]]
    pairs = zip(groups, recipe.rates, strict=True)
    kinds = [{"params": group, "lr": lr, "use_muon": group is groups[0]} for group, lr in pairs]
    optimizer = optim.Muon(kinds, adamw_betas=(0.8, 0.95))
    rate = recipe.rate(n)
    rates = [rate.with_momentum(optim.linear(0.85, 0.95, 0.3 * n)), rate, rate]
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
        """From new weights to the target: (seconds, [(update, validation loss)]), all looks counted."""
        began, looks = time.perf_counter(), []
        torch.manual_seed(seed)
        model.reset()
        for p, state in optimizer.state.items():
            for name, value in state.items():
                value.copy_(p) if name == "master" else value.zero_()
        scheduler.load_state_dict(at_start)
        for k, batch in enumerate(batches(text, recipe), 1):
            step(batch)
            # while the rate is high a look would be lost time
            if k >= n or (k >= recipe.first_look * n and k % recipe.look_every == 0):
                looks.append((k, loop.read(look())))
                if looks[-1][1] <= recipe.target:
                    break
        return time.perf_counter() - began, looks

    return run


if __name__ == "__main__":
    path, *runs = [word for word in sys.argv[1:] if not word.startswith("-")] or sys.exit(__doc__)
    run = make_run(path, Recipe())
    for seed in range(int(runs[0]) if runs else 1):
        seconds, [*_, (k, loss)] = run(seed)
        print(f"seed {seed}: validation loss {loss:.4f} after {k} updates, {seconds:.2f} s")
