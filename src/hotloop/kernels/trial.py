"""What is asked of a user's kernel before it is believed: its twin's values and gradients, a recording, its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import KernelError
from hotloop.hardware.recording import mend_failed_recording

if TYPE_CHECKING:
    from hotloop.kernels.registry import RegisteredKernel

__all__ = ["Inputs", "as_tuple", "cases", "check", "check_capture", "learns", "time_call"]

Inputs = Callable[[int, torch.dtype, torch.device], tuple[Any, ...]]


def cases(
    inputs: Inputs | Sequence[tuple[Any, ...]], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Every case thrice: dense, strided, off the allocation's alignment; with what it is called in errors."""
    kind = str(dtype).removeprefix("torch.")
    made: list[tuple[tuple[Any, ...], str]] = []
    if callable(inputs):
        made = [(tuple(inputs(size, dtype, device)), f"(size {size}, {kind}") for size in sizes]
    else:
        for i, given in enumerate(inputs):
            again = tuple(_redrawn(a, dtype, device) if isinstance(a, torch.Tensor) else a for a in given)
            made.append((again, f"(inputs[{i}], {kind}"))
    for given, label in made:
        yield given, label + ")"
        yield tuple(_strided(a) for a in given), label + ", strided)"
        yield tuple(_shifted(a) for a in given), label + ", not aligned)"


def _redrawn(x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not x.is_floating_point():
        return x.to(device)
    return torch.randn(x.shape, dtype=torch.float64).to(device=device, dtype=dtype)


def _strided(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        return x
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 3, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def _shifted(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    whole = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    moved = whole[1:].view(x.shape)
    moved.copy_(x)
    return moved


def check(
    kernel: RegisteredKernel,
    op: Callable[..., Any],
    twin: Callable[..., Any],
    backward: Callable[..., Any] | None,
    given: tuple[Any, ...],
    what: str,
    bound: float,
    dtype: torch.dtype,
) -> None:
    """Compare results and gradients with the twin's in float64; inputs have to stay as they are.

    Raises:
        KernelError: they differ by more than `bound`, relative to the norm, or in form, or an input was changed.
    """
    first = _run(op, given, f"{what}: the kernel")
    second = _run(op, given, f"{what}: the kernel")
    kernel.repeatable &= all(_same(a, b) for a, b in zip(first, second, strict=True))
    wide = tuple(_widened(a) for a in given)
    exact, plain = as_tuple(twin(*wide)), as_tuple(twin(*given))
    if len(first) != len(exact):
        raise KernelError(f"{what}: the kernel returns {len(first)} tensors, its twin {len(exact)}")
    for i, (mine, right, stock) in enumerate(zip(first, exact, plain, strict=True)):
        where = f"{what}, result {i}" if len(first) > 1 else what
        if mine.shape != stock.shape or mine.dtype != stock.dtype or mine.device != stock.device:
            raise KernelError(
                f"{where}: the kernel returns {tuple(mine.shape)} {mine.dtype} on {mine.device}, its twin "
                f"{tuple(stock.shape)} {stock.dtype} on {stock.device}"
            )
        error = _distance(mine, right)
        kernel.errors[dtype] = max(kernel.errors.get(dtype, 0.0), error)
        kernel.checks += 1
        if not error <= bound:
            raise KernelError(
                f"{where}: the kernel is {_how_far(mine, right, error)}; allowed is {bound:.0e}"
            )
    if backward is not None:
        _check_gradients(kernel, twin, backward, given, wide, what, bound, dtype)


def _run(function: Callable[..., Any], given: Sequence[Any], who: str) -> tuple[Any, ...]:
    """Results of a kernel that has to leave its arguments as they are, with uninitialised memory poisoned."""
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
    with _poisoned():
        try:
            results = as_tuple(function(*given))
        except Exception as failure:
            raise KernelError(f"{who} failed: {type(failure).__name__}: {failure}") from failure
    for i, (a, b) in enumerate(zip(given, before, strict=True)):
        if isinstance(a, torch.Tensor) and not _same(a, b):
            raise KernelError(f"{who} changes its argument {i}; it must write to new memory only")
    return results


def _check_gradients(
    kernel: RegisteredKernel,
    twin: Callable[..., Any],
    backward: Callable[..., Any],
    given: tuple[Any, ...],
    wide: tuple[Any, ...],
    what: str,
    bound: float,
    dtype: torch.dtype,
) -> None:
    leaves = [a.detach().requires_grad_() if learns(a) else a for a in wide]
    exact = as_tuple(twin(*leaves))
    slopes = [
        torch.randn(e.shape, dtype=torch.float64, device=e.device).to(dtype)
        if e.is_floating_point()
        else torch.zeros(e.shape, dtype=e.dtype, device=e.device)
        for e in exact
    ]
    wanted = [a for a in leaves if learns(a)]
    loss = sum((e * s.double()).sum() for e, s in zip(exact, slopes, strict=True) if e.requires_grad)
    right = iter(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    mine = _run(backward, [*slopes, *given], f"{what}: backward")
    if len(mine) != len(given):
        raise KernelError(f"{what}: backward returns {len(mine)} gradients for {len(given)} arguments")
    for i, (argument, gradient) in enumerate(zip(given, mine, strict=True)):
        if not learns(argument):
            continue
        expected = next(right)
        if gradient is None:
            if expected.any():
                raise KernelError(
                    f"{what}: backward returns None for argument {i}, whose gradient is not zero: norm "
                    f"{float(expected.norm()):.3g}"
                )
            continue
        if gradient.shape != argument.shape or gradient.dtype != argument.dtype:
            raise KernelError(
                f"{what}: backward returns {tuple(gradient.shape)} {gradient.dtype} for argument {i}, which is "
                f"{tuple(argument.shape)} {argument.dtype}"
            )
        error = _distance(gradient, expected)
        kernel.gradient_errors[dtype] = max(kernel.gradient_errors.get(dtype, 0.0), error)
        kernel.checks += 1
        # a gradient goes through twice the roundings
        if not error <= 2 * bound:
            raise KernelError(
                f"{what}: the gradient of argument {i} is {_how_far(gradient, expected, error)}; allowed is "
                f"{2 * bound:.0e}"
            )


def check_capture(
    kernel: RegisteredKernel,
    op: Callable[..., Any],
    twin: Callable[..., Any],
    given: tuple[Any, ...],
    bound: float,
    dtype: torch.dtype,
) -> None:
    """Record it, change its inputs, replay, compare: what it read while being recorded must not stay frozen."""
    static = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(*static)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = as_tuple(op(*static))
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    except RuntimeError as failure:
        mend_failed_recording(stream)
        raise KernelError(
            f"{kernel.name} cannot be recorded into a CUDA graph: {str(failure).splitlines()[0]} It may not wait "
            "for the device (.item(), .cpu(), printing), nor allocate other than through torch"
        ) from failure
    for _ in range(2):
        for a in static:
            if isinstance(a, torch.Tensor) and a.is_floating_point():
                a.copy_(torch.randn_like(a))
        graph.replay()
        exact = as_tuple(twin(*(_widened(a) for a in static)))
        for mine, right in zip(results, exact, strict=True):
            error = _distance(mine, right)
            if not error <= bound:
                raise KernelError(
                    f"{kernel.name} replayed from a CUDA graph with other values is {_how_far(mine, right, error)}: "
                    "something it reads was frozen while it was recorded"
                )
    kernel.capture_safe = True


def time_call(function: Callable[..., Any], given: tuple[Any, ...]) -> float:
    """Median microseconds of a call."""
    if not any(isinstance(a, torch.Tensor) and a.device.type == "cuda" for a in given):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            function(*given)
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)
    calls = 20
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(*given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            function(*given)
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(9)]
    for start_event, end_event in events:
        start_event.record()
        graph.replay()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) * 1e3 / calls


@contextmanager
def _poisoned() -> Iterator[None]:
    """Uninitialised memory of torch is NaN while it is open, so that what a kernel leaves unwritten shows."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The results of a kernel that gives one or several."""
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def learns(x: Any) -> bool:
    """Whether an argument can have a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _widened(x: Any) -> Any:
    return x.double() if learns(x) else x


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))
    )


def _distance(mine: torch.Tensor, right: torch.Tensor) -> float:
    if not right.is_floating_point():
        return 0.0 if torch.equal(mine, right) else float("inf")
    if right.numel() == 0:
        return 0.0
    away = (mine.double() - right).norm().item()
    size = right.norm().item()
    return away / size if size else away


def _how_far(mine: torch.Tensor, right: torch.Tensor, error: float) -> str:
    if mine.is_floating_point() and bool(mine.isnan().any()) and not bool(right.isnan().any()):
        at = tuple(mine.isnan().nonzero()[0].tolist())
        return f"NaN at {at}, where its twin is {right[at].item():.6g} (unwritten, or computed so)"
    at = tuple((mine.double() - right.double()).abs().argmax().unsqueeze(0).tolist())
    flat_mine, flat_right = mine.reshape(-1)[at].item(), right.reshape(-1)[at].item()
    return f"{error:.1e} from its twin in float64, most at flat index {at[0]}: {flat_mine:.6g} against {flat_right:.6g}"
