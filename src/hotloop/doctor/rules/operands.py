"""What a kernel works on: the operator that launched it, with the shapes and types of its inputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.doctor.rules.finding import Case
from hotloop.doctor.trace.columns import Category

__all__ = ["Operands", "find_operands"]

_SIZES = {
    "double": 8,
    "float": 4,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "long": 8,
    "long int": 8,
    "int": 4,
    "bool": 1,
}


@dataclass(frozen=True)
class Operands:
    """Inputs of an operator: its name, the tensors' shapes, and the bytes each takes (of known types only)."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    @property
    def product_flop(self) -> float:
        """Floating-point operations of a matrix product: 2 M N K, times the batch; 0 for other operators."""
        short = self.op.rpartition("::")[2]
        shapes = [shape for shape in self.shapes if len(shape) >= 2]
        if short in ("addmm", "addmm_", "addbmm", "baddbmm") and len(self.shapes) >= 3:
            shapes = [shape for shape in self.shapes[1:] if len(shape) >= 2]
        elif short not in ("mm", "bmm", "matmul", "linear", "_addmm_activation"):
            return 0.0
        if len(shapes) < 2:
            return 0.0
        left, right = shapes[0], shapes[1]
        columns = right[-2] if short == "linear" else right[-1]
        return 2.0 * float(np.prod(left, dtype=np.float64)) * columns


def find_operands(case: Case, kernels: npt.NDArray[np.int64]) -> list[Operands | None]:
    """[kernels] inputs of the operator that launched each; None where the trace has no shapes (record_shapes=True)."""
    timeline = case.timeline
    events = timeline.events
    ops = events.rows(Category.OP)
    ops = ops[(events.shapes[ops] >= 0) & (events.external[ops] >= 0)]
    if not len(ops):
        return [None] * len(kernels)
    by_id = ops[np.argsort(events.external[ops], kind="stable")]
    ids = events.external[by_id]
    wanted = events.external[timeline.work_rows[kernels]]
    found: list[Operands | None] = []
    for index, number in zip(np.searchsorted(ids, wanted).tolist(), wanted.tolist(), strict=True):
        if index < len(ids) and ids[index] == number:
            shapes, types = events.texts[int(events.shapes[by_id[index]])]
            found.append(_parse(events.name_of(int(by_id[index])), shapes, types))
        else:
            found.append(None)
    return found


@lru_cache(maxsize=4096)
def _parse(op: str, shapes: bytes, types: bytes) -> Operands:
    try:
        dims: Any = json.loads(shapes)
        kinds: Any = json.loads(types or b"[]")
    except ValueError:
        return Operands(op, (), ())
    if not isinstance(dims, list) or not isinstance(kinds, list):
        return Operands(op, (), ())
    found, sizes = [], []
    for position, dim in enumerate(dims):
        kind = str(kinds[position]).lower() if position < len(kinds) else "float"
        if isinstance(dim, list) and dim and all(isinstance(n, int) for n in dim):
            found.append(tuple(dim))
            if kind in _SIZES:
                sizes.append(int(np.prod(dim, dtype=np.float64)) * _SIZES[kind])
    return Operands(op, tuple(found), tuple(size for size in sizes if size > 0))
