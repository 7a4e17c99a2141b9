"""What one optimizer step costs as a replayed CUDA graph, and what its parts launch.

    python -m benchmarks.optimizer_step [--quick] [--json FILE] [--only WORDS] [--rounds 9] [--steps 200] [--profile 1]

Counted: the replay of one step over all parameters of a model, gradients in place, by device events over many replays
in a row; variants interleaved. Warmed up: three eager steps and the recording. Left out: forward, backward, clipping.
Models: a convolutional net of 2 million parameters such as CIFAR-10 is trained with, and the character GPT of 10.7
million. Limits: for AdamW, every byte of gradient, weight and moments once at the rate of a large copy measured in the
same run; for Muon the operations of its products at the rate of a large bf16 product. On the CPU steps run eagerly.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.models import CharGPT
from hotloop.optim import EMA, SGD, AdamW, Muon, split_matrices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def conv_net() -> nn.Module:
    """Layers of a small residual net for 32 x 32 images, widths 64, 256, 256."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 2)]
    width = 24
    for out in (64, 256, 256):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out)]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out)]
        width = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10, bias=False))


MODELS: dict[str, Callable[[], nn.Module]] = {"conv net": conv_net, "GPT": CharGPT}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return list(split_matrices(model)[0]["params"])


def with_tensors(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Every setting that a schedule moves on the device, as in a captured step of the loop."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=DEVICE)
        if "betas" in group:
            group["betas"] = (torch.tensor(float(group["betas"][0]), device=DEVICE), group["betas"][1])
        elif "momentum" in group:
            group["momentum"] = torch.tensor(float(group["momentum"]), device=DEVICE)
    return optimizer


def with_rate(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=DEVICE)
    return optimizer


kept: list[object] = []
Make = Callable[[nn.Module], torch.optim.Optimizer]
VARIANTS: dict[str, Make] = {
    "torch AdamW fused": lambda m: with_rate(
        torch.optim.AdamW(m.parameters(), fused=DEVICE.type == "cuda", capturable=DEVICE.type == "cuda")
    ),
    "torch AdamW foreach": lambda m: torch.optim.AdamW(
        m.parameters(), foreach=True, capturable=DEVICE.type == "cuda"
    ),
    "AdamW": lambda m: with_rate(AdamW(m.parameters())),
    "AdamW, beta scheduled": lambda m: with_tensors(AdamW(m.parameters())),
    "AdamW, beta scheduled, foreach": lambda m: with_tensors(AdamW(m.parameters(), fused=False)),
    "AdamW, bf16 + masters": lambda m: with_rate(AdamW(m.bfloat16().parameters())),
    "torch SGD fused": lambda m: with_rate(
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=DEVICE.type == "cuda")
    ),
    "SGD": lambda m: with_rate(SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
    "SGD, momentum scheduled": lambda m: with_tensors(
        SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    ),
    "torch Muon, matrices": lambda m: torch.optim.Muon(
        [p for p in matrices(m) if p.dim() == 2], lr=0.02, weight_decay=0.0
    ),
    "Muon, 2-D matrices": lambda m: Muon([p for p in matrices(m) if p.dim() == 2], lr=0.02),
    "Muon, matrices": lambda m: Muon(matrices(m), lr=0.02),
    "Muon, all": lambda m: with_rate(Muon(split_matrices(m), lr=0.02)),
    "Muon, all, momentum scheduled": lambda m: with_tensors(Muon(split_matrices(m), lr=0.02)),
    "Muon, all, bf16 + masters": lambda m: with_rate(Muon(split_matrices(m.bfloat16()), lr=0.02)),
    "Muon kernels, matrices": lambda m: Muon(matrices(m), lr=0.02, fused=True),
    "Muon kernels, all": lambda m: with_rate(Muon(split_matrices(m), lr=0.02, fused=True)),
    "Muon kernels, all, momentum scheduled": lambda m: with_tensors(
        Muon(split_matrices(m), lr=0.02, fused=True)
    ),
    "Muon kernels, all, bf16 + masters": lambda m: with_rate(
        Muon(split_matrices(m.bfloat16()), lr=0.02, fused=True)
    ),
}


def prepared_step(model: nn.Module, make: Make) -> Callable[[], None]:
    """One step with gradients in place: recorded on a GPU."""
    optimizer = make(model)
    if DEVICE.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
        # the flag that a loop gives it
        optimizer.found_inf = torch.zeros((), device=DEVICE)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-2
    return recorded(optimizer.step, model, optimizer)


def recorded(work: Callable[[], object], *read: object) -> Callable[[], None]:
    """What replays `work`; `read` is what the recording reads and so must live as long."""
    if DEVICE.type != "cuda":
        return lambda: (work(), None)[1]
    kept.extend(read)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def averaging(model: nn.Module) -> Callable[[], None]:
    average = EMA(model, 0.999)
    return recorded(average.update, model, average)


def products(model: nn.Module, steps: int = 5) -> float:
    """Floating-point operations of the Newton-Schulz products over all matrices."""
    total = 0.0
    for p in matrices(model):
        rows, columns = sorted((len(p), p.numel() // len(p)))
        total += steps * (4.0 * rows * rows * columns + 2.0 * rows**3)
    return total


def limits() -> tuple[float, float]:
    """(bytes per second of a large copy, operations per second of a large bf16 product)."""
    if DEVICE.type != "cuda":
        return float("nan"), float("nan")
    a = torch.randn(2**28, device=DEVICE)
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    rates = []
    for work, amount in ((lambda: b.copy_(a), 2.0 * 4 * 2**28), (lambda: x @ x, 2.0 * 8192**3)):
        times = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates.append(amount / sorted(times)[2])
    return rates[0], rates[1]


def launches(step: Callable[[], None]) -> Iterator[str]:
    """Kernels of one step, by the time they take."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    events = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
    yield f"{sum(e.count for e in events)} kernels, {sum(e.self_device_time_total for e in events):.1f} us"
    for e in events[:14]:
        yield f"{e.self_device_time_total:8.1f} us {e.count:5d} x {e.key[:90]}"


def main() -> None:
    args = arguments(__doc__, only="", profile=0, rounds=9, steps=200 if DEVICE.type == "cuda" else 20)
    repeats, steps = (3, 5) if args.quick else (args.rounds, args.steps)
    finish = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    bandwidth, rate = limits()
    figures: list[Figure] = []
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    for kind, build in MODELS.items():
        count = sum(p.numel() for p in build().parameters())
        print(f"{kind}: {count / 1e6:.2f} million parameters, products {products(build()) / 1e9:.2f} GFLOP")
        ready: dict[str, Callable[[], None]] = {}
        for name, make in VARIANTS.items():
            if args.only and not any(word in name for word in args.only.split(",")):
                continue
            if name in ("torch Muon, matrices", "Muon, 2-D matrices") and kind == "conv net":
                continue
            try:
                ready[name] = prepared_step(build().to(DEVICE), make)
            except Exception:
                traceback.print_exc()
        if not args.only or "EMA" in args.only:
            ready["EMA"] = averaging(build().to(DEVICE))
        times = interleave(ready, repeats=repeats, steps=steps, finish=finish, clock=time.perf_counter)
        for name, seconds in times.items():
            value, spread = median_with_spread([s * 1e6 for s in seconds])
            peer = "torch Muon, matrices" if "Muon, 2-D" in name else "torch AdamW fused"
            ratio = paired_ratio(seconds, times[peer])[0] if peer in times and peer != name else None
            limit = count * 28.0 / bandwidth * 1e6 if "AdamW" in name else None
            limit = products(build()) / rate * 1e6 if name == "Muon, matrices" else limit
            figures.append(Figure(f"{kind}: {name}", value, "us", spread, peer, ratio, limit))
        if args.profile and DEVICE.type == "cuda":
            for name in ready:
                print(f"\n{kind}: {name}")
                print("\n".join(launches(ready[name])))
    report("One optimizer step", figures, args.json)


if __name__ == "__main__":
    main()
