"""Self-attention with its linear layer against torch's own, and found in graphs however it is written."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop.errors import KernelError
from hotloop.kernels import rewrite, self_attention, self_attention_eager


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_torchs_in_float64(causal, bias):
    torch.manual_seed(0)
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3 * 2 * 4, 12, dtype=torch.float64, requires_grad=True)
    b = torch.randn(24, dtype=torch.float64, requires_grad=True) if bias else None
    slope = torch.randn(2, 9, 2, 4, dtype=torch.float64)
    inputs = [v for v in (x, w, b) if v is not None]
    ours, exact = self_attention(x, w, b, 2, causal=causal), self_attention_eager(x, w, b, 2, causal=causal)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, slope), torch.autograd.grad(exact, inputs, slope)
    )


def test_misfits_are_named():
    with pytest.raises(KernelError, match="5 heads"):
        self_attention(torch.zeros(2, 9, 12), torch.zeros(24, 12), None, 5)


class Permuted(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def cut(self, x):
        B, T, C = x.shape
        return self.qkv(x).view(B, T, 3, 3, C // 3).permute(2, 0, 3, 1, 4)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.cut(x)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class Split(Permuted):
    def cut(self, x):
        B, T, C = x.shape
        return [part.view(B, T, 3, C // 3).transpose(1, 2) for part in self.qkv(x).split(C, dim=2)]


class KeysFirst(Split):
    def cut(self, x):
        q, k, v = super().cut(x)
        return k, q, v


class Dropping(Split):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5)


class Shared(Permuted):
    def forward(self, x):
        packed = self.qkv(x)
        q, k, v = packed.view(*x.shape[:2], 3, 3, -1).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).sum() + packed.sum()


def found_graph(model, x):
    kept = []

    def keep(graph_module, _):
        kept.append(graph_module)
        return graph_module

    torch.compile(model, backend=keep)(x)
    torch._dynamo.reset()
    return kept[0]


def run(graph_module, model, x):
    wanted = {n.replace(".", "_"): p for n, p in model.named_parameters()}
    given = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        name = node.name.replace("l_self_modules_", "").replace("_parameters_", "_").rstrip("_")
        given.append(wanted.get(name, x))
    (out,) = graph_module(*given)
    return [out, *torch.autograd.grad(out.float().square().mean(), [*wanted.values(), x])]


@pytest.mark.parametrize("kind", [Permuted, Split])
@pytest.mark.parametrize(("autocast", "bound"), [(False, 1e-5), (True, 3e-2)])
def test_attention_is_found_and_computes_the_same(kind, autocast, bound):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 7, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph_module = found_graph(model, x)
        before = run(graph_module, model, x)
        assert rewrite(graph_module, lambda _: True) == 1
        after = run(graph_module, model, x)
    assert not graph_module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    for a, b in zip(after, before, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("kind", [KeysFirst, Dropping, Shared])
def test_other_attention_is_left_alone(kind):
    graph_module = found_graph(kind(), torch.randn(2, 7, 12))
    assert rewrite(graph_module, lambda _: True) == 0
