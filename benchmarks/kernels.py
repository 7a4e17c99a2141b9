"""Each of hotloop's kernels beside what torch and Inductor do instead, in one run.

    python -m benchmarks.kernels [--quick] [--json FILE]

Counts: microseconds on the device, each variant in a CUDA graph of 10 calls, so that no launch from the host counts;
all variants of a line interleaved, medians of the repeats. Inputs are random. Sizes are those of the character GPT
(16,384 rows of width 384 and 1,536; 10.8 million parameters in 77 tensors) and, for the cross-entropy, a vocabulary of
50,304. Limits are the bytes that must move over the bandwidth measured in the same run. Forward and backward of norm
and GELU are timed together: "stock" is eager torch, "Inductor" a compiled function of the same.
Left out: compilation, and the first calls of each variant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Figure, arguments, interleave, median_with_spread, paired_ratio, report
from benchmarks.models import CharGPT
from hotloop.kernels import (
    Tables,
    bias_gelu,
    clip_norm,
    column_sums,
    fused_adamw,
    layer_norm,
    linear_cross_entropy,
)
from hotloop.optim import clip_coefficient, total_norm

CALLS = 10
ROWS, WIDTH, WIDE = 16384, 384, 1536
Work = Callable[[], object]


def recorded(work: Work) -> Callable[[], None]:
    """`CALLS` calls of `work` as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            work()
    for _ in range(5):
        graph.replay()
    return graph.replay


def bandwidth() -> float:
    """Bytes per second, read and written, of a large elementwise addition."""
    x = torch.randn(1 << 27, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    replay = recorded(lambda: torch.add(x, 1.0, out=y))
    times = interleave({"": replay}, repeats=5, steps=5, finish=torch.cuda.synchronize)[""]
    return 2 * x.numel() * 2 * CALLS / median_with_spread(times)[0]


def line(
    name: str, variants: dict[str, Work], moved_bytes: int | None, rate: float, quick: bool
) -> list[Figure]:
    """Figures of one kernel: ours first, the others as its peers."""
    replays = {kind: recorded(work) for kind, work in variants.items()}
    steps = 5 if quick else 20
    # a device that waited for a compiler lowers its clock: the first round is for it to rise
    interleave(replays, repeats=1, steps=4 * steps, finish=torch.cuda.synchronize)
    times = interleave(replays, repeats=7 if quick else 11, steps=steps, finish=torch.cuda.synchronize)
    ours, *peers = variants
    figures = []
    for kind in variants:
        value, spread = median_with_spread([t / CALLS * 1e6 for t in times[kind]])
        peer = peers[-1] if kind == ours else ours
        ratio, _ = paired_ratio(times[kind], times[peer])
        limit = moved_bytes / rate * 1e6 if moved_bytes is not None and kind == ours else None
        figures.append(Figure(f"{name}: {kind}", value, "us", spread, peer, ratio, limit))
    return figures


def optimizer_lines(rate: float, quick: bool) -> list[Figure]:
    torch.manual_seed(0)
    params = [p.detach() for p in CharGPT().cuda().parameters()]
    figures = []
    for kind in (torch.float32, torch.bfloat16):
        grads = [torch.randn_like(p).to(kind) * 1e-3 for p in params]
        shadows = [p.bfloat16() for p in params] if kind == torch.bfloat16 else None
        state = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        steps = [torch.zeros((), device="cuda") for _ in params]
        skip = torch.zeros((), device="cuda")
        tables = Tables()

        def ours(
            grads: list[Tensor] = grads,
            shadows: list[Tensor] | None = shadows,
            state: list[list[Tensor]] = state,
            steps: list[Tensor] = steps,
            skip: Tensor = skip,
            tables: Tables = tables,
        ) -> None:
            _, factor = clip_norm(grads, 1.0, tables=tables)
            fused_adamw(
                params,
                grads,
                *state,
                steps,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                coefficient=factor,
                skip=skip,
                shadows=shadows,
                tables=tables,
            )

        learning = [p.clone().requires_grad_() for p in params]
        optimizer = torch.optim.AdamW(
            learning, lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True
        )
        optimizer.found_inf = skip  # type: ignore[attr-defined]

        def stock(
            grads: list[Tensor] = grads,
            shadows: list[Tensor] | None = shadows,
            learning: list[Tensor] = learning,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            mine = grads
            if shadows is not None:
                mine = [torch.empty_like(p) for p in learning]
                torch._foreach_copy_(mine, grads)
            torch._foreach_mul_(mine, clip_coefficient(total_norm(mine), 1.0))
            for p, g in zip(learning, mine, strict=True):
                p.grad = g
            optimizer.step()
            if shadows is not None:
                torch._foreach_copy_(shadows, learning)

        numel = sum(p.numel() for p in params)
        size = kind.itemsize
        moved = numel * (2 * size + 6 * 4 + (2 if shadows is not None else 0))
        name = f"clip and AdamW, {'float32' if size == 4 else 'bfloat16 with masters'}"
        figures += line(name, {"ours": ours, "torch fused": stock}, moved, rate, quick)
        figures += line(
            f"norm of gradients, {'float32' if size == 4 else 'bfloat16'}",
            {
                "ours": lambda grads=grads, tables=tables: clip_norm(grads, 1.0, tables=tables),
                "torch foreach": lambda grads=grads: clip_coefficient(total_norm(grads), 1.0),
            },
            numel * size,
            rate,
            quick,
        )
    return figures


def row_lines(rate: float, quick: bool) -> list[Figure]:
    torch.manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16).requires_grad_()

    x, branch, bias, weight, shift = draw(ROWS, WIDTH), draw(ROWS, WIDTH), *(draw(WIDTH) for _ in range(3))
    slope = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

    def stock_norm(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        added = x + (branch + bias)
        return added, F.layer_norm(added, (WIDTH,), weight, shift)

    def our_norm(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return layer_norm(x, weight, shift, branch=branch, branch_bias=bias)

    def there_and_back(function: Callable[..., tuple[Tensor, Tensor]]) -> Work:
        def work() -> None:
            torch.autograd.grad(function(x, branch), [x, branch, bias, weight, shift], [slope, slope])

        return work

    moved = ROWS * WIDTH * 2 * (4 + 4)
    figures = line(
        "norm with residual and bias, there and back",
        {
            "ours": there_and_back(our_norm),
            "stock": there_and_back(stock_norm),
            "Inductor": there_and_back(torch.compile(stock_norm)),
        },
        moved,
        rate,
        quick,
    )
    z, wide_bias = draw(ROWS, WIDE), draw(WIDE)
    wide_slope = torch.randn(ROWS, WIDE, device="cuda", dtype=torch.bfloat16)

    def stock_gelu(z: Tensor) -> Tensor:
        return F.gelu(z + wide_bias)

    def gelu_and_back(function: Callable[[Tensor], Tensor]) -> Work:
        return lambda: torch.autograd.grad(function(z), [z, wide_bias], wide_slope)

    figures += line(
        "GELU with bias, there and back",
        {
            "ours": gelu_and_back(lambda z: bias_gelu(z, wide_bias)),
            "stock": gelu_and_back(stock_gelu),
            "Inductor": gelu_and_back(torch.compile(stock_gelu)),
        },
        ROWS * WIDE * 2 * (2 + 3),
        rate,
        quick,
    )
    packed = torch.randn(ROWS, 3 * WIDTH, device="cuda", dtype=torch.bfloat16)
    figures += line(
        "sums of 1,152 columns",
        {"ours": lambda: column_sums(packed), "stock": lambda: packed.sum(0)},
        packed.numel() * 2,
        rate,
        quick,
    )
    return figures


def loss_lines(rate: float, quick: bool) -> list[Figure]:
    figures = []
    for rows, width, classes in ((8192, 768, 50304), (ROWS, WIDTH, 65)):
        torch.manual_seed(0)
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        head = nn.Linear(width, classes, bias=False, device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(classes, (rows,), device="cuda")

        def ours(x: Tensor = x, head: nn.Linear = head, targets: Tensor = targets) -> None:
            torch.autograd.grad(linear_cross_entropy(x, head.weight, targets), [x, head.weight])

        def loss(x: Tensor, head: nn.Linear = head, targets: Tensor = targets) -> Tensor:
            return F.cross_entropy(head(x).float(), targets)

        def stock(x: Tensor = x, head: nn.Linear = head, function: Callable[[Tensor], Tensor] = loss) -> None:
            torch.autograd.grad(function(x), [x, head.weight])

        compiled = torch.compile(loss)
        variants: dict[str, Work] = {
            "ours": ours,
            "stock": stock,
            "Inductor": lambda stock=stock, compiled=compiled: stock(function=compiled),
        }
        name = f"head and cross-entropy, {classes} classes"
        figures += line(name, variants, None, rate, quick)
        for kind, work in variants.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
            figures.append(Figure(f"{name}: {kind}, memory", peak, "MB"))
    return figures


def main() -> None:
    args = arguments(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels needs a CUDA device")
    rate = bandwidth()
    figures = [Figure("memory bandwidth of an addition", rate / 1e12, "TB/s")]
    for lines in (optimizer_lines, row_lines, loss_lines):
        figures += lines(rate, args.quick)
    report("kernels, device time", figures, args.json)


if __name__ == "__main__":
    main()
