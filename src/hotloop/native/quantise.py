"""int8: finding the range of every contraction's input on calibration data, and what each layer loses.

Weights get one scale for each output, inputs one for the whole tensor: the largest magnitude seen. A library that
notes what its contractions read is run over three quarters of the data; on the last quarter, held out, each layer's
int8 result is compared with its fp32 result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotloop.native.compiler import compile_shared
from hotloop.native.emit import Target, emit_library
from hotloop.native.emit.quantised import quantise_weight
from hotloop.native.faults import BuildError
from hotloop.native.graph import Graph, Taps
from hotloop.native.handle import make_handle
from hotloop.native.library import Library, open_library
from hotloop.native.verify import run_compiled

__all__ = ["LayerError", "read_batches", "set_scales"]

# A contraction smaller than this gains nothing.
_FEWEST_INPUTS, _FEWEST_OUTPUTS = 16, 16


@dataclass(frozen=True)
class LayerError:
    """One contraction: where it is, and how far int8 is off fp32 on held-out data, by root mean square."""

    layer: str
    relative_error: float
    input_limit: float

    def __str__(self) -> str:
        return f"{self.layer}: {self.relative_error:.1%}"


def read_batches(
    calibration: Iterable[Any] | None, example: Sequence[torch.Tensor], most: int = 256
) -> list[list[torch.Tensor]]:
    """Single inputs of the example's shapes from batches as a DataLoader gives them: larger ones are cut up.

    Raises:
        BuildError: there are too few, or their shapes do not fit.
    """
    if calibration is None:
        raise BuildError(
            "precision='int8' needs calibration=: batches of real inputs, such as a DataLoader, at least 8 windows"
        )
    found: list[list[torch.Tensor]] = []
    for batch in calibration:
        parts = [batch] if isinstance(batch, torch.Tensor) else list(batch)[: len(example)]
        if len(parts) < len(example):
            raise BuildError(
                f"a calibration batch holds {len(parts)} tensors, but the model takes {len(example)}"
            )
        size = example[0].shape[0] if example[0].dim() else 1
        total = parts[0].shape[0] if parts[0].dim() else 1
        for start in range(0, total - size + 1, size):
            item = [
                part[start : start + size] if part.shape != wanted.shape else part
                for part, wanted in zip(parts, example, strict=True)
            ]
            for part, wanted in zip(item, example, strict=True):
                if part.shape != wanted.shape:
                    raise BuildError(
                        f"a calibration batch has shape {tuple(part.shape)}, the example {tuple(wanted.shape)}"
                    )
            found.append(
                [
                    part.detach().to(wanted.dtype).contiguous()
                    for part, wanted in zip(item, example, strict=True)
                ]
            )
            if len(found) >= most:
                return found
    if len(found) < 8:
        raise BuildError(f"calibration holds {len(found)} inputs; give at least 8, better 100")
    return found


def set_scales(
    graph: Graph, target: Target, batches: Sequence[Sequence[torch.Tensor]], folder: Path
) -> list[LayerError]:
    """Set the input scale of every contraction worth it; returns what each loses on held-out data.

    Raises:
        BuildError: the target has no int8 instructions.
    """
    if not target.vnni:
        raise BuildError(
            f"precision='int8' needs AVX-512 VNNI; target {target.name!r} has none. Use precision='fp32'"
        )
    layers = [
        node
        for node in graph.all_nodes()
        if isinstance(node, Taps)
        and node.weight.shape[0] * node.weight.shape[1] >= _FEWEST_INPUTS
        and node.weight.shape[2] >= _FEWEST_OUTPUTS
    ]
    facts = {"time_inputs": graph.time_inputs, "output_rows": graph.output_rows}
    emitted = emit_library(graph, target, facts, observed=layers)
    source, library = folder / "observed.c", folder / "observed.so"
    source.write_text(emitted.source)
    (folder / f"{graph.name}.h").write_text(emitted.header)
    compile_shared(source, library, target, include=[folder])
    opened = open_library(library)
    slots = list(emitted.description["observed"])
    names = [item.name for item in opened.inputs]
    time = {names.index(name): dim for name, dim in graph.time_inputs.items()}
    held_out = max(1, len(batches) // 4)
    handle = make_handle(opened, use_own_instance=True)
    for batch in batches[:-held_out]:
        run_compiled(handle, batch, time)
    for node, slot in zip(layers, slots, strict=True):
        largest = float(_arena(opened, slot, 1)[0])
        node.scale = largest / 127.0 if largest > 0 else 1.0
    squares = np.zeros((len(layers), 2))
    for batch in batches[-held_out:]:
        run_compiled(handle, batch, time)
        for index, (node, slot) in enumerate(zip(layers, slots, strict=True)):
            squares[index] += _compare(node, _arena(opened, slot + 1, node.rows.size * node.weight.shape[1]))
    return [
        LayerError(
            f"{node.origin.module or 'model'}:{node.origin.operation} ({node.weight.shape[0] * node.weight.shape[1]}"
            f" to {node.weight.shape[2]})",
            float(np.sqrt(lost / kept)) if kept > 0 else 0.0,
            float((node.scale or 0.0) * 127.0),
        )
        for node, (lost, kept) in zip(layers, squares, strict=True)
    ]


def _arena(library: Library, start: int, count: int) -> npt.NDArray[np.float32]:
    """Floats of the instance's memory; the arena is what an instance begins with."""
    address = library.instance + 4 * start
    return np.array((ctypes.c_float * count).from_address(address), np.float32)


def _compare(node: Taps, values: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Sums of squares of what int8 loses, and of the fp32 result, for the rows read last."""
    assert node.scale is not None
    taps, inner, outputs = node.weight.shape
    rows = values.astype(np.float64).reshape(-1, taps * inner)
    weight = node.weight.reshape(-1, outputs).astype(np.float64)
    whole, step = quantise_weight(node.weight)
    rounded = np.clip(np.rint(rows / node.scale), -127, 127) * node.scale
    exact = rows @ weight
    lost = rounded @ (whole.reshape(-1, outputs) * step) - exact
    return float((lost**2).sum()), float((exact**2).sum())
