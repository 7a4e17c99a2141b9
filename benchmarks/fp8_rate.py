"""fp8 against bf16 on four transformer blocks of width 4096: tokens per second, matrix rates, and the loss.

    python -m benchmarks.fp8_rate [--quick] [--json FILE] [--parts peaks,layers,rate,profile,loss] [--text FILE]

peaks: what the card's units do in one product of 8192^3, inputs in rotation (cuBLAS; bf16 and fp8).
layers: forward and backward of single Linear layers, fp8 beside bf16, both compiled: which sizes gain.
rate: whole training steps (forward, backward, clip at norm 1, fused AdamW over fp32 weights) of the model, each block
compiled, the whole step captured; variants interleaved, wall time with the device synchronised at the end of each
stretch. torchao's tensorwise recipe is a variant where it can be imported. Left out: building, compiling, recording.
profile: one step of each variant by kernel: what the matrix products alone do, and what is left.
loss: the same model on 4 x 256 tokens a step, three seeds each in bf16 and fp8; mean loss of windows of 50 steps. Data
is a Markov chain over 256 symbols whose next symbol depends on the last two, or the bytes of a text.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.models import CharGPT
from hotloop.precision import Precision
from hotloop.precision.float8 import Float8Numbers

WIDTH, HEADS, BLOCKS, VOCAB = 4096, 32, 4, 256
PRECISIONS: dict[str, str | Precision] = {
    "bf16": "bf16",
    "fp8": Precision("fp8"),
    "fp8 e4m3 gradients": Precision("fp8", gradients="e4m3"),
    "fp8 rowwise": Precision("fp8", scaling="rowwise"),
    "torchao": "bf16",
    "bf16-true": "bf16-true",
    "bf16 uncompiled": "bf16",
    "fp8 uncompiled": Precision("fp8"),
    "fp8 + bf16 weights": Precision("fp8", weights="bf16"),
}


def time_ms(work: Callable[[int], Any], repeats: int = 20) -> float:
    """Median milliseconds of `work(i)` by device events, after three calls that do not count."""
    for i in range(3):
        work(i)
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for i, (start, end) in enumerate(marks):
        start.record()
        work(i)
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in marks)[repeats // 2]


def measure_peaks(quick: bool) -> list[Figure]:
    n, sets = (2048 if quick else 8192), 4
    flops = 2 * n**3 / 1e9
    a = [torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    b = [torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    figures = [Figure("bf16 product", flops / time_ms(lambda i: a[i % sets] @ b[i % sets].t()), "TFLOP/s")]
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    for left, fast, out in (
        (e4, True, torch.bfloat16),
        (e4, False, torch.bfloat16),
        (e5, False, torch.bfloat16),
        (e5, True, torch.bfloat16),
        (e5, False, torch.float32),
    ):
        multiply = multiplier([x.to(left) for x in a], [x.to(e4) for x in b], out, fast=fast)
        name = f"{str(left)[13:]} product, {'fast' if fast else 'exact'} sums, {str(out)[6:]} out"
        figures.append(Figure(name, flops / time_ms(multiply), "TFLOP/s"))
    return figures


def multiplier(
    a: list[torch.Tensor], b: list[torch.Tensor], out: torch.dtype, *, fast: bool
) -> Callable[[int], torch.Tensor]:
    """Product number i of `a` and `b`, in rotation, so that inputs come from memory."""
    one = torch.ones((), device="cuda")

    def multiply(i: int) -> torch.Tensor:
        left, right = a[i % len(a)], b[i % len(b)].t()
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=fast)

    return multiply


def measure_layers(quick: bool) -> list[Figure]:
    """Milliseconds of one Linear forward and backward; `ratio` is bf16's time over ours."""
    figures = []
    sizes = [
        (16384, 1024, 4096),
        (16384, 2048, 2048),
        (16384, 2048, 8192),
        (4096, 2048, 8192),
        (4096, 4096, 4096),
    ]
    for rows, k, n in sizes[:1] if quick else sizes:
        torch._dynamo.reset()
        times = {
            name: time_layer_ms(numbers, rows, k, n)
            for name, numbers in (("bf16", None), ("fp8", Float8Numbers()))
        }
        name, ratio = f"Linear {k} -> {n}, {rows} rows, fp8", times["bf16"] / times["fp8"]
        print(f"{name}: {times['fp8']:.3f} ms, {ratio:.2f} x bf16", flush=True)
        figures.append(Figure(name, times["fp8"], "ms", peer="bf16", ratio=ratio))
    return figures


def time_layer_ms(numbers: Float8Numbers | None, rows: int, k: int, n: int) -> float:
    """Forward and backward of one compiled Linear, three inputs in rotation, replayed as a graph: no launches count."""
    weight = nn.Parameter(torch.randn(n, k, device="cuda") / k**0.5)
    inputs = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    function = F.linear if numbers is None else numbers.linear
    compiled = torch.compile(lambda x, w: function(x, w, None), dynamic=False)

    def steps() -> None:
        for x in inputs:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                y = compiled(x, weight)
            torch.autograd.grad(y, (x, weight), grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            steps()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            steps()
    return time_ms(lambda i: graph.replay()) / len(inputs)


class Trainer:
    """The model in one precision, with its captured step.

    Args:
        kind: a key of PRECISIONS.
        tokens: batch and length of one step.
    """

    def __init__(self, kind: str, tokens: tuple[int, int]) -> None:
        self.kind = kind
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = CharGPT(vocab=VOCAB, width=WIDTH, heads=HEADS, layers=BLOCKS, context=tokens[1])
        self.linear_weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        if kind == "torchao":
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model, module_filter_fn=lambda m, name: name != "head")
        self.loop = loop = hotloop.Loop(PRECISIONS[kind], record=False, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = loop.prepare(model, optimizer)
        for block in () if "uncompiled" in kind else self.model.blocks:
            block.compile()

        @loop.capture(mode="graph", outputs="static")
        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        self.train = train
        generator = torch.Generator("cuda").manual_seed(1)
        self.batches = [
            torch.randint(VOCAB, (2, *tokens), device="cuda", generator=generator) for _ in range(4)
        ]
        self.count = 0

    def step(self) -> None:
        self.count += 1
        x, y = self.batches[self.count % len(self.batches)]
        self.train(x, y)

    def warm_up(self) -> float:
        """Seconds until the step is recorded."""
        start = time.perf_counter()
        for _ in range(6):
            self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def build(kinds: list[str], tokens: tuple[int, int]) -> dict[str, Trainer]:
    trainers = {}
    for kind in kinds:
        try:
            trainer = Trainer(kind, tokens)
            seconds = trainer.warm_up()
            free = torch.cuda.mem_get_info()[0] / 2**30
            print(
                f"{kind}: recorded after {seconds:.1f} s, {trainer.train.reason or 'captured'}, {free:.0f} GiB free"
            )
            trainers[kind] = trainer
        except Exception:
            print(f"{kind} failed:\n{traceback.format_exc()}")
    return trainers


def measure_rate(trainers: dict[str, Trainer], tokens: int, repeats: int) -> list[Figure]:
    times = interleave(
        {kind: trainer.step for kind, trainer in trainers.items()},
        repeats=repeats,
        steps=5,
        finish=torch.cuda.synchronize,
    )
    figures = []
    for kind, seconds in times.items():
        rate, spread = median_with_spread([tokens / s for s in seconds])
        figure = Figure(f"{kind}, tokens/s", rate, "tokens/s", spread)
        peer = "bf16-true" if "bf16 weights" in kind and "bf16-true" in times else "bf16"
        if kind not in ("bf16", "bf16-true") and peer in times:
            figure.peer, figure.ratio = peer, paired_ratio(seconds, times[peer])[0]
        figures.append(figure)
        flops = 6 * trainers[kind].linear_weights * rate
        figures.append(Figure(f"{kind}, Linear layers' operations over all time", flops / 1e12, "TFLOP/s"))
    return figures


def profile(trainers: dict[str, Trainer], tokens: int) -> list[Figure]:
    """Where one replayed step of each variant spends the device's time."""
    figures = []
    for kind, trainer in trainers.items():
        trainer.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            trainer.step()
            torch.cuda.synchronize()
        spent: dict[str, list[float]] = defaultdict(list)
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spent[event.name].append(event.device_time_total / 1e3)
        total = sum(map(sum, spent.values()))
        words = ("gemm", "nvjet", "cutlass", "cublas")
        products = {n: t for n, t in spent.items() if any(w in n.lower() for w in words) and "flash" not in n}
        in_products = sum(map(sum, products.values()))
        print(f"\n{kind}: {total:.1f} ms of kernels, {in_products:.1f} ms in products")
        for name, parts in sorted(spent.items(), key=lambda item: -sum(item[1]))[:22]:
            print(f"  {sum(parts):8.2f} ms {len(parts):4} x  {name[:110]}")
        rate = 6 * trainer.linear_weights * tokens / (in_products / 1e3) / 1e12
        figures.append(Figure(f"{kind}, products alone", rate, "TFLOP/s"))
        figures.append(Figure(f"{kind}, all else in a step", total - in_products, "ms"))
    return figures


def sample_tokens(count: int, batch: tuple[int, int], seed: int, text: str) -> Iterator[torch.Tensor]:
    """`count` batches [B, T + 1] of int64 on the device."""
    rows, length = batch
    generator = torch.Generator("cuda").manual_seed(seed)
    if text:
        data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).cuda()
        for _ in range(count):
            starts = torch.randint(len(data) - length - 1, (rows, 1), device="cuda", generator=generator)
            yield data[starts + torch.arange(length + 1, device="cuda")].long()
        return
    chain = torch.Generator("cuda").manual_seed(1234)
    states = 1024
    orders = torch.rand(states, VOCAB, device="cuda", generator=chain).argsort(1)
    odds = 1.0 / torch.arange(1, VOCAB + 1, device="cuda") ** 1.3
    total = count * rows
    ranks = torch.multinomial(odds, total * (length + 1), replacement=True, generator=generator)
    ranks = ranks.view(length + 1, total)
    found = torch.zeros(length + 1, total, dtype=torch.int64, device="cuda")
    for t in range(length + 1):
        before = found[t - 1] if t else torch.zeros_like(found[0])
        earlier = found[t - 2] if t > 1 else torch.zeros_like(found[0])
        found[t] = orders[(before * 7 + earlier % 4) % states, ranks[t]]
    yield from found.t().reshape(count, rows, length + 1)


def measure_loss(quick: bool, steps: int, text: str) -> list[Figure]:
    batch, window = (4, 256), 50
    curves: dict[str, list[torch.Tensor]] = {}
    for kind in ("bf16", "fp8"):
        trainer = Trainer(kind, batch)
        trainer.warm_up()
        curves[kind] = []
        for seed in range(3):
            reset(trainer, seed)
            losses = []
            for i, tokens in enumerate(sample_tokens(steps, batch, seed, text)):
                for group in trainer.optimizer.param_groups:
                    group["lr"] = 1e-4 * min(1.0, (i + 1) / 50)
                losses.append(trainer.train(tokens[:, :-1], tokens[:, 1:]).clone())
            curve = torch.stack(losses).cpu()
            curves[kind].append(curve[: steps // window * window].view(-1, window).mean(1))
        del trainer
        torch.cuda.empty_cache()
    figures = []
    bands = torch.stack(curves["bf16"])
    mine = torch.stack(curves["fp8"])
    print("\nmean loss of each 50 steps, three seeds of bf16, then of fp8")
    for i in range(bands.shape[1]):
        print(
            f"  {(i + 1) * window:5} ",
            *(f"{v:.4f}" for v in bands[:, i]),
            " | ",
            *(f"{v:.4f}" for v in mine[:, i]),
        )
    low, high = bands[:, -1].min().item(), bands[:, -1].max().item()
    figures.append(
        Figure("last loss of bf16, mean of seeds", bands[:, -1].mean().item(), "nats", (high - low) / 2)
    )
    figures.append(Figure("last loss of fp8, mean of seeds", mine[:, -1].mean().item(), "nats", peer="bf16"))
    inside = low <= mine[:, -1].mean().item() <= high
    figures.append(Figure("fp8's mean is within bf16's band of seeds", float(inside), "(1: yes)"))
    figures.append(
        Figure("largest difference of same seeds, any window", (mine - bands).abs().max().item(), "nats")
    )
    return figures


def reset(trainer: Trainer, seed: int) -> None:
    """Weights drawn anew and no optimizer state, in place: the recorded step goes on being valid."""
    torch.manual_seed(seed)
    for module in trainer.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for state in trainer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def main() -> None:
    args = arguments(__doc__, parts="peaks,layers,rate,profile,loss", text="", steps=500, kinds="")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.fp8_rate needs a CUDA device with fp8 units")
    tokens = (2, 1024) if args.quick else (16, 1024)
    count = tokens[0] * tokens[1]
    kinds = args.kinds.split(",") if args.kinds else ["bf16", "fp8", "fp8 e4m3 gradients", "torchao"]
    figures: list[Figure] = []
    parts = args.parts.split(",")
    trainers: dict[str, Trainer] = {}
    if "rate" in parts or "profile" in parts:
        trainers = build(kinds, tokens)
    work: dict[str, Callable[[], list[Figure]]] = {
        "peaks": lambda: measure_peaks(args.quick),
        "rate": lambda: measure_rate(trainers, count, 2 if args.quick else 7),
        "profile": lambda: profile(trainers, count),
        "layers": lambda: measure_layers(args.quick),
        "loss": lambda: measure_loss(args.quick, args.steps, args.text),
    }
    for part, measure in work.items():
        if part not in parts:
            continue
        if part in ("layers", "loss"):
            trainers.clear()
            torch.cuda.empty_cache()
        start = time.perf_counter()
        try:
            found = measure()
        except Exception:
            print(f"{part} failed:\n{traceback.format_exc()}")
            continue
        figures += found
        report(f"{part} ({time.perf_counter() - start:.0f} s)", found, None)
    report("fp8 on four blocks of width 4096", figures, args.json)


if __name__ == "__main__":
    main()
