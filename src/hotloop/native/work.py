"""What a graph has to do at the least: multiply-adds and bytes of weights read, and how long a core needs for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.native.graph import Loop, MatMul, Node, Taps
from hotloop.native.timing import Core

__all__ = ["Floor", "Work", "count_multiply_adds", "count_weight_bytes", "count_work", "predict_floor"]

# A VNNI instruction multiplies and adds 64 pairs of bytes where a float one does 16.
_INT8_RATE = 4.0


@dataclass(frozen=True)
class Work:
    """Of one call: multiply-adds in float32 and in int8, and bytes of weights read, at every step of a loop anew."""

    multiply_adds: int = 0
    int8_multiply_adds: int = 0
    weight_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.multiply_adds + other.multiply_adds,
            self.int8_multiply_adds + other.int8_multiply_adds,
            self.weight_bytes + other.weight_bytes,
        )


@dataclass(frozen=True)
class Floor:
    """Nanoseconds below which one core cannot compute `work`: the larger of the arithmetic and of reading the weights
    once from the cache level that holds the whole model. The other levels' figures stand beside it."""

    what: str
    work: Work
    arithmetic_ns: float
    l1_ns: float
    l2_ns: float
    l3_ns: float
    level: str

    @property
    def ns(self) -> float:
        """The floor."""
        read = {"L1": self.l1_ns, "L2": self.l2_ns, "L3": self.l3_ns}[self.level]
        return max(self.arithmetic_ns, read)


def count_weight_bytes(node: Node) -> int:
    """Bytes of weights that a node reads once."""
    if isinstance(node, Taps):
        return node.weight.size * (1 if node.scale is not None else 4)
    return 0


def count_multiply_adds(node: Node) -> int:
    """Multiply-adds of a node; 0 for what is no contraction."""
    if isinstance(node, Taps):
        return int(node.rows.shape[0] * node.weight.size)
    if isinstance(node, MatMul):
        return int(node.out.count * node.a.shape[-1])
    return 0


def count_work(nodes: Sequence[Node]) -> Work:
    """The sum over nodes, a loop's body as often as it runs."""
    total = Work()
    for node in nodes:
        if isinstance(node, Loop):
            body = count_work(node.body)
            n = node.count
            total += Work(body.multiply_adds * n, body.int8_multiply_adds * n, body.weight_bytes * n)
            continue
        found, int8 = count_multiply_adds(node), isinstance(node, Taps) and node.scale is not None
        total += Work(0 if int8 else found, found if int8 else 0, count_weight_bytes(node))
    return total


def predict_floor(what: str, work: Mapping[str, Any], held_bytes: int, core: Core) -> Floor:
    """The floor of `work` (a Work's fields) for a model whose weights and memory are `held_bytes` on this core."""
    done = Work(**work)
    arithmetic = (done.multiply_adds + done.int8_multiply_adds / _INT8_RATE) / core.multiply_rate
    level = "L1" if held_bytes <= core.l1_bytes else "L2" if held_bytes <= core.l2_bytes else "L3"
    l1, l2, l3 = (done.weight_bytes / rate * 1e9 for rate in (core.l1_rate, core.l2_rate, core.l3_rate))
    return Floor(what, done, arithmetic * 1e9, l1, l2, l3, level)
