"""Finds self-attention in a graph, however its author cut q, k and v out of one linear layer: by where they lie."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

__all__ = ["PackedAttention", "find_packed_attention"]

_LINEAR: tuple[Any, ...] = (F.linear, torch._C._nn.linear)
_VIEWS = {"view", "reshape", "permute", "transpose", "split", "chunk", "unbind", "unflatten", "contiguous"}
_VIEW_FUNCTIONS: tuple[Any, ...] = (
    operator.getitem,
    torch.split,
    torch.chunk,
    torch.unbind,
    torch.permute,
    torch.transpose,
    torch.reshape,
    torch.unflatten,
)


@dataclass
class PackedAttention:
    """Attention of the three thirds of one linear layer's result.

    Attributes:
        linear: the node of the linear layer.
        heads, depth: of the attention. length: of the sequences.
        causal, scale: its settings.
    """

    linear: fx.Node
    heads: int
    depth: int
    length: int
    causal: bool
    scale: float | None


def find_packed_attention(node: fx.Node) -> PackedAttention | None:
    """What is packed before `node`, a `F.scaled_dot_product_attention`; None if it is anything else.

    q, k and v must be views of one linear layer's result [batch, length, 3 * heads * depth], in this order, and that
    result must go nowhere else. No mask, no dropout, as many keys as queries.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("attn_mask") is not None or given.get("dropout_p", 0.0) or given.get("enable_gqa"):
        return None
    parts = [given.get(name) for name in names[:3]]
    found = [_origin(part) for part in parts]
    linear = found[0]
    if linear is None or any(other is not linear for other in found):
        return None
    packed, values = _value(linear), [_value(part) for part in parts]
    if packed is None or packed.dim() != 3 or any(v is None or v.dim() != 4 for v in values):
        return None
    batch, heads, length, depth = values[0].shape
    row = heads * depth
    if any(not isinstance(n, int) for n in (batch, heads, length, depth)):
        return None
    if tuple(packed.shape) != (batch, length, 3 * row) or not packed.is_contiguous():
        return None
    for i, value in enumerate(values):
        where = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
        if where != ((batch, heads, length, depth), (length * 3 * row, depth, 3 * row, 1), i * row):
            return None
    if not _leads_only_to(linear, node):
        return None
    scale = given.get("scale")
    return PackedAttention(linear, heads, depth, length, bool(given.get("is_causal", False)), scale)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWS
    return node.op == "call_function" and node.target in _VIEW_FUNCTIONS


def _origin(node: Any) -> fx.Node | None:
    """The linear layer that `node` is a view of."""
    while isinstance(node, fx.Node):
        if node.op == "call_function" and node.target in _LINEAR:
            return node
        if not _is_view(node) or not node.args:
            return None
        node = node.args[0]
    return None


def _leads_only_to(start: fx.Node, end: fx.Node) -> bool:
    waiting: list[fx.Node] = list(start.users)
    while waiting:
        node = waiting.pop()
        if node is end:
            continue
        # a size that is asked for is no number of the tensor
        if not _is_view(node) and not (node.op == "call_method" and node.target in ("size", "dim")):
            return False
        if _is_view(node):
            waiting.extend(node.users)
    return True
