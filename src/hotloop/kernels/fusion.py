"""Puts kernels of ours into a model that is being compiled: the graph that torch.compile found, rewritten.

Layer norms take the residual sum before them along, and the bias of the linear layer that ends the branch; exact
GELUs take the bias of the linear layer before them; weights that autocast converts are converted together; layers of
a number of outputs that matrix units do not like are padded; products of linear layers' way back run beside each other.
What the graph computes stays the same up to rounding: a bias is added in float32 to the 16-bit product, not inside it.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

# for the operators that they make
from hotloop.kernels import attention, casting, gelu, linear, normalisation  # noqa: F401
from hotloop.kernels.matching import find_packed_attention

__all__ = ["compile_fused", "rewrite"]

_LINEAR: tuple[Any, ...] = (F.linear, torch._C._nn.linear)
_GELU: tuple[Any, ...] = (F.gelu, torch._C._nn.gelu)
# not `+=`: what it writes into may be read under its old name
_ADD: tuple[Any, ...] = (operator.add, torch.add)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST_NORM = 8192


def compile_fused(graph_module: fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend for `torch.compile`: `rewrite`, then Inductor; the graph as it was where that fails, with a warning."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame
    from torch._inductor.compile_fx import compile_fx

    before = copy.deepcopy(graph_module.graph)
    with warnings.catch_warnings():
        # which precision matrix units use is the loop's to say, and has been said
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        try:
            rewrite(graph_module)
            compiled: Any = compile_fx(graph_module, inputs)
        except (RestartAnalysis, SkipFrame):
            # no failure: torch traces the model again, or leaves this part of it alone
            raise
        except Exception as failure:
            graph_module.graph = before
            graph_module.recompile()
            warnings.warn(
                f"hotloop's kernels are left out of a compiled model: {type(failure).__name__}: "
                f"{str(failure).splitlines()[0] if str(failure) else ''}",
                RuntimeWarning,
                stacklevel=2,
            )
            compiled = compile_fx(graph_module, inputs)
    return compiled


def rewrite(graph_module: fx.GraphModule, runs: Callable[[torch.device], bool] | None = None) -> int:
    """Replace what our kernels compute faster, in place; returns how many nodes were replaced.

    Args:
        graph_module: a graph of torch functions with example values, as `torch.compile` gives it to a backend.
        runs: on which devices to replace; None: where Triton runs.
    """
    if runs is None:
        from hotloop.kernels.language import runs_on

        runs = runs_on
    graph = graph_module.graph
    replaced = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not _suits(node, runs):
            continue
        if node.target is F.layer_norm:
            replaced += _replace_norm(graph, node)
        elif node.target in _GELU:
            replaced += _replace_gelu(graph, node)
        elif node.target is F.scaled_dot_product_attention:
            replaced += _replace_attention(graph, node)
    if replaced:
        graph.eliminate_dead_code()
    # last: what others look for is a plain linear layer
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _LINEAR and _suits(node, runs):
            replaced += _pad_linear(graph, node)
    if replaced:
        _spread_linears(graph)
        _cast_together(graph)
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return replaced


def _suits(node: fx.Node, runs: Callable[[torch.device], bool]) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATS and runs(value.device)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _replace_norm(graph: fx.Graph, node: fx.Node) -> bool:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, weight, shift = given["input"], given.get("weight"), given.get("bias")
    value = _value(x)
    shape = given["normalized_shape"]
    if (
        not isinstance(weight, fx.Node)
        or not isinstance(value, torch.Tensor)
        or len(shape) != 1
        or not isinstance(shape[0], int)
        or shape[0] > _WIDEST_NORM
        or value.dtype not in _FLOATS
    ):
        return False
    branch: Any = None
    bias: Any = None
    added = x
    if _is_sum(x) and all(p is None or p.op in ("placeholder", "get_attr") for p in (weight, shift)):
        residual, branch = _order(x)
        if branch is not None:
            x = residual
            bias = _take_bias(branch)
    with graph.inserting_after(added if branch is not None else node.prev):
        made = graph.call_function(
            torch.ops.hotloop.layer_norm.default,
            (x, branch, bias, weight, shift, given.get("eps", 1e-5), _leaving_dtype(node)),
        )
    with graph.inserting_after(made):
        out = graph.call_function(operator.getitem, (made, 1))
        out.meta = dict(node.meta)
        if branch is not None:
            total = graph.call_function(operator.getitem, (made, 0))
            total.meta = dict(added.meta)
            added.replace_all_uses_with(total)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return True


def _is_sum(node: Any) -> bool:
    """A sum of two tensors of its own shape, one of which has its type."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in _ADD:
        return False
    if node.kwargs or len(node.args) != 2:
        return False
    whole = _value(node)
    parts = [_value(a) for a in node.args]
    return isinstance(whole, torch.Tensor) and all(
        isinstance(p, torch.Tensor)
        and p.shape == whole.shape
        and p.dtype in _FLOATS
        and p.device == whole.device
        for p in parts
    )


def _order(node: fx.Node) -> tuple[Any, Any]:
    """(residual, branch) of a sum: the residual has the sum's type, the branch rather ends in a linear layer."""
    a, b = node.args
    kind = _value(node).dtype
    options = [(x, y) for x, y in ((a, b), (b, a)) if _value(x).dtype == kind]
    if not options:
        return None, None
    return next(((x, y) for x, y in options if _has_own_bias(y)), options[0])


def _has_own_bias(node: Any) -> bool:
    """A linear layer with a bias whose result goes nowhere else."""
    if not isinstance(node, fx.Node) or node.target not in _LINEAR or len(node.users) != 1:
        return False
    return len(node.args) == 3 and isinstance(node.args[2], fx.Node) and not node.kwargs


def _take_bias(node: Any) -> Any:
    """Take the bias from a linear layer, if it has one of its own."""
    if not _has_own_bias(node):
        return None
    x, weight, bias = node.args
    node.args = (x, weight, None)
    return bias


def _leaving_dtype(node: fx.Node) -> torch.dtype:
    """Autocast's type where every user would convert to it anyway, else that of the graph."""
    value: torch.Tensor = _value(node)
    kind = value.device.type
    if torch.is_autocast_enabled(kind) and node.users and all(u.target in _LINEAR for u in node.users):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def _replace_gelu(graph: fx.Graph, node: fx.Node) -> bool:
    if len(node.args) != 1 or node.kwargs.get("approximate", "none") != "none":
        return False
    z = node.args[0]
    value = _value(z)
    if not isinstance(value, torch.Tensor) or value.dtype != _value(node).dtype:
        return False
    bias = _take_bias(z)
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.hotloop.bias_gelu.default, (z, bias))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _replace_attention(graph: fx.Graph, node: fx.Node) -> bool:
    found = find_packed_attention(node)
    if found is None or found.length > attention.LONGEST:
        return False
    value: torch.Tensor = _value(node)
    before: Any = found.linear
    if len(before.args) != 3 or before.kwargs:
        return False
    x, weight, bias = before.args
    if any(p is not None and not isinstance(p, fx.Node) for p in (x, weight, bias)):
        return False
    with graph.inserting_before(node):
        # what autocast does before a linear layer
        x, weight, bias = (_as_type(graph, p, value.dtype) for p in (x, weight, bias))
        scale = found.depth**-0.5 if found.scale is None else found.scale
        made = graph.call_function(
            torch.ops.hotloop.self_attention.default, (x, weight, bias, found.heads, found.causal, scale)
        )
        rows = graph.call_function(operator.getitem, (made, 0))
        out = graph.call_method("transpose", (rows, 1, 2))
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return True


def _as_type(graph: fx.Graph, node: Any, dtype: torch.dtype) -> Any:
    if node is None or (value := _value(node)) is None or value.dtype == dtype:
        # without an example it is one of ours, and has the type already
        return node
    return graph.call_method("to", (node, dtype))


def _pad_linear(graph: fx.Graph, node: fx.Node) -> bool:
    """Matrix units take rows of 16 bytes at a time; where a layer's outputs end in between, products run several times
    slower. Zeros are added to its weight, and what they give is cut off."""
    value: torch.Tensor = _value(node)
    if value.dtype == torch.float32 or len(node.args) != 3 or node.kwargs:
        return False
    x, weight, bias = node.args
    width = value.shape[-1]
    if not isinstance(width, int) or not width % 8 or width < 16:
        return False
    more = -width % 8
    with graph.inserting_before(node):
        weight = graph.call_function(F.pad, (weight, (0, 0, 0, more)))
        bias = None if bias is None else graph.call_function(F.pad, (bias, (0, more)))
        padded = graph.call_function(torch._C._nn.linear, (x, weight, bias))
        cut = graph.call_method("narrow", (padded, -1, 0, width))
        # as the layer leaves it: what follows may count on dense memory
        out = graph.call_method("contiguous", (cut,))
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return True


def _spread_linears(graph: fx.Graph) -> None:
    """Linear layers in 16 bits become those whose products on the way back run beside each other."""
    for node in graph.nodes:
        value = _value(node)
        if node.op != "call_function" or node.target not in _LINEAR or len(node.args) != 3 or node.kwargs:
            continue
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            with graph.inserting_before(node):
                node.args = tuple(_as_type(graph, p, value.dtype) for p in node.args)
            node.target = torch.ops.hotloop.linear.default


def _cast_together(graph: fx.Graph) -> None:
    """Convert float32 weights that autocast would convert one by one in one call at the beginning."""
    places: list[tuple[fx.Node, int]] = []
    for node in graph.nodes:
        value = _value(node)
        if node.op == "call_function" and node.target in _LINEAR and isinstance(value, torch.Tensor):
            kind = value.device.type
            if torch.is_autocast_enabled(kind) and value.dtype == torch.get_autocast_dtype(kind):
                places += [(node, i) for i in (1, 2) if i < len(node.args) and _is_wide(node.args[i])]
        elif node.op == "call_function" and node.target in (
            torch.ops.hotloop.self_attention.default,
            torch.ops.hotloop.linear.default,
        ):
            places += [(node, i) for i in (1, 2) if _is_conversion(node.args[i])]
    sources: dict[Any, list[tuple[fx.Node, int]]] = {}
    for node, i in places:
        given: Any = node.args[i]
        source = given.args[0] if _is_conversion(given) else given
        sources.setdefault(source, []).append((node, i))
    if len(sources) < 2:
        return
    dtype = torch.get_autocast_dtype(_value(next(iter(sources))).device.type)
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        made = graph.call_function(torch.ops.hotloop.cast_together.default, (list(sources), dtype))
        for number, users in enumerate(sources.values()):
            one = graph.call_function(operator.getitem, (made, number))
            for node, i in users:
                node.update_arg(i, one)


def _is_wide(node: Any) -> bool:
    """A parameter or input in float32."""
    value = _value(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and node.op in ("placeholder", "get_attr")
    )


def _is_conversion(node: Any) -> bool:
    """What `_as_type` put there."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_method"
        and node.target == "to"
        and _is_wide(node.args[0])
    )
