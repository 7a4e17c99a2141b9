"""How far a precision is from fp32, module by module: outputs and gradients of one batch, computed both ways."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import PrecisionError, SettingError
from hotloop.nested import map_tensors, tensors_of
from hotloop.precision.casting import autocast_context, outputs_to_float32
from hotloop.precision.formats import Precision, find_precision
from hotloop.seeds import rng_state, set_rng_state

__all__ = ["Agreement", "ModuleError", "agreement"]

_SHOWN = 40
_ERRORS = ("output", "output_gradient", "weight_gradient")
# of fp16 losses, as a loop's
_FIRST_SCALE = 65536.0
_REFERENCES = {"fp32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ModuleError:
    """Relative errors of one module, ||found - right|| / ||right|| over all its calls; None where it has none.

    Attributes:
        name: its path; "" is the model itself.
        kind: its class.
        output: of what it returned.
        output_gradient: of the loss's gradient with respect to that.
        weight_gradient: of the gradients of its own parameters.
    """

    name: str
    kind: str
    output: float | None
    output_gradient: float | None
    weight_gradient: float | None

    @property
    def worst(self) -> float:
        """The largest of the three; infinite if one is not a number."""
        found = [e for e in (self.output, self.output_gradient, self.weight_gradient) if e is not None]
        return max((math.inf if math.isnan(e) else e for e in found), default=0.0)


@dataclass(frozen=True)
class Agreement:
    """A table, worst module first; `print` shows it.

    Attributes:
        precision: the one looked at.
        reference: fp32 or float64.
        loss: in that precision.
        reference_loss: in the reference.
        rows: one for each module that was called, worst first.
    """

    precision: str
    reference: str
    loss: float
    reference_loss: float
    rows: list[ModuleError] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Agreement:
        """What `to_dict` returned, also after a record wrote numbers that are not finite as text.

        >>> row = ModuleError("head", "Linear", 0.001, math.inf, None)
        >>> table = Agreement("bf16", "fp32", 1.0, 1.0, [row])
        >>> Agreement.from_dict(table.to_dict()) == table
        True
        """
        rows = [
            ModuleError(
                row["name"], row["kind"], *(e if e is None else float(e) for e in map(row.get, _ERRORS))
            )
            for row in values["rows"]
        ]
        numbers = float(values["loss"]), float(values["reference_loss"])
        return cls(values["precision"], values["reference"], *numbers, rows)

    def __str__(self) -> str:
        head = f"{self.precision} against {self.reference}: loss {self.loss:.6g} against {self.reference_loss:.6g}"
        names = [row.name or "(the model)" for row in self.rows[:_SHOWN]]
        wide = max(map(len, [*names, "module"]))
        kinds = max((len(row.kind) for row in self.rows[:_SHOWN]), default=4)
        lines = [
            head,
            f"{'module':{wide}}  {'class':{kinds}}  {'output':>8}  {'gradient':>8}  {'weights':>8}",
        ]
        for name, row in zip(names, self.rows, strict=False):
            errors = "  ".join(
                f"{'-' if e is None else format(e, '.1e'):>8}"
                for e in (row.output, row.output_gradient, row.weight_gradient)
            )
            lines.append(f"{name:{wide}}  {row.kind:{kinds}}  {errors}")
        if len(self.rows) > _SHOWN:
            lines.append(f"and {len(self.rows) - _SHOWN} more with smaller errors")
        return "\n".join(lines)


def agreement(
    model: nn.Module,
    batch: Any,
    precision: str | Precision | None = None,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    reference: str = "fp32",
    loop: Any = None,
) -> Agreement:
    """Compare one forward and backward of `model` in `precision` with the same in fp32.

    Two copies of the model do it, one after the other; the model itself, its buffers and the random streams are left
    as they are. The copies draw the same random numbers, and their dropout layers are off: other masks would drown the
    rounding. The loss of fp16 is scaled as a loop scales it: by 65536, by half as much while gradients overflow. Takes
    the memory of the copies and of all modules' outputs in fp32.

    Args:
        model: a module, prepared or plain, on the device to compute on.
        batch: a tensor; a dict, given as keywords; or a tuple, the first of which is the model's input.
        precision: a name or a `Precision`; default that of `loop`, else bf16.
        loss: called with a copy and the batch, on the device, returns a 0-d tensor. Default: the `loss` that the
            model's output carries, else the mean square of its output.
        reference: "fp32" or "float64".
        loop: a `Loop` in whose record the table is kept too, under "agreement"; `hotloop runs show` prints it.

    Raises:
        PrecisionError: the device does not compute in that precision; the model cannot be copied.
        SettingError: an unknown name.

    >>> found = agreement(nn.Linear(8, 2), torch.randn(4, 8), "fp32", reference="float64")
    >>> found.rows[0].worst < 1e-5
    True
    """
    if reference not in _REFERENCES:
        raise SettingError(
            f"reference={reference!r} is not known; valid values are: {', '.join(_REFERENCES)}"
        )
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    if precision is None:
        precision = "bf16" if loop is None else loop.precision
    wanted = find_precision(precision, device)
    batch = map_tensors(batch, lambda t: t.to(device))
    streams = rng_state(device)
    try:
        right = _Probe(_copied(model, _REFERENCES[reference]))
        with _matmul_precision("highest"):
            right_loss = right.run(_cast(batch, _REFERENCES[reference]), loss or _usual_loss)
        scale = _FIRST_SCALE if wanted.scaled else 1.0
        while True:
            set_rng_state(streams, device)
            found = _Probe(_in_precision(_copied(model, torch.float32), wanted), right, scale)
            with _matmul_precision("high" if wanted.name == "tf32" else "highest"):
                found_loss = found.run(batch, loss or _usual_loss, autocast_context(device, wanted.autocast))
            if scale <= 1.0 or not found.overflows():
                break
            scale /= 2.0
    finally:
        set_rng_state(streams, device)
    rows = sorted(found.errors(), key=lambda row: -row.worst)
    table = Agreement(str(wanted), reference, found_loss, right_loss, rows)
    if loop is not None:
        loop._session.keep("agreement", table.to_dict())
    return table


class _Probe:
    """One run of a model, with what each module returned, or how far that is from another run's."""

    def __init__(self, model: nn.Module, right: _Probe | None = None, scale: float = 1.0) -> None:
        self.model = model
        self.right = right
        self.scale = scale
        self.values: dict[tuple[str, str], list[Tensor]] = {}
        # (module, what) -> summed squares of difference and of the right value
        self.sums: dict[tuple[str, str], list[Tensor]] = {}

    def run(self, batch: Any, loss: Callable[[nn.Module, Any], Tensor], context: Any = None) -> float:
        """Forward and backward; returns the loss."""
        for name, module in self.model.named_modules():
            module.register_forward_hook(self._hook(name))
        with torch.enable_grad():
            value = loss(self.model if context is None else _Wide(self.model, context), batch)
            if value.requires_grad:
                wide = value if value.dtype == torch.float64 else value.float()
                (wide if self.scale == 1.0 else wide * self.scale).backward()
        for name, module in self.model.named_modules():
            for p in module._parameters.values():
                if p is not None and p.grad is not None:
                    self._take((name, "weights"), p.grad)
        return float(value.detach())

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                if tensor.is_floating_point():
                    self._take((name, "output"), tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self._take((name, "gradient"), grad))

        return hook

    def _take(self, key: tuple[str, str], tensor: Tensor) -> None:
        if self.right is None:
            # what comes later may write into the tensor itself
            self.values.setdefault(key, []).append(tensor.detach().clone())
            return
        sums = self.sums.setdefault(key, [])
        known = self.right.values.get(key, [])
        number = len(sums)
        if number >= len(known) or known[number].shape != tensor.shape:
            raise PrecisionError(
                f"agreement: module {key[0]!r} was not called alike in both runs, so there is nothing to compare"
            )
        right = known[number]
        mine = tensor.detach().to(right.dtype)
        if key[1] != "output" and self.scale != 1.0:
            mine = mine / self.scale
        difference = mine - right
        sums.append(torch.stack([difference.double().square().sum(), right.double().square().sum()]))

    def overflows(self) -> bool:
        """Whether a gradient is not finite though all outputs are: a smaller scale may help."""
        finite = {True: True, False: True}
        for (_, what), sums in self.sums.items():
            finite[what == "output"] &= bool(torch.stack(sums).isfinite().all())
        return finite[True] and not finite[False]

    def errors(self) -> Iterator[ModuleError]:
        """Every module's errors."""
        for name, module in self.model.named_modules():
            found = [self._error(name, what) for what in ("output", "gradient", "weights")]
            if any(e is not None for e in found):
                yield ModuleError(name, type(module).__name__, *found)

    def _error(self, name: str, what: str) -> float | None:
        sums = self.sums.get((name, what))
        if not sums:
            return None
        off, whole = torch.stack(sums).sum(0).tolist()
        if whole == 0.0:
            return 0.0 if off == 0.0 else math.inf
        return math.sqrt(off / whole) if off >= 0.0 else math.nan


class _Wide(nn.Module):
    """A model as a prepared one is called: under autocast, 16-bit results come back in fp32."""

    def __init__(self, model: nn.Module, context: Any) -> None:
        super().__init__()
        self.model = model
        self.context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in fp32."""
        with self.context:
            output = self.model(*args, **kwargs)
        return outputs_to_float32(output)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise PrecisionError(
            f"agreement computes on copies of the model, and this one cannot be copied: {error}"
        ) from error
    copied.to(dtype)
    for module in copied.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    for p in copied.parameters():
        p.grad = None
    return copied


def _in_precision(model: nn.Module, precision: Precision) -> nn.Module:
    if precision.name == "fp8":
        from hotloop.precision.float8_layers import install_float8

        install_float8(model, precision)
    if precision.stores_16_bits:
        from hotloop.precision.weights import store_in_bf16

        store_in_bf16(model, masters=False)
    return model


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _usual_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch[0] if isinstance(batch, tuple | list) else batch)
    carried = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(carried, Tensor):
        return carried
    squares = [t.square().mean() for t in tensors_of(output) if t.is_floating_point()]
    if not squares:
        raise PrecisionError("agreement: the model returns no floating-point tensor; give it a loss=")
    return torch.stack(squares).sum()


@contextmanager
def _matmul_precision(wanted: str) -> Iterator[None]:
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(wanted)
    torch.backends.cudnn.allow_tf32 = wanted == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn
