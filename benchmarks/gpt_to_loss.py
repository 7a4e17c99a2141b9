"""Seconds to validation loss 1.50 on tiny Shakespeare: examples/gpt_chars_fast.py against nanoGPT's settings.

    python -m benchmarks.gpt_to_loss --text input.txt [--runs 8] [--quick] [--json FILE]

Both train 10.6 M parameters (6 layers, 6 heads, width 384, context 256) on the first 90 % of the text until the loss
over the whole validation split (the last 10 %, in windows of 256) is at most 1.50. Every look at it is counted.

Warm: from drawing the weights to the target, in a process that has compiled or recorded everything in a run before.
Cold: from the start of the process to the target: imports, CUDA's start, compiling, recording and training; compile and
kernel caches are empty, the operating system's file cache is warm (torch was imported before).

The peer is plain PyTorch with the published settings of nanoGPT's character model: batch 64, context 256, AdamW 1e-3
with betas 0.9 and 0.99 and weight decay 0.1, dropout 0.2, 100 updates of warm-up, a cosine over 5,000 down to 1e-4,
gradients clipped at 1, bf16, compiled. It looks every 50 updates; nanoGPT's own interval is 250.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import Figure, arguments, median_with_spread, report

TARGET = 1.50


class Block(nn.Module):
    """A block of GPT-2 as nanoGPT's character model has it: no biases, dropout everywhere."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + F.dropout(self.out(a.transpose(1, 2).reshape(B, T, C)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class PlainGPT(nn.Module):
    def __init__(self, vocab: int, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, 0.2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def reset(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.ones_(p)
            else:
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * len(self.blocks)) ** 0.5 if branch else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        h = F.dropout(h, 0.2, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def make_plain_run(path: str) -> Any:
    """Plain PyTorch with nanoGPT's settings. Returns `run(seed)`, which gives what the example's gives."""
    from examples.gpt_chars_fast import read_text

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, held, vocab = read_text(path, device)
    model = PlainGPT(vocab).to(device)
    compiled = torch.compile(model)
    span = torch.arange(257, device=device)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(x)
        return F.cross_entropy(logits[-len(y) :].float().flatten(0, 1), y.flatten())

    def run(seed: int) -> tuple[float, list[tuple[int, float]]]:
        began, looks = time.perf_counter(), []
        torch.manual_seed(seed)
        model.reset()
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 100, total_iters=100)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4900, eta_min=1e-4)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [100])
        for k in range(1, 5001):
            starts = torch.randint(len(text) - 257, (64, 1), device=device)
            batch = text[starts + span]
            loss_of(batch[:, :-1], batch[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if k % 50 == 0:
                model.eval()
                with torch.no_grad():
                    # in batches of the training shape, so that nothing is compiled for the rest
                    x, y = held
                    rest = len(x) % 64
                    sums = [loss_of(x[i : i + 64], y[i : i + 64]) * 64 for i in range(0, len(x) - rest, 64)]
                    if rest:
                        sums.append(loss_of(x[-64:], y[-rest:]) * rest)
                    looks.append((k, (torch.stack(sums).sum() / len(x)).item()))
                model.train()
                print(
                    f"{k} updates, loss {looks[-1][1]:.4f}, {time.perf_counter() - began:.2f} s",
                    file=sys.stderr,
                )
                if looks[-1][1] <= TARGET:
                    break
        return time.perf_counter() - began, looks

    return run


def sweep(
    path: str, variants: Mapping[str, Mapping[str, Any]], *, capture: str = "graph", seeds: int = 1
) -> list[dict[str, Any]]:
    """Train each variant of the recipe to its end, without stopping at the target; print a line for each."""
    from examples import gpt_chars_fast

    rows: list[dict[str, Any]] = []
    for name, changes in variants.items():
        try:
            changes = dict(changes)
            mode = changes.pop("capture", capture)
            recipe = gpt_chars_fast.Recipe(**({"target": 0.0} | changes))
            began = time.perf_counter()
            run = gpt_chars_fast.make_run(path, recipe, mode)
            for seed in range(seeds):
                seconds, looks = run(seed)
                first = next((k for k, loss in looks if loss <= TARGET), None)
                row = {
                    "name": name,
                    "seed": seed,
                    "s": seconds,
                    "all_s": time.perf_counter() - began,
                    "looks": looks,
                    "final": looks[-1][1],
                    "best": min(loss for _, loss in looks),
                    "reached": first,
                }
                rows.append(row)
                print(
                    f"{name:40} seed {seed} final {row['final']:.4f} best {row['best']:.4f} reached {first} "
                    f"{seconds:6.2f} s, with making {row['all_s']:6.2f} s",
                    flush=True,
                )
        except Exception:
            print(name, traceback.format_exc(), flush=True)
    return rows


def time_cold(command: list[str]) -> tuple[float, str]:
    """Seconds of a process that trains to the target, its compile and kernel caches empty; what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        began = time.perf_counter()
        done = subprocess.run(
            command, env=os.environ | caches, capture_output=True, text=True, check=False, timeout=300
        )
        seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return seconds, done.stdout


def run_here(kind: str, path: str, runs: int) -> None:
    """What the benchmark starts as a process of its own: print a line of JSON with each run."""
    if kind == "plain":
        run = make_plain_run(path)
    else:
        from examples import gpt_chars_fast

        run = gpt_chars_fast.make_run(path, gpt_chars_fast.Recipe(), kind)
    for seed in range(runs):
        seconds, looks = run(seed)
        print(json.dumps({"s": seconds, "updates": looks[-1][0], "loss": looks[-1][1]}), flush=True)


def main() -> None:
    args = arguments(__doc__, text="input.txt", runs=8, kind="", kinds="graph,plain")
    if args.kind:
        run_here(args.kind, args.text, args.runs)
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpt_to_loss needs a CUDA device")
    figures: list[Figure] = []
    for kind in args.kinds.split(","):
        runs = 2 if args.quick else args.runs if kind != "plain" else max(args.runs // 2, 2)
        own = [sys.executable, "-m", "benchmarks.gpt_to_loss", "--text", args.text, "--kind", kind]
        names = {
            "graph": "hotloop, graphs",
            "full": "hotloop, compiled and graphs",
            "plain": "nanoGPT's settings",
        }
        cold, printed = time_cold([*own, "--runs", "1"])
        first = json.loads(printed.splitlines()[-1])
        reached = first["loss"] <= TARGET
        figures.append(Figure(f"{names[kind]}: cold" + ("" if reached else ", NOT reached"), cold, "s"))
        _, printed = time_cold([*own, "--runs", str(runs + 1)])
        warm = [json.loads(line) for line in printed.splitlines() if line.startswith("{")][1:]
        missed = sum(row["loss"] > TARGET for row in warm)
        value, spread = median_with_spread([row["s"] for row in warm])
        note = f", {missed} of {len(warm)} NOT reached" if missed else ""
        figures.append(Figure(f"{names[kind]}: warm, {len(warm)} seeds{note}", value, "s", spread))
        losses = [row["loss"] for row in warm]
        figures.append(Figure(f"{names[kind]}: loss reached, mean", sum(losses) / len(losses), "nat"))
        updates = sorted(row["updates"] for row in warm)
        figures.append(Figure(f"{names[kind]}: updates, median", updates[len(updates) // 2], ""))
        report("so far", figures, args.json)
    report("seconds to validation loss 1.50, tiny Shakespeare, 10.6 M parameters", figures, args.json)


if __name__ == "__main__":
    main()
