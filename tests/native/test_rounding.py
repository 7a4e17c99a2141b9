"""What float32 may lose: nothing where results are copies, half a unit in the last place of what is cancelled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hotloop import native
from hotloop.native.rounding import rounding_errors
from hotloop.native.verify import make_reference


class Cancelling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1e8) - 1e8


class Copying(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.flip(0), x.clamp(-1, 1)]).transpose(0, 1)


def test_cancellation_loses_half_a_unit_of_what_is_cancelled() -> None:
    (errors,) = rounding_errors(make_reference(Cancelling(), torch.float64), [torch.randn(64, 64)])
    half_unit = 1e8 * 2.0**-24
    assert 0.5 * half_unit < errors.max() <= half_unit * 1.01


def test_copies_lose_nothing() -> None:
    (errors,) = rounding_errors(make_reference(Copying(), torch.float64), [torch.randn(8, 8)])
    assert errors.max() == 0


class Tied(nn.Module):
    """Keys that tie where they are largest: PyTorch happens to round equal rows equally, another order does not."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.head = nn.Linear(1, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.maximum(x, x.mean(1, keepdim=True))
        q, k, v = self.joint(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((torch.softmax(x, 1) * x).amax(1))


def test_a_lucky_run_of_pytorch_is_no_yardstick(tmp_path: Path) -> None:
    torch.manual_seed(0)
    compiled = native.build(
        Tied().eval(), torch.randn(2, 21, 1), out=tmp_path / "tied.so", streaming=True, quiet=True
    )
    assert compiled.facts["report"]["worst_relative_error"] < 1e-5
