"""A user's own kernel as a torch operator: believed only after it agreed with its twin.

A kernel that is wrong at odd sizes, reads strided memory as if it were dense, leaves elements unwritten or waits for
the device shows it here, not in a loss curve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from hotloop.errors import KernelError
from hotloop.hardware.recording import mend_failed_recording

__all__ = ["RegisteredKernel", "register"]

Inputs = Callable[[int, torch.dtype, torch.device], tuple[Any, ...]]

_SIZES = (1, 2, 31, 127, 1000, 4097)
_DTYPES = (torch.float32, torch.bfloat16)
# ‖kernel - twin in float64‖ / ‖twin in float64‖
_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_NAMESPACE = "hotloop_user"


@dataclass
class RegisteredKernel:
    """A kernel that agreed with its twin: call it like the function it was made of.

    Attributes:
        name: its name as an operator, `torch.ops.hotloop_user.<name>`.
        device: where it was checked; None if no device here runs it, and the twin is used.
        checks: comparisons made.
        errors: the worst relative error of values by type, `‖kernel - exact‖ / ‖exact‖`, exact being the twin in
            float64.
        gradient_errors: the same of gradients.
        repeatable: equal inputs gave equal bits each time.
        capture_safe: it can be recorded into a CUDA graph and replayed with other values; None off CUDA.
        kernel_us, twin_us: median microseconds of one call, on CUDA inside a graph; None if not timed.
    """

    name: str
    operator: Any = field(repr=False)
    device: torch.device | None = None
    checks: int = 0
    errors: dict[torch.dtype, float] = field(default_factory=dict)
    gradient_errors: dict[torch.dtype, float] = field(default_factory=dict)
    repeatable: bool = True
    capture_safe: bool | None = None
    kernel_us: float | None = None
    twin_us: float | None = None

    def __call__(self, *args: Any) -> Any:
        """The operator."""
        return self.operator(*args)

    def __str__(self) -> str:
        if self.device is None:
            return f"{self.name}: not checked, no device here runs it; the twin is used"
        worst = ", ".join(f"{str(d).removeprefix('torch.')} {e:.1e}" for d, e in self.errors.items())
        text = f"{self.name} on {self.device}: {self.checks} checks, worst error {worst}"
        if self.kernel_us is not None and self.twin_us is not None:
            text += f"; {self.kernel_us:.1f} us, twin {self.twin_us:.1f} us ({self.twin_us / self.kernel_us:.2f}x)"
        if not self.repeatable:
            text += "; not the same bits each time"
        if self.capture_safe is not None:
            text += "; can be recorded"
        return text


def register(
    op: Callable[..., Any],
    *,
    twin: Callable[..., Any],
    inputs: Inputs | Sequence[tuple[Any, ...]],
    backward: Callable[..., Any] | None = None,
    name: str | None = None,
    sizes: Sequence[int] = _SIZES,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    bounds: Mapping[torch.dtype, float] | None = None,
    device_types: Sequence[str] = ("cuda",),
) -> RegisteredKernel:
    """Make `op`, a function that launches a Triton or CUDA kernel, a torch operator, if it does what `twin` does.

    Args:
        op: takes tensors and scalars, returns a tensor or a tuple of tensors that are new memory; annotated, since
            the operator's schema is read from its annotations. It changes none of its inputs.
        twin: the same function in plain torch, also for float64. It says what is right, gives shapes to the compiler,
            gradients (unless `backward` is given), and runs where the kernel cannot.
        inputs: `(size, dtype, device) -> arguments` with random values, called for each of `sizes` and `dtypes`; or a
            list of argument tuples, whose floating-point tensors are redrawn and converted.
        backward: `(*gradients of the results, *arguments) -> gradients of the arguments`, a tuple with None where there
            is none; checked too. It may launch kernels.
        name: of the operator; by default that of `op`.
        sizes: sizes to check; odd ones are the point.
        dtypes: floating-point types to check.
        bounds: largest relative error by type; by default 1e-5 for float32, 2e-3 for float16, 1e-2 for bfloat16.
        device_types: where the kernel runs.

    Each case is checked on dense inputs, on strided ones and on memory that begins 1 element into an allocation, with
    uninitialised memory poisoned. On CUDA it is recorded into a graph and replayed with other values, and timed.

    Raises:
        KernelError: it disagrees with the twin, changes an input, cannot be recorded, or has no annotations; the text
            says for which input.
    """
    name = name or str(getattr(op, "__name__", "kernel"))
    if not name.isidentifier():
        raise KernelError(f"register: {name!r} is no name for an operator: give name=, letters, digits and _")
    schema = _schema(op, twin, name)
    device = next((d for kind in device_types if (d := _device(kind)) is not None), None)
    kernel = RegisteredKernel(name, None, device)
    if device is not None:
        limit = {**_BOUNDS, **(bounds or {})}
        for dtype in dtypes:
            for given, label in _cases(inputs, sizes, dtype, device):
                _check(kernel, op, twin, backward, given, f"{name}{label}", limit[dtype], dtype)
        largest, _ = list(_cases(inputs, sizes, dtypes[0], device))[-3]
        if device.type == "cuda":
            _check_capture(kernel, op, twin, largest, limit[dtypes[0]], dtypes[0])
        kernel.kernel_us, kernel.twin_us = _time(op, largest), _time(twin, largest)
    kernel.operator = _make_operator(name, schema, op, twin, backward, tuple(device_types))
    return kernel


def _schema(op: Callable[..., Any], twin: Callable[..., Any], name: str) -> str:
    problem = ""
    for function in (op, twin):
        try:
            return torch.library.infer_schema(function, mutates_args=())
        except ValueError as error:
            problem = problem or str(error).splitlines()[0]
    raise KernelError(
        f"register({name}): its schema cannot be read: {problem} Annotate arguments and result: torch.Tensor, int, "
        "float, bool, Optional of these, tuples of tensors"
    )


def _device(kind: str) -> torch.device | None:
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind, None)
    return torch.device(kind, 0) if module is not None and module.is_available() else None


def _cases(
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


def _check(
    kernel: RegisteredKernel,
    op: Callable[..., Any],
    twin: Callable[..., Any],
    backward: Callable[..., Any] | None,
    given: tuple[Any, ...],
    what: str,
    bound: float,
    dtype: torch.dtype,
) -> None:
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
    with _poisoned():
        try:
            first, second = _tuple(op(*given)), _tuple(op(*given))
        except Exception as failure:
            raise KernelError(f"{what}: the kernel failed: {type(failure).__name__}: {failure}") from failure
    for i, (a, b) in enumerate(zip(given, before, strict=True)):
        if isinstance(a, torch.Tensor) and not _same(a, b):
            raise KernelError(
                f"{what}: the kernel changes its argument {i}; it must write to new memory only"
            )
    kernel.repeatable &= all(_same(a, b) for a, b in zip(first, second, strict=True))
    wide = tuple(_widened(a) for a in given)
    exact, plain = _tuple(twin(*wide)), _tuple(twin(*given))
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
    leaves = [a.detach().requires_grad_() if _learns(a) else a for a in wide]
    exact = _tuple(twin(*leaves))
    slopes = [torch.randn_like(e).to(dtype) if e.is_floating_point() else torch.zeros_like(e) for e in exact]
    wanted = [a for a in leaves if _learns(a)]
    loss = sum((e * s.double()).sum() for e, s in zip(exact, slopes, strict=True) if e.requires_grad)
    right = iter(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    with _poisoned():
        mine = _tuple(backward(*slopes, *given))
    if len(mine) != len(given):
        raise KernelError(f"{what}: backward returns {len(mine)} gradients for {len(given)} arguments")
    for i, (argument, gradient) in enumerate(zip(given, mine, strict=True)):
        if not _learns(argument):
            continue
        expected = next(right)
        if gradient is None:
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


def _check_capture(
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
                results = _tuple(op(*static))
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
        exact = _tuple(twin(*(_widened(a) for a in static)))
        for mine, right in zip(results, exact, strict=True):
            error = _distance(mine, right)
            if not error <= bound:
                raise KernelError(
                    f"{kernel.name} replayed from a CUDA graph with other values is {_how_far(mine, right, error)}: "
                    "something it reads was frozen while it was recorded"
                )
    kernel.capture_safe = True


def _time(function: Callable[..., Any], given: tuple[Any, ...]) -> float:
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


@contextmanager
def _autograd_inside() -> Iterator[None]:
    """An operator's own code runs below autograd; this brings it back there."""
    keys = torch._C.DispatchKey
    with ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradCPU, keys.AutogradCUDA, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _learns(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _widened(x: Any) -> Any:
    return x.double() if _learns(x) else x


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


def _make_operator(
    name: str,
    schema: str,
    op: Callable[..., Any],
    twin: Callable[..., Any],
    backward: Callable[..., Any] | None,
    device_types: tuple[str, ...],
) -> Any:
    def choose(args: tuple[Any, ...]) -> Callable[..., Any]:
        kinds = {a.device.type for a in args if isinstance(a, torch.Tensor)}
        return op if kinds and kinds <= set(device_types) else twin

    def run(*args: Any) -> Any:
        result = choose(args)(*args)
        # an operator's results are its own memory; a twin may hand an input through
        addresses = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}
        fresh = tuple(r.clone() if r.data_ptr() in addresses else r for r in _tuple(result))
        return fresh if isinstance(result, tuple | list) else fresh[0]

    made = torch.library.custom_op(f"{_NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(twin)

    def differentiate(slopes: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        if backward is not None and choose(args) is op:
            found = [g for g, a in zip(_tuple(backward(*slopes, *args)), args, strict=True) if _learns(a)]
        else:
            with _autograd_inside():
                leaves = [a.detach().requires_grad_() if _learns(a) else a for a in args]
                pairs = [
                    (r, s) for r, s in zip(_tuple(twin(*leaves)), slopes, strict=True) if r.requires_grad
                ]
                wanted = [a for a in leaves if _learns(a)]
                found = list(
                    torch.autograd.grad(
                        [r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True
                    )
                )
        learning = [a for a in args if _learns(a)]
        return [torch.zeros_like(a) if g is None else g.clone() for g, a in zip(found, learning, strict=True)]

    # an operator too, so that the compiler need not look inside
    reverse = torch.library.custom_op(
        f"{_NAMESPACE}::{name}_backward",
        differentiate,
        mutates_args=(),
        schema=f"(Tensor[] slopes, {schema[1 : schema.index(') ->')]}) -> Tensor[]",
    )
    reverse.register_fake(lambda slopes, *args: [torch.empty_like(a) for a in args if _learns(a)])

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, torch.Tensor)))
        ctx.others = [None if isinstance(a, torch.Tensor) else (a,) for a in inputs]

    def go_back(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        args = tuple(next(saved) if p is None else p[0] for p in ctx.others)
        found = iter(reverse(list(slopes), *args))
        return tuple(next(found) if _learns(a) else None for a in args)

    made.register_autograd(go_back, setup_context=remember)
    return made
