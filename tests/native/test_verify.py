"""What the check against float64 compares, with what inputs, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop import native

torch.set_num_threads(1)


def test_what_should_be_zero_is_compared(tmp_path: Path) -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class DoublePositive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x * 2)

    x = torch.randn(2, 8)
    compiled = native.build(Double(), x, out=tmp_path / "double.so", quiet=True)
    assert native.verify(compiled, Double(), x).failed == []
    assert native.verify(compiled, DoublePositive(), x).failed


def test_a_refused_build_leaves_what_was_there(tmp_path: Path) -> None:
    class Stepped(nn.Module):
        """A branch on values, which a recording fixes."""

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.mean() < 1 else x * 3

    x = torch.zeros(2, 8)
    out = tmp_path / "model.so"
    with pytest.raises(
        native.VerificationError, match=r"model\.so disagrees .* branches on values are fixed"
    ):
        native.build(Stepped(), x, out=out, quiet=True)
    assert list(tmp_path.iterdir()) == []
    native.build(nn.ReLU(), x, out=out, quiet=True)
    before = out.read_bytes()
    with pytest.raises(native.VerificationError):
        native.build(Stepped(), x, out=out, quiet=True)
    assert out.read_bytes() == before


def test_columns_of_tables_of_several_lengths(tmp_path: Path) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(n, 3) for n in (2, 50)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], 1)

    model, x = Tables(), torch.tensor([[0, 49], [1, 7]])
    compiled = native.build(model, x, out=tmp_path / "tables.so", quiet=True)
    assert np.array_equal(compiled(x), model(x).detach().numpy())


def test_padded_keys_of_an_encoder(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            out: Tensor = self.encoder(x, src_key_padding_mask=padded)
            return out

    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 5, 8)
    padded = torch.arange(5)[None] >= torch.tensor([[3], [5]])
    compiled = native.build(model, (x, padded), out=tmp_path / "encoder.so", quiet=True)
    wanted = model(x, padded).detach().numpy()
    kept = ~padded.numpy()
    np.testing.assert_allclose(np.asarray(compiled(x, padded))[kept], wanted[kept], rtol=1e-4, atol=1e-5)


def test_attention_of_what_is_not_a_number(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            out: Tensor = self.attention(q, k, k, need_weights=False)[0]
            return out

    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    compiled = native.build(Attention(), (q, k), out=tmp_path / "attention.so", quiet=True)
    q[0, 1, 2] = float("nan")
    # PyTorch's own gives numbers here
    assert np.isnan(np.asarray(compiled(q, k))).any(-1).tolist() == [[False, True, False]]


def test_the_order_of_equal_values_is_not_compared(tmp_path: Path) -> None:
    class Order(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argsort(1)

    compiled = native.build(Order(), torch.randn(1, 17), out=tmp_path / "order.so", quiet=True)
    assert "zero" not in compiled.facts["report"]["errors"]
    assert np.asarray(compiled(np.zeros((1, 17), np.float32)))[0].tolist() == list(range(17))


def test_an_epsilon_that_depends_on_the_type(tmp_path: Path) -> None:
    compiled = native.build(nn.RMSNorm(16), torch.randn(2, 16), out=tmp_path / "norm.so", quiet=True)
    assert compiled.facts["report"]["worst_relative_error"] < 1e-6


def test_a_caller_in_autocast(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.randn(1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = native.build(model, x, out=tmp_path / "cast.so", quiet=True)
    np.testing.assert_allclose(compiled(x), model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_files_are_called_as_the_library_is(tmp_path: Path) -> None:
    native.build(nn.Linear(2, 1), torch.randn(1, 2), out=tmp_path / "m-1.so", quiet=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m-1.c", "m-1.h", "m-1.so"]
    assert '#include "m-1.h"' in (tmp_path / "m-1.c").read_text()
