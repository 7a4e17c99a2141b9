"""Number formats by name, their options, and whether a device has them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from hotloop.errors import PrecisionError, SettingError
from hotloop.hardware.precisions import supported_precisions
from hotloop.settings import SETTINGS

__all__ = ["Precision", "find_precision"]

_AUTOCAST = {
    "bf16": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
# What a name needs of the device, where that has another name.
_UNITS = {"bf16-true": "bf16"}
_BLACKWELL = {
    "fp4": "4-bit matrix units",
    "mxfp8": "matrix units that scale blocks of 32 numbers",
    "nvfp4": "4-bit matrix units that scale blocks of 16 numbers",
}


@dataclass(frozen=True)
class Precision:
    """How a model computes: a name, and options where it has some.

    Attributes:
        name: fp32, tf32, bf16, bf16-true, fp16, fp8 or auto, or what peers call them.
        weights: "fp32" or "bf16", how parameters are stored; bf16 and fp8 only. `Precision("bf16", weights="bf16")` is
            "bf16-true".
        master: with 16-bit weights, "fp32" (default): the optimizer keeps and updates copies in fp32, of which the
            parameters are roundings; "none": it updates the 16-bit parameters themselves.
        layers: which Linear layers compute in fp8: "measured" (default: those of a size that was measured to gain,
            without the model's last), "all" that fit, or patterns of module names ("blocks.*.mlp.*").
        scaling: fp8: one factor per tensor ("tensorwise", default) or per row ("rowwise").
        gradients: fp8: the format of output gradients, "e5m2" (default: range) or "e4m3" (one more digit).
        emulated: fp8 on any device, slowly: numbers are rounded to fp8 and multiplied in fp32, to try out its errors.
        reason: why "auto" chose this.

    Raises:
        SettingError: an unknown name, or an option that the name does not have.

    >>> Precision("bf16", weights="bf16") == Precision("bf16-true", master="fp32")
    True
    """

    name: str = "fp32"
    weights: str | None = None
    master: str | None = None
    layers: str | tuple[str, ...] | None = None
    scaling: str | None = None
    gradients: str | None = None
    emulated: bool = False
    reason: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        name = SETTINGS["precision"].check(self.name)
        weights = self.weights
        if name in ("bf16", "bf16-true"):
            weights = weights or ("bf16" if name == "bf16-true" else "fp32")
            if name == "bf16-true" and weights == "fp32":
                raise SettingError(
                    'precision "bf16-true" stores bf16 weights; with weights="fp32" it is "bf16"'
                )
            name = "bf16-true" if weights == "bf16" else "bf16"
        elif name == "fp8":
            weights = weights or "fp32"
        self._check(name, "weights", weights, ("fp32", "bf16"), known=name in ("bf16", "bf16-true", "fp8"))
        master = self.master or ("fp32" if weights == "bf16" else None)
        self._check(name, "master", master, ("fp32", "none"), known=weights == "bf16")
        layers: str | tuple[str, ...] | None = self.layers
        if layers is not None and layers not in ("measured", "all"):
            layers = (layers,) if isinstance(layers, str) else tuple(layers)
            if not layers or not all(isinstance(item, str) for item in layers):
                raise SettingError(f"layers={self.layers!r} is neither a name nor patterns of module names")
        options: dict[str, Any] = {"layers": layers, "scaling": self.scaling, "gradients": self.gradients}
        if name == "fp8":
            defaults = {"layers": "measured", "scaling": "tensorwise", "gradients": "e5m2"}
            options = {key: value or defaults[key] for key, value in options.items()}
        elif self.emulated or any(options.values()):
            raise SettingError(
                f'layers, scaling, gradients and emulated are options of "fp8", not of {name!r}'
            )
        self._check(name, "scaling", options["scaling"], ("tensorwise", "rowwise"), known=True)
        self._check(name, "gradients", options["gradients"], ("e5m2", "e4m3"), known=True)
        for key, value in {"name": name, "weights": weights, "master": master, **options}.items():
            object.__setattr__(self, key, value)

    @staticmethod
    def _check(name: str, option: str, value: Any, values: tuple[str, ...], *, known: bool) -> None:
        if value is not None and not known:
            raise SettingError(f"precision {name!r} has no option {option}={value!r}")
        if value is not None and value not in values:
            raise SettingError(f"{option}={value!r} is not known; valid values are: {', '.join(values)}")

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype for `torch.autocast`; None to compute as stored."""
        return _AUTOCAST.get(self.name)

    @property
    def scaled(self) -> bool:
        """The loss is scaled up before the backward pass, since small fp16 gradients would vanish.

        Micikevicius et al. (2018), "Mixed Precision Training".
        """
        return self.name == "fp16"

    @property
    def stores_16_bits(self) -> bool:
        """Parameters become bf16."""
        return self.weights == "bf16"

    def options(self) -> dict[str, Any]:
        """Name and the options that apply, for a record."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in found.items() if v not in (None, "", False)
        }

    def __str__(self) -> str:
        rest = [
            f"{key}={'|'.join(value) if isinstance(value, list) else value}"
            for key, value in self.options().items()
            if key not in ("name", "reason") and not (key == "weights" and value == "fp32")
        ]
        return f"{self.name} ({', '.join(rest)})" if rest else self.name


def find_precision(wanted: str | Precision, device: torch.device) -> Precision:
    """The format wanted, if `device` computes in it; "auto" becomes the one chosen for it, with the reason.

    "tf32" lets float32 matrix products round their inputs to 19 bits; it is a process-wide switch of torch.

    Raises:
        PrecisionError: the device cannot; names the formats that it can.
        SettingError: an unknown name.
    """
    precision = wanted if isinstance(wanted, Precision) else Precision(wanted)
    if precision.name == "auto":
        from hotloop.precision.choice import choose_precision

        name, reason = choose_precision(device)
        precision = replace(Precision(name), reason=reason)
    supported = supported_precisions(device)
    have = f"available on {device}: {', '.join(sorted(supported))}"
    if precision.name in _BLACKWELL:
        raise PrecisionError(
            f"precision={precision.name!r} needs {_BLACKWELL[precision.name]}, which NVIDIA Blackwell has (compute "
            f"capability 10.0 and up: B200, GB200); {_silicon(device)}. hotloop computes in it nowhere yet; {have}"
        )
    if precision.emulated or _UNITS.get(precision.name, precision.name) in supported:
        return precision
    more = ""
    if precision.name == "fp8":
        more = (
            " (fp8 matrix units: NVIDIA Ada, Hopper and later, compute capability 8.9 and up; to try out its errors "
            'anywhere, Precision("fp8", layers="all", emulated=True))'
        )
    raise PrecisionError(f"precision={precision.name!r} is not available on {device}{more}; {have}")


def _silicon(device: torch.device) -> str:
    """What `device` is, for the refusal of a format."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"this is {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"this is {torch.cuda.get_device_name(device)} ({major}.{minor})"
