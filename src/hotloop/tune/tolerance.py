"""What number formats may differ by in one step, where weights and data are the same.

Bounds, not expectations: several times what well-behaved models show, and well below what a mistake makes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tolerance", "tolerance_of"]


@dataclass(frozen=True)
class Tolerance:
    """Relative differences allowed against float32.

    Attributes:
        gradient: norm of the difference of the first gradients over the norm of the reference's.
        scale: of the projection of the one on the other from 1: rounding is not biased, a wrong factor is.
        loss: of the first loss. In step t of the first ten, t**2 times as much.
    """

    gradient: float
    scale: float
    loss: float


_BY_FORMAT = {
    "fp32": Tolerance(1e-3, 3e-4, 2e-5),
    "tf32": Tolerance(3e-2, 5e-3, 1e-3),
    "fp16": Tolerance(5e-2, 1e-2, 2e-3),
    "bf16": Tolerance(0.15, 3e-2, 1e-2),
    "bf16-true": Tolerance(0.25, 6e-2, 2e-2),
    "fp8": Tolerance(0.5, 0.15, 5e-2),
}


def tolerance_of(precision: str) -> Tolerance:
    """The tolerance of a format by its name; an unknown one gets that of fp8."""
    return _BY_FORMAT.get(precision, _BY_FORMAT["fp8"])
