"""Truth: a compiled model against the same model in float64 PyTorch, on given, random, extreme, tiny and NaN inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hotloop.native.capture import copy_model
from hotloop.native.faults import VerificationError
from hotloop.native.handle import CompiledModel
from hotloop.native.rounding import rounding_errors

__all__ = [
    "BOUND",
    "INT8_BOUND",
    "Check",
    "check_model",
    "make_reference",
    "measure_error",
    "run_compiled",
    "verify",
]

# Relative to the largest element of the output: in this case, or where a case is not extreme, in any of the given and
# random ones (one output near zero says nothing of the arithmetic).
BOUND = 1e-5
# Where the arithmetic itself loses more than that in float32, so many times PyTorch's own float32 error: with extreme
# inputs (saturated gates, differences of large sums) one rounding more or less is multiplied by as much.
_OWN_ERRORS = 4.0
_OWN_ERRORS_EXTREME = 16.0
# and where that one run of PyTorch's was lucky, so many times what disturbed runs show float32 may lose there
_ROUNDING_ERRORS = 4.0

# int8, root mean square relative to the outputs' own.
INT8_BOUND = 0.05

Reference = Callable[[Sequence[torch.Tensor]], list[npt.NDArray[np.float64]]]


@dataclass
class Check:
    """Relative error for each kind of input, PyTorch's own in float32 beside it, and what failed."""

    bound: float = BOUND
    errors: dict[str, float] = field(default_factory=dict)
    torch_errors: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The largest error of all but extreme inputs, where float32 itself may lose more."""
        return max([error for name, error in self.errors.items() if not name.startswith("extreme")] or [0.0])

    def as_report(self) -> dict[str, Any]:
        """What the library stores."""
        return {
            "reference": "float64 PyTorch",
            "bound": self.bound,
            "worst_relative_error": float(f"{self.worst:.3e}"),
            "errors": {name: float(f"{error:.3e}") for name, error in self.errors.items()},
            "torch_float32_errors": {
                name: float(f"{error:.3e}") for name, error in self.torch_errors.items()
            },
        }

    def raise_if_failed(self, what: str, notes: Sequence[str] = ()) -> None:
        """Raise for the first failures. `notes`: what is known of the build, such as a branch that was fixed.

        Raises:
            VerificationError: there were any.
        """
        if self.failed:
            found = "; ".join([*self.failed[:4], *notes])
            raise VerificationError(f"{what} disagrees with float64 PyTorch: {found}")


def make_reference(model: nn.Module, dtype: torch.dtype) -> Reference:
    """The model in evaluation mode and that precision, on CPU."""
    # copying an exported program's module warns of torch's own doings, as running it does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = copy_model(model).cpu().to(dtype)
        if not isinstance(twin, torch.fx.GraphModule):
            # an exported program was in evaluation mode when it was exported, and refuses to be told
            twin.eval()
            for module in twin.modules():
                if isinstance(module, nn.RMSNorm) and module.eps is None:
                    # what stands for None depends on the type; the library computes in float32
                    module.eps = torch.finfo(torch.float32).eps
        else:
            _convert_program(twin, dtype)

    def run(inputs: Sequence[torch.Tensor]) -> list[npt.NDArray[np.float64]]:
        given = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        # a model may write into what it is given; a caller's autocast is no part of it
        given = [x.clone() for x in given]
        quiet, plain = warnings.catch_warnings(), torch.autocast("cpu", enabled=False)
        with torch.no_grad(), quiet, plain, _default_dtype(dtype), _no_fast_path():
            warnings.simplefilter("ignore")
            results = tree_leaves(twin(*given))
        return [r.detach().to(torch.float64).numpy() for r in results if isinstance(r, torch.Tensor)]

    return run


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """torch's fast encoder writes zeros where a key is padded; its layers, which are what is compiled, do not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A model may make its first state by `torch.zeros(...)`: of the type that its twin computes in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _convert_program(twin: torch.fx.GraphModule, dtype: torch.dtype) -> None:
    """What `.to(dtype)` leaves as it was: the types written into an exported graph (a recurrent layer's first state),
    and its tensors that are neither parameters nor buffers."""
    for node in twin.graph.nodes:
        if node.op == "get_attr":
            *path, name = str(node.target).split(".")
            owner = twin.get_submodule(".".join(path))
            value = getattr(owner, name)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
                setattr(owner, name, value.to(dtype))
        node.args, node.kwargs = torch.fx.node.map_aggregate(
            (node.args, node.kwargs), lambda value: dtype if value is torch.float32 else value
        )
    twin.recompile()


def _cases(example: Sequence[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Inputs to try: name and tensors shaped as the example."""
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float, shift: float = 0.0) -> list[torch.Tensor]:
        drawn = []
        for x in example:
            if x.is_floating_point():
                drawn.append((torch.randn(x.shape, generator=generator) * scale + shift).to(x.dtype))
            elif x.dtype == torch.bool:
                drawn.append(torch.rand(x.shape, generator=generator) < 0.5)
            else:
                low, high = int(x.min()) if x.numel() else 0, int(x.max()) if x.numel() else 0
                drawn.append(torch.randint(low, high + 1, x.shape, generator=generator, dtype=x.dtype))
        return drawn

    yield "given", [x.detach().clone() for x in example]
    for index in range(3):
        yield f"random {index}", draw(1.0)
    yield "shifted", draw(1.0, 3.0)
    yield "small", draw(1e-3)
    yield "denormal", draw(1e-41)
    yield "zero", draw(0.0)
    yield "extreme 100", draw(100.0)
    yield "extreme 1e4", draw(1e4)
    spoilt = draw(1.0)
    for x in spoilt:
        if x.is_floating_point() and x.numel():
            x.view(-1)[x.numel() // 2] = float("nan")
            break
    else:
        return
    yield "not a number", spoilt


def run_compiled(
    model: CompiledModel, inputs: Sequence[torch.Tensor], time: dict[int, int]
) -> list[npt.NDArray[np.float32]]:
    """The compiled model's outputs; `time` (input to dimension): events are fed one by one after a reset."""
    arrays = [np.ascontiguousarray(x.numpy()) for x in inputs]
    if not time:
        result = model(*arrays)
    else:
        model.reset()
        index, dim = next(iter(time.items()))
        for step in range(arrays[index].shape[dim]):
            now = [
                np.ascontiguousarray(np.take(a, [step], axis=time[k])) if k in time else a
                for k, a in enumerate(arrays)
            ]
            if step % 2:
                model.prep()
            result = model(*now)
    return list(result) if isinstance(result, tuple) else [result]


def check_model(
    compiled: CompiledModel,
    model: nn.Module,
    example: Sequence[torch.Tensor],
    *,
    bound: float = BOUND,
    only: Sequence[str] | None = None,
) -> Check:
    """Compare `compiled` with `model`. `only`: prefixes of the kinds of inputs to try."""
    description = compiled.facts["description"]
    names = [item["name"] for item in description["inputs"]]
    time = {names.index(name): dim for name, dim in description["time_inputs"].items()}
    exact, single = make_reference(model, torch.float64), make_reference(model, torch.float32)
    check = Check(bound)
    typical: list[float] = []
    for name, inputs in _cases(example):
        if only is not None and not name.startswith(tuple(only)):
            continue
        if name in ("denormal", "zero") and description.get("sorts"):
            # PyTorch does not say in which order equal values come
            continue
        outputs = run_compiled(compiled, inputs, time)
        # inside the library denormals are zero by design: where the largest of several lies, say, they all tie
        seen = (
            [torch.zeros_like(x) if x.is_floating_point() else x for x in inputs]
            if name == "denormal"
            else inputs
        )
        try:
            wanted, own = exact(seen), single(seen)
        except (IndexError, RuntimeError):
            if name == "given":
                raise
            # tables of several lengths: an index drawn over the range of all may lie outside one of them
            inputs, seen = (
                [x if x.is_floating_point() else e for x, e in zip(listed, example, strict=True)]
                for listed in (inputs, seen)
            )
            outputs = run_compiled(compiled, inputs, time)
            wanted, own = exact(seen), single(seen)
        for listed in (wanted, own):
            _take_rows(listed, description["output_rows"])
        if name.startswith(("given", "random")):
            largest = [float(np.abs(w[np.isfinite(w)]).max(initial=0.0)) for w in wanted]
            typical = [max(a, b) for a, b in zip(largest, typical or largest, strict=True)]
        extreme = name.startswith("extreme")
        _compare(
            check,
            name,
            outputs,
            wanted,
            own,
            [0.0] * len(wanted) if extreme else typical,
            partial(_disturb, exact, inputs, description["output_rows"]) if extreme else None,
        )
    if time:
        compiled.reset()
    return check


def _take_rows(outputs: list[npt.NDArray[np.float64]], rows: Sequence[Any]) -> None:
    for index, row in enumerate(rows):
        if row is not None:
            outputs[index] = np.take(outputs[index], [row[1]], axis=row[0])


def _disturb(
    exact: Reference, inputs: Sequence[torch.Tensor], rows: Sequence[Any]
) -> list[npt.NDArray[np.float64]]:
    errors = rounding_errors(exact, inputs)
    _take_rows(errors, rows)
    return errors


def measure_error(
    compiled: CompiledModel, model: nn.Module, batches: Sequence[Sequence[torch.Tensor]]
) -> float:
    """Root mean square of what the outputs are off float64, relative to the outputs' own; the worst output's."""
    description = compiled.facts["description"]
    names = [item["name"] for item in description["inputs"]]
    time = {names.index(name): dim for name, dim in description["time_inputs"].items()}
    exact = make_reference(model, torch.float64)
    lost = np.zeros(len(description["outputs"]))
    kept = np.zeros_like(lost)
    for inputs in batches:
        outputs, wanted = run_compiled(compiled, inputs, time), exact(inputs)
        for index, (y, reference) in enumerate(zip(outputs, wanted, strict=True)):
            row = description["output_rows"][index]
            if row is not None:
                reference = np.take(reference, [row[1]], axis=row[0])
            lost[index] += float(np.square(y.reshape(reference.shape) - reference).sum())
            kept[index] += float(np.square(reference).sum())
    if time:
        compiled.reset()
    return float(np.sqrt(lost / np.maximum(kept, 1e-60)).max())


def verify(
    compiled: CompiledModel,
    model: nn.Module | torch.export.ExportedProgram,
    example: torch.Tensor | Sequence[torch.Tensor] = (),
) -> Check:
    """Compare a library, loaded from anywhere, with the model that it was built from, on all kinds of inputs.

    Args:
        compiled: what `load` returned.
        model: the module, or its exported program (then `example` may be left out).
        example: a valid input, or one for each argument.
    """
    inputs = [example] if isinstance(example, torch.Tensor) else list(example)
    if not isinstance(model, nn.Module):
        if not inputs and model.example_inputs:
            inputs = list(model.example_inputs[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = model.module()
    return check_model(compiled, model, inputs)


def _compare(
    check: Check,
    name: str,
    outputs: Sequence[npt.NDArray[np.float32]],
    wanted: Sequence[npt.NDArray[np.float64]],
    own: Sequence[npt.NDArray[np.float64]],
    typical: Sequence[float],
    disturbed: Callable[[], list[npt.NDArray[np.float64]]] | None,
) -> None:
    error = torch_error = 0.0
    for index, (y, reference, single) in enumerate(zip(outputs, wanted, own, strict=True)):
        if y.size != reference.size:
            check.failed.append(
                f"{name} inputs, output {index}: {y.shape} where {reference.shape} was wanted"
            )
            return
        y = y.reshape(reference.shape)
        finite = np.isfinite(single) & np.isfinite(reference)
        if name == "not a number":
            # PyTorch's attention turns a row of nothing else into zeros, and a cast makes an integer of it
            finite &= ~np.isnan(y)
        # not element by element: a masked score times what is not a number spoils more of PyTorch's result than what
        # depends on it
        if name == "not a number" and np.isnan(reference).any() and not np.isnan(y).any():
            check.failed.append(f"{name} inputs, output {index}: the result hides it")
        if not finite.any():
            continue
        scale = max(float(np.abs(reference[finite]).max()), typical[index] if typical else 0.0, 1e-30)
        difference = np.abs(y[finite].astype(np.float64) - reference[finite])
        # denormals are zero inside by design, and a sigmoid ends at 1e-30
        difference = np.maximum(difference - 2e-30, 0.0)
        found = float(np.max(difference)) / scale if not np.isnan(difference).any() else float("inf")
        error = max(error, found)
        torch_error = max(torch_error, float(np.abs(single[finite] - reference[finite]).max()) / scale)
    check.errors[name], check.torch_errors[name] = error, torch_error
    own_errors = _OWN_ERRORS_EXTREME if name.startswith("extreme") else _OWN_ERRORS
    if error > max(check.bound, own_errors * torch_error):
        if disturbed is not None and error <= _ROUNDING_ERRORS * _relative(disturbed(), wanted):
            return
        check.failed.append(
            f"{name} inputs: relative error {error:.2e}, bound {check.bound:.0e} "
            f"(PyTorch's own in float32: {torch_error:.1e})"
        )


def _relative(errors: Sequence[npt.NDArray[np.float64]], wanted: Sequence[npt.NDArray[np.float64]]) -> float:
    """The largest error over the largest element, the worst output's."""
    found = 0.0
    for error, reference in zip(errors, wanted, strict=True):
        finite = np.isfinite(reference)
        if finite.any() and error.shape == reference.shape:
            scale = max(float(np.abs(reference[finite]).max()), 1e-30)
            found = max(found, float(np.nan_to_num(error[finite], posinf=0.0).max()) / scale)
    return found
