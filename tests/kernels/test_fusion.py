"""Rewritten graphs compute what they did, values and gradients, with nothing left to replace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop.kernels import compile_fused, fusion, rewrite


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.out(torch.sin(self.norm1(x)))
        return self.down(F.gelu(self.up(self.norm2(x)))) + x


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + F.gelu(x[..., :7], approximate="tanh")


def found_graph(model, *inputs):
    """The graph that torch.compile gives to a backend."""
    kept = []

    def keep(graph_module, _):
        kept.append(graph_module)
        return graph_module

    torch.compile(model, backend=keep)(*inputs)
    torch._dynamo.reset()
    return kept[0]


def anywhere(_):
    return True


def run(graph_module, model, x):
    wanted = dict(model.named_parameters())
    given = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        name = node.name.replace("l_self_modules_", "").replace("_modules_", "_").replace("_parameters_", "_")
        match = [p for n, p in wanted.items() if n.replace(".", "_") == name.rstrip("_")]
        given.append(match[0] if match else x)
    (out,) = graph_module(*given)
    grads = torch.autograd.grad(out.float().square().mean(), [*wanted.values(), x])
    return out.detach(), grads


@pytest.mark.parametrize(("autocast", "bound"), [(False, 2e-6), (True, 3e-2)])
def test_rewritten_graph_computes_the_same(autocast, bound):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 5, 24, requires_grad=True)
    for p in model.parameters():
        nn.init.normal_(p, 0.3, 0.3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph_module = found_graph(model, x)
        before = run(graph_module, model, x)
        # five layer norms, two exact GELUs
        assert rewrite(graph_module, anywhere) == 7
        after = run(graph_module, model, x)
        assert rewrite(graph_module, anywhere) == 0
    for a, b in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= bound * b.norm()


def test_what_stands_around_is_taken_along():
    model, x = Net(), torch.randn(3, 5, 24)
    graph_module = found_graph(model, x)
    rewrite(graph_module, anywhere)
    nodes = list(graph_module.graph.nodes)
    norms = [n for n in nodes if "layer_norm" in str(n.target) and "getitem" not in n.name]
    # the first norm has no sum before it
    assert [n.args[1] is not None for n in norms] == [False, True, True, True, True]
    assert all(n.args[2] is not None for n in norms[1:])
    linears = [n for n in nodes if "linear" in str(n.target)]
    # only the head keeps its bias to itself: the others' went into norms and GELUs
    assert [n.args[2] is not None for n in linears] == [False] * 6 + [True]


def test_weights_are_converted_together_under_autocast():
    model, x = Net(), torch.randn(3, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        graph_module = found_graph(model, x)
        rewrite(graph_module, anywhere)
    (cast,) = (n for n in graph_module.graph.nodes if "cast_together" in str(n.target))
    # seven linear layers' weights, and the one bias that no norm or GELU took
    assert len(cast.args[0]) == 8
    plain = found_graph(model, x)
    rewrite(plain, anywhere)
    assert not any("cast_together" in str(n.target) for n in plain.graph.nodes)


def test_type_of_a_norm_under_autocast_is_that_of_its_users():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.a(x)).float().sum() + self.b(x).square().sum()

    model, x = Two(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        graph_module = found_graph(model, x)
        rewrite(graph_module, anywhere)
    norms = [n for n in graph_module.graph.nodes if "hotloop.layer_norm" in str(n.target)]
    assert [n.args[-1] for n in norms] == [torch.bfloat16, torch.float32]


def test_nothing_is_replaced_where_kernels_do_not_run():
    model, x = Net(), torch.randn(3, 5, 24)
    graph_module = found_graph(model, x)
    assert rewrite(graph_module, lambda _: False) == 0
    assert rewrite(found_graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)), anywhere) == 0


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_that_matrix_units_do_not_like_are_padded(bias):
    class Head(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.head = nn.Linear(8, outputs, bias=bias)

        def forward(self, x):
            return self.head(x)

    torch.manual_seed(0)
    model, x = Head(65), torch.randn(3, 5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        graph_module = found_graph(model, x)
        before = run(graph_module, model, x)
        assert rewrite(graph_module, anywhere) == 1
        after = run(graph_module, model, x)
    torch.testing.assert_close(after, before)
    assert after[0].is_contiguous()
    assert rewrite(found_graph(model, x), anywhere) == 0
    assert rewrite(found_graph(Head(64).bfloat16(), x.detach().bfloat16()), anywhere) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_rewriting_that_fails_leaves_the_graph_as_it_was(monkeypatch):
    from torch._inductor import compile_fx

    seen = []
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda graph_module, _: seen.append(str(graph_module.graph))
    )

    def broken(graph_module):
        rewrite(graph_module, anywhere)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fusion, "rewrite", broken)
    graph_module = found_graph(Net(), torch.randn(3, 5, 24))
    before = str(graph_module.graph)
    with pytest.warns(RuntimeWarning, match="RuntimeError: no such kernel"):
        compile_fused(graph_module, [])
    assert seen == [before]


@pytest.mark.parametrize(("autocast", "bound"), [(False, 2e-2), (True, 3e-2)])
def test_linear_layers_run_their_products_beside_each_other(autocast, bound):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 5, 24, requires_grad=True)
    if not autocast:
        model, x = model.bfloat16(), x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph_module = found_graph(model, x)
        before = run(graph_module, model, x)
        rewrite(graph_module, anywhere)
        after = run(graph_module, model, x)
    assert sum("hotloop.linear" in str(n.target) for n in graph_module.graph.nodes) == 7
    for a, b in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).float().norm() <= bound * b.float().norm()


def test_sums_in_place_are_left_alone():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            x = x * 2
            before = x
            x += self.out(x)
            return self.norm(x) + before

    torch.manual_seed(0)
    model, x = Adds(), torch.randn(3, 8)
    graph_module = found_graph(model, x)
    assert rewrite(graph_module, anywhere) == 1
    (norm,) = (
        n for n in graph_module.graph.nodes if "layer_norm" in str(n.target) and "getitem" not in n.name
    )
    assert norm.args[1] is None


def test_a_tracer_that_starts_again_is_no_failure(monkeypatch):
    """Dynamo ends an attempt by an exception of its own, and traces the model anew."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._inductor import compile_fx as inductor

    from hotloop.kernels.fusion import compile_fused

    def start_again(graph_module, inputs):
        raise TensorifyScalarRestartAnalysis

    monkeypatch.setattr(inductor, "compile_fx", start_again)
    graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(TensorifyScalarRestartAnalysis):
        compile_fused(graph_module, [torch.randn(1, 2)])
