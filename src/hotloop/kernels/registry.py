"""A user's own kernel as a torch operator: believed only after it agreed with its twin.

A kernel that is wrong at odd sizes, reads strided memory as if it were dense, leaves elements unwritten or waits for
the device shows it here, not in a loss curve.
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hotloop.errors import KernelError
from hotloop.kernels.trial import Inputs, as_tuple, cases, check, check_capture, learns, time_call
from hotloop.nested import memory_of

__all__ = ["RegisteredKernel", "register"]

_SIZES = (1, 2, 31, 127, 1000, 4097)
_DTYPES = (torch.float32, torch.bfloat16)
# ‖kernel - twin in float64‖ / ‖twin in float64‖
_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_NAMESPACE = "hotloop_user"
_TAKEN: set[str] = set()


@dataclass
class RegisteredKernel:
    """A kernel that agreed with its twin: call it like the function it was made of.

    Attributes:
        name: its name as an operator, `torch.ops.hotloop_user.<name>`: the one asked for, with a number behind it where
            another kernel has that one.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The operator."""
        return self.operator(*args, **kwargs)

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
    device_types: str | Sequence[str] = ("cuda",),
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
            is none or it is zero; checked too. It may launch kernels.
        name: of the operator; by default that of `op`. Registered again, it is another kernel beside the first.
        sizes: sizes to check; odd ones are the point.
        dtypes: floating-point types to check.
        bounds: largest relative error by type; by default 1e-5 for float32, 2e-3 for float16, 1e-2 for bfloat16.
        device_types: where the kernel runs: "cuda", "cpu", or several.

    Each case is checked on dense inputs, on strided ones and on memory that begins 1 element into an allocation, with
    uninitialised memory poisoned. On CUDA it is recorded into a graph and replayed with other values, and timed.

    Raises:
        KernelError: it disagrees with the twin, changes an input, cannot be recorded, or has no annotations; the text
            says for which input. Nothing to check it with, or a type without a bound.
    """
    name = name or str(getattr(op, "__name__", "kernel"))
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise KernelError(
            f"register: {name!r} is no name for an operator: give name=, letters, digits and _, and no Python keyword"
        )
    kinds = (device_types,) if isinstance(device_types, str) else tuple(device_types)
    limit = {**_BOUNDS, **(bounds or {})}
    _check_arguments(name, inputs, sizes, dtypes, kinds, limit)
    schema = _schema(op, twin, name)
    device = next((d for kind in kinds if (d := _device(kind)) is not None), None)
    kernel = RegisteredKernel(name, None, device)
    if device is not None:
        for dtype in dtypes:
            for given, label in cases(inputs, sizes, dtype, device):
                check(kernel, op, twin, backward, given, f"{name}{label}", limit[dtype], dtype)
        largest, _ = list(cases(inputs, sizes, dtypes[0], device))[-3]
        if device.type == "cuda":
            check_capture(kernel, op, twin, largest, limit[dtypes[0]], dtypes[0])
        kernel.kernel_us, kernel.twin_us = time_call(op, largest), time_call(twin, largest)
    kernel.name = _free_name(name)
    kernel.operator = _make_operator(kernel.name, schema, op, twin, backward, kinds)
    return kernel


def _free_name(name: str) -> str:
    """`name`, with a number where it is taken: a second operator of one name would be the first one's too."""
    for number in itertools.count(1):
        free = name if number == 1 else f"{name}_{number}"
        if not {free, f"{free}_backward"} & _TAKEN:
            break
    _TAKEN.update((free, f"{free}_backward"))
    return free


def _check_arguments(
    name: str,
    inputs: Inputs | Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    kinds: tuple[str, ...],
    bounds: Mapping[torch.dtype, float],
) -> None:
    if not callable(inputs) and (not isinstance(inputs, list | tuple) or not inputs):
        raise KernelError(
            f"register({name}): inputs={inputs!r} gives nothing to check it with: a function (size, dtype, device) -> "
            "arguments, or a list of argument tuples"
        )
    if not dtypes or (callable(inputs) and not sizes):
        raise KernelError(f"register({name}): without sizes and dtypes there is nothing to check it with")
    if unbounded := [d for d in dtypes if d not in bounds]:
        raise KernelError(
            f"register({name}): for {unbounded[0]} give the largest relative error: bounds={{dtype: 1e-2}}"
        )
    for kind in kinds:
        try:
            torch.device(kind)
        except RuntimeError:
            raise KernelError(
                f"register({name}): device_types={kind!r} is no type of device; torch calls them cuda, cpu, xpu, mps"
            ) from None


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


@contextmanager
def _autograd_inside() -> Iterator[None]:
    """An operator's own code runs below autograd; this brings it back there."""
    keys = torch._C.DispatchKey
    with ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradCPU, keys.AutogradCUDA, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


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
        # an operator's results are memory of their own; a twin may hand an input through, or a part of it, or one twice
        known = {memory_of(a) or id(a) for a in args if isinstance(a, torch.Tensor)}
        fresh = []
        for r in as_tuple(result):
            place = memory_of(r) or id(r)
            fresh.append(r.clone() if place in known else r)
            known.add(place)
        return tuple(fresh) if isinstance(result, tuple | list) else fresh[0]

    made = torch.library.custom_op(f"{_NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(twin)

    def differentiate(slopes: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        if backward is not None and choose(args) is op:
            found = [g for g, a in zip(as_tuple(backward(*slopes, *args)), args, strict=True) if learns(a)]
        else:
            with _autograd_inside():
                leaves = [a.detach().requires_grad_() if learns(a) else a for a in args]
                pairs = [
                    (r, s) for r, s in zip(as_tuple(twin(*leaves)), slopes, strict=True) if r.requires_grad
                ]
                wanted = [a for a in leaves if learns(a)]
                found = list(
                    torch.autograd.grad(
                        [r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True
                    )
                )
        learning = [a for a in args if learns(a)]
        return [torch.zeros_like(a) if g is None else g.clone() for g, a in zip(found, learning, strict=True)]

    # an operator too, so that the compiler need not look inside
    reverse = torch.library.custom_op(
        f"{_NAMESPACE}::{name}_backward",
        differentiate,
        mutates_args=(),
        schema=f"(Tensor[] slopes, {schema[1 : schema.index(') ->')]}) -> Tensor[]",
    )
    reverse.register_fake(lambda slopes, *args: [torch.empty_like(a) for a in args if learns(a)])

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, torch.Tensor)))
        ctx.others = [None if isinstance(a, torch.Tensor) else (a,) for a in inputs]

    def go_back(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        args = tuple(next(saved) if p is None else p[0] for p in ctx.others)
        # dense, as they are where `backward` is checked: that of a sum is one number, spread out by strides of 0
        found = iter(reverse([s.contiguous() for s in slopes], *args))
        return tuple(next(found) if learns(a) else None for a in args)

    made.register_autograd(go_back, setup_context=remember)
    return made
