"""Calls that have no C form of their own, as calls that have: torch's own decompositions, and some of ours.

Only what has no rule is taken apart, so that an LSTM or a convolution stays whole beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from hotloop.native.capture import Call, Captured, Ref, name_operation
from hotloop.native.faults import NoForm, UnsupportedOpError
from hotloop.native.functions import FUNCTIONS
from hotloop.native.ordering import ORDERS
from hotloop.native.picking import PICKS

__all__ = ["decompose"]

# A decomposition may hold calls that are taken apart again; deeper than this it goes round in a circle.
_DEEPEST = 4
Plain = Callable[..., Any]


def decompose(captured: Captured, known: Collection[str]) -> Captured:
    """`captured` with calls that are not in `known` taken apart where that leads to known ones.

    A call that cannot be taken apart stays, for the error that names it.
    """
    # decompositions bring constants of their own; the caller's stay as they are
    captured = replace(captured, constants=dict(captured.constants))
    taken: dict[str, list[Ref]] = {}
    calls: list[Call] = []

    def resolve(value: Any) -> Any:
        if isinstance(value, Ref):
            # a recording names one of several results "call#index", a program picks it by a call
            base, _, index = value.name.partition("#")
            return taken[base][int(index or 0)] if base in taken else value
        if isinstance(value, (list, tuple)):
            return type(value)(resolve(item) for item in value)
        return value

    for original in captured.calls:
        if original.op == "getitem" and original.args[0].name in taken:
            taken[original.name] = [taken[original.args[0].name][original.args[1]]]
            continue
        call = replace(
            original,
            args=tuple(resolve(arg) for arg in original.args),
            kwargs={key: resolve(value) for key, value in original.kwargs.items()},
        )
        expanded = _expand(call, captured, known, calls, 0)
        if expanded is None:
            calls.append(call)
        else:
            calls += expanded[0]
            taken[call.name] = expanded[1]
    return replace(captured, calls=calls, outputs=[resolve(output) for output in captured.outputs])


def _expand(
    call: Call, captured: Captured, known: Collection[str], before: list[Call], depth: int
) -> tuple[list[Call], list[Ref]] | None:
    """The calls that stand for `call`, and what its results are called; None where it stays."""
    stays = call.op == "getitem" or (call.op in known and not _is_beyond(call, captured))
    plain = None if stays else _find(call)
    if plain is None or depth == _DEEPEST:
        return None
    refs: list[Ref] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Ref):
            if value not in refs:
                refs.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)

    collect((call.args, list(call.kwargs.values())))

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip(refs, tensors, strict=True))

        def fill(value: Any) -> Any:
            if isinstance(value, Ref):
                return given[value]
            if isinstance(value, (list, tuple)):
                return type(value)(fill(item) for item in value)
            return value

        return plain(*fill(call.args), **{key: fill(value) for key, value in call.kwargs.items()})

    samples = [_sample(ref, captured, before) for ref in refs]
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            composite = _is_composite(call)
            # a composite operation would come back whole from before dispatch
            graph = make_fx(run, pre_dispatch=not composite)(*samples).graph
            if any(n.op == "call_function" and _is_write(n.target) for n in graph.nodes):
                graph = make_fx(functionalize(run, remove="mutations"))(*samples).graph
    except NoForm as reason:
        raise UnsupportedOpError(f"{call.origin}: {reason}") from None
    except Exception:
        # no decomposition for these arguments: the call is refused by its own name
        return None
    names: dict[str, Ref] = dict(
        zip((n.name for n in graph.nodes if n.op == "placeholder"), refs, strict=True)
    )
    inner: list[Call] = []
    results: list[Ref] = []
    several: dict[str, list[Ref]] = {}

    def refer(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return names[value.name]
        if isinstance(value, (list, tuple)):
            return [refer(item) for item in value]
        return value

    for node in graph.nodes:
        if node.op == "get_attr":
            captured.constants[f"{call.name}.{node.name}"] = getattr(graph.owning_module, str(node.target))
            names[node.name] = Ref(f"{call.name}.{node.name}")
        elif node.op == "call_function":
            if name_operation(node.target) == "getitem" and node.args[0].name in several:
                names[node.name] = several[node.args[0].name][node.args[1]]
                continue
            made = _read(node, f"{call.name}.{node.name}", call, refer)
            deeper = _expand(made, captured, known, [*before, *inner], depth + 1)
            if made.op == "getitem" and "#" in names[node.args[0].name].name:
                names[node.name] = Ref(f"{names[node.args[0].name].name[:-1]}{node.args[1]}")
            elif deeper is None:
                inner.append(made)
                names[node.name] = Ref(made.name)
            else:
                inner += deeper[0]
                several[node.name] = deeper[1]
                names[node.name] = deeper[1][0]
        elif node.op == "output":
            given = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            results = [refer(value) for value in given]
    return inner, results


def _read(node: torch.fx.Node, name: str, call: Call, refer: Callable[[Any], Any]) -> Call:
    value = node.meta.get("val")
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    return Call(
        name,
        name_operation(node.target),
        tuple(refer(arg) for arg in node.args),
        {key: refer(arg) for key, arg in node.kwargs.items()},
        [tuple(int(s) for s in v.shape) if isinstance(v, torch.Tensor) else () for v in tensors],
        [v.dtype if isinstance(v, torch.Tensor) else torch.float32 for v in tensors],
        replace(call.origin, operation=f"{call.origin.operation} ({name_operation(node.target)})"),
        node.target,
    )


def _sample(ref: Ref, captured: Captured, before: list[Call]) -> torch.Tensor:
    if ref.name in captured.constants:
        return captured.constants[ref.name]
    if ref.name in captured.input_shapes:
        return torch.zeros(captured.input_shapes[ref.name], dtype=captured.input_dtypes[ref.name])
    base, _, index = ref.name.partition("#")
    for call in reversed(before):
        if call.name == base:
            if call.op == "getitem":
                return _sample(Ref(f"{call.args[0].name}#{call.args[1]}"), captured, before)
            return torch.zeros(call.shapes[int(index or 0)], dtype=call.dtypes[int(index or 0)])
    raise KeyError(ref.name)


def _is_composite(call: Call) -> bool:
    return _find_ours(call) is None and call.target not in torch._decomp.decomposition_table


def _find_ours(call: Call) -> Plain | None:
    # operations in prims are the same under another roof
    return _OURS.get(call.op) or _OURS.get(call.op.removeprefix("prims."))


def _is_write(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def _is_beyond(call: Call, captured: Captured) -> bool:
    """Whether a call asks for more than its C form has."""
    if call.op in ("max.dim", "min.dim"):
        return True
    if call.op == "einsum":
        left, _, out = call.args[0].replace(" ", "").partition("->")
        operands = left.split(",")
        if len(operands) != 2 or any("." in o or len(set(o)) < len(o) for o in operands):
            return True
        # without "->" a label that one operand alone has stays
        return (
            "->" in call.args[0]
            and bool(set(operands[0]) ^ set(operands[1]))
            and not (set(operands[0]) ^ set(operands[1])) <= set(out)
        )
    if call.op == "index_select":
        return int(call.args[1]) != 0 and call.args[2].name not in captured.constants
    if call.op == "index.Tensor":
        given = [ref for ref in call.args[1] if ref is not None]
        one_known = len(given) == 1 and given[0].name in captured.constants
        return not one_known and (len(call.args[1]) != 1 or call.args[1][0] is None)
    if call.op in ("linalg_vector_norm", "norm.ScalarOpt_dim"):
        return (call.args[1] if len(call.args) > 1 else call.kwargs.get("ord", 2)) != 2
    return False


def _find(call: Call) -> Plain | None:
    if (ours := _find_ours(call)) is not None:
        return ours
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in torch._decomp.decomposition_table:
        found: Plain = torch._decomp.decomposition_table[target]
        return found
    return target.decompose if target._can_decompose() else None


def _conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> torch.Tensor:
    """A convolution with the flipped kernel over the input with zeros between (Dumoulin and Visin, 2016)."""
    rank = weight.ndim - 2

    def each(value: Any) -> list[int]:
        listed = list(value) if isinstance(value, (list, tuple)) else [value]
        return [int(v) for v in (listed * rank if len(listed) == 1 else listed)]

    strides, pads, extra, holes = each(stride), each(padding), each(output_padding), each(dilation)
    for d in range(rank):
        dim = d + 2
        if strides[d] > 1:
            length = x.shape[dim]
            shape = [*x.shape[:dim], length * strides[d], *x.shape[dim + 1 :]]
            x = F.pad(x.unsqueeze(dim + 1).transpose(dim + 1, -1), (0, strides[d] - 1)).transpose(dim + 1, -1)
            x = x.reshape(shape).narrow(dim, 0, (length - 1) * strides[d] + 1)
        reach = holes[d] * (weight.shape[dim] - 1) - pads[d]
        sides = [0, 0] * (x.ndim - 1 - dim) + [max(reach, 0), max(reach + extra[d], 0)]
        x = F.pad(x, sides)
        cut = [max(-reach, 0), max(-reach - extra[d], 0)]
        x = x.narrow(dim, cut[0], x.shape[dim] - cut[0] - cut[1])
    flipped = weight.flip(list(range(2, weight.ndim)))
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    kernel = flipped.reshape(groups, inputs, outputs, *weight.shape[2:]).transpose(1, 2)
    kernel = kernel.reshape(groups * outputs, inputs, *weight.shape[2:])
    convolve: Plain = {1: F.conv1d, 2: F.conv2d}[rank]
    result: torch.Tensor = convolve(x, kernel, bias, dilation=holes, groups=groups)
    return result


def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    mode = rest[1] if len(rest) > 1 else options.get("mode", 0)
    if (rest[3] if len(rest) > 3 else options.get("per_sample_weights")) is not None:
        raise NotImplementedError("weights of samples")
    bags = offsets.shape[0]
    if indices.shape[0] % bags or mode not in (0, 1):
        raise NotImplementedError("bags of several lengths")
    rows = torch.embedding(weight, indices).unflatten(0, (bags, indices.shape[0] // bags))
    result = rows.sum(1) if mode == 0 else rows.mean(1)
    return result, offsets, offsets, offsets


def _real(x: torch.Tensor) -> torch.Tensor:
    # of a complex number; there are none here
    return torch.ops.aten.alias(x)


_OURS: dict[str, Plain] = {
    **FUNCTIONS,
    **ORDERS,
    **PICKS,
    "real": _real,
    "embedding_bag.padding_idx": _embedding_bag,
    "conv_transpose1d": _conv_transpose,
    "conv_transpose2d.input": _conv_transpose,
}
