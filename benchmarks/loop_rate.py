"""Steps per second on a GPU: hotloop's plain loop beside Accelerate and raw PyTorch, in one run.

    python -m benchmarks.loop_rate [--quick] [--json FILE] [--model mlp|gpt|both]

Counts: whole training steps in bf16 with gradient clipping, wall time with the device synchronised at the end of
each timed stretch. Two feeds: batches resident on the device, and end to end from a DataLoader over host tensors.
Accelerate is written as its users write it (`loss.item()` every step); "raw" reads nothing back. All variants step
the same fused AdamW; what users get by default is the row "accelerate, default AdamW".
Left out: model building, the first 20 steps of each variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.models import CharGPT, make_mlp

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def work(name: str) -> tuple[Callable[[], nn.Module], LossFn, TensorDataset, int]:
    """Model, loss, data set and batch size of each of the two."""
    generator = torch.Generator().manual_seed(0)
    if name == "mlp":
        x = torch.randn(64 * 1024, 256, generator=generator)
        y = x[:, :8].sum(1, keepdim=True) + 0.1 * torch.randn(len(x), 1, generator=generator)
        return make_mlp, F.mse_loss, TensorDataset(x, y), 1024
    tokens = torch.randint(65, (64 * 64, 257), generator=generator)

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return CharGPT, loss, TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), 64


def forever(loader: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from loader  # type: ignore[misc]


def resident(
    data: TensorDataset, batch: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batches = [tuple(t[i : i + batch].to(device) for t in data.tensors) for i in range(0, 8 * batch, batch)]
    return forever(batches)


def build(kind: str, feed: str, name: str) -> Callable[[], None]:
    """One step of a variant, with its own model, optimizer and feed."""
    make, loss_fn, data, batch = work(name)
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = make()
    fused = None if "default" in kind else True
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    if kind == "raw":
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if feed == "resident":
            batches = resident(data, batch, device)
        else:
            pinned = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, pin_memory=True)
            batches = (
                (x.to(device, non_blocking=True), y.to(device, non_blocking=True)) for x, y in forever(pinned)
            )

        def step() -> None:
            x, y = next(batches)
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x)
            loss_fn(out.float(), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step
    if kind.startswith("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches = resident(data, batch, device) if feed == "resident" else forever(loader)

        def step() -> None:
            x, y = next(batches)
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

        return step
    loop = hotloop.Loop(precision="bf16", record=False, nonfinite="stop" if "guard" in kind else "ignore")
    model.to(loop.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)
    batches = resident(data, batch, loop.device) if feed == "resident" else forever(loader)
    log = "log" in kind

    def step() -> None:
        x, y = next(batches)
        loss = loss_fn(model(x), y)
        loop.backward(loss)
        loop.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if log:
            loop.log(loss=loss)

    return step


KINDS = ("raw", "accelerate", "accelerate, default AdamW", "hotloop", "hotloop, guard + log")


def main() -> None:
    args = arguments(__doc__, model="both")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.loop_rate needs a CUDA device; benchmarks.loop_overhead runs on any CPU")
    figures: list[Figure] = []
    for name in ("mlp", "gpt") if args.model == "both" else (args.model,):
        for feed in ("resident", "dataloader"):
            variants = {kind: build(kind, feed, name) for kind in KINDS}
            for step in variants.values():
                for _ in range(20):
                    step()
            torch.cuda.synchronize()
            steps = (20 if args.quick else 30) if name == "gpt" else (50 if args.quick else 100)
            repeats = 3 if args.quick else 7
            times = interleave(variants, repeats=repeats, steps=steps, finish=torch.cuda.synchronize)
            for kind in KINDS:
                rate, spread = median_with_spread([1 / t for t in times[kind]])
                peer = "accelerate" if kind != "accelerate" else "raw"
                ratio, _ = paired_ratio(times[kind], times[peer])
                figures.append(Figure(f"{name}, {feed}: {kind}", rate, "steps/s", spread, peer, ratio))
    report("training steps per second, bf16 with clipping", figures, args.json)


if __name__ == "__main__":
    main()
