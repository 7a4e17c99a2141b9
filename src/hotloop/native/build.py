"""From a model to a library: capture, lower, optimise, emit, compile, check."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotloop.native.capture import Captured, capture_model, capture_program
from hotloop.native.compiler import compile_shared, find_target, missing_instructions
from hotloop.native.emit import Emitted, emit_library
from hotloop.native.emit.source import REPORT_BYTES
from hotloop.native.faults import BuildError, PrecisionLossError, StreamingError
from hotloop.native.graph import Graph
from hotloop.native.handle import CompiledModel, load
from hotloop.native.library import write_report
from hotloop.native.lowering import lower
from hotloop.native.ordering import UNSTABLE
from hotloop.native.passes import optimise
from hotloop.native.quantise import LayerError, read_batches, set_scales
from hotloop.native.verify import BOUND, INT8_BOUND, check_model, measure_error
from hotloop.native.work import count_work

__all__ = ["build", "find_time", "generate"]

Streaming = bool | int | Mapping[str, int] | None


def build(
    model: nn.Module | torch.export.ExportedProgram,
    example: torch.Tensor | Sequence[torch.Tensor],
    *,
    streaming: Streaming = None,
    precision: str = "fp32",
    out: str | os.PathLike[str] = "model.so",
    target: str = "native",
    calibration: Iterable[Any] | None = None,
    bound: float | None = None,
    force: bool = False,
    check: bool = True,
    quiet: bool = False,
) -> CompiledModel:
    """Compile a trained model into a C library and load it.

    Writes `out` and beside it the C source and header of the same name. The model is taken in evaluation mode, for
    inputs of exactly the example's shapes, on one thread.

    Args:
        model: a module, or a program of torch.export (then `example` may be empty: its own example is used).
        example: one valid input, or one for each argument; float32, or integers for tables.
        streaming: None or False: a function of whole inputs. True: a state machine that takes one event at a time
            along dimension 1 of [batch, time, features]; a number: along that dimension; a dict: by input name.
            After `reset()` and as many events as the example has, it gives what the model gives for that window; it
            then goes on, history before the window included, as a causal model does.
        precision: "fp32", or "int8": contractions in int8 with a scale for each output and calibrated inputs.
        out: the library's path, ending in .so.
        target: "native" (this processor's best), "avx512vnni", "avx512", "avx2" or "generic".
        calibration: for int8, batches such as a DataLoader gives; each is a tensor, or a tuple whose first elements
            are the inputs.
        bound: the largest relative error allowed; 1e-5 for fp32, 0.05 for int8.
        force: build int8 even beyond its bound.
        check: compare with float64 PyTorch; the result is stored in the library.
        quiet: print nothing.

    Raises:
        UnsupportedOpError: an operation has no C form; names module, source line, nearest supported form.
        StreamingError: `streaming` does not fit the inputs.
        BuildError: no compiler, or it failed.
        VerificationError: the library disagrees with PyTorch beyond the bound.
        PrecisionLossError: int8 loses more than its bound.
    """
    path = Path(out).absolute()
    if path.suffix != ".so":
        raise BuildError(f"out={str(out)!r} must end in .so; the C source and header are written beside it")
    inputs = _inputs(model, example)
    captured = (
        capture_program(model)
        if isinstance(model, torch.export.ExportedProgram)
        else capture_model(model, inputs)
    )
    module = _as_module(model)
    if precision not in ("fp32", "int8"):
        raise BuildError(f"precision={precision!r} is not known; there are: fp32, int8")
    say = (lambda text: None) if quiet else (lambda text: print(f"hotloop: {path.name}: {text}"))
    batches = read_batches(calibration, inputs) if precision == "int8" else []
    graph = _optimised(captured, _identifier(path.stem), streaming)
    layers: list[LayerError] = []
    if precision == "int8":
        with tempfile.TemporaryDirectory() as folder:
            layers = set_scales(graph, find_target(target), batches, Path(folder))
    emitted = _emit(graph, captured, precision, target)
    notes = list(captured.notes)
    if precision == "int8" and not layers:
        notes.append("no layer is large enough to gain from int8: all of it stays fp32")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
        staged = Path(folder) / path.name
        _write(staged, emitted, target)
        # for another processor's instructions: written, but it cannot be run here
        if not missing_instructions(find_target(target).name) and check:
            compiled = load(staged)
            if precision == "int8":
                report = _check_int8(compiled, module, batches, layers, bound, force, path.name)
            else:
                found = check_model(compiled, module, inputs, bound=BOUND if bound is None else bound)
                found.raise_if_failed(path.name, notes)
                report = found.as_report()
            write_report(staged, report | {"notes": notes}, REPORT_BYTES)
            for layer in layers:
                say(f"int8 layer {layer}")
            say(
                f"relative error {report['worst_relative_error']:.1e} against float64 (bound "
                f"{report['bound']:.0e}); {emitted.weight_bytes / 1024:.0f} KiB of weights, "
                f"{emitted.arena_bytes / 1024:.0f} KiB of memory"
            )
        for suffix in (".c", ".h", ".so"):
            os.replace(staged.with_suffix(suffix), path.with_suffix(suffix))
    compiled = load(path)
    for note in notes:
        say(note)
    return compiled


def _as_module(model: nn.Module | torch.export.ExportedProgram) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.module()


def _check_int8(
    compiled: CompiledModel,
    module: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
    layers: Sequence[LayerError],
    bound: float | None,
    force: bool,
    name: str,
) -> dict[str, Any]:
    """The report of an int8 library, compared with float64 on the held-out quarter of the calibration data.

    Raises:
        PrecisionLossError: the error is beyond the bound, and `force` is not set.
    """
    limit = INT8_BOUND if bound is None else bound
    held_out = batches[-max(1, len(batches) // 4) :]
    error = measure_error(compiled, module, held_out)
    worst = sorted(layers, key=lambda layer: -layer.relative_error)[:3]
    if error > limit and not force:
        raise PrecisionLossError(
            f"{name}: int8 is off float64 by {error:.1%} of the outputs' root mean square on held-out data, more than "
            f"the bound of {limit:.1%}; worst layers: {', '.join(map(str, worst))}. Give more calibration data, raise "
            "bound=, or set force=True"
        )
    return {
        "reference": "float64 PyTorch, held-out calibration data, root mean square",
        "bound": limit,
        "worst_relative_error": float(f"{error:.3e}"),
        "layers": [[layer.layer, float(f"{layer.relative_error:.2e}")] for layer in layers][:32],
    }


def generate(
    captured: Captured, name: str, *, streaming: Streaming = None, target: str = "native"
) -> tuple[Graph, Emitted]:
    """The optimised graph and its C text, nothing compiled."""
    graph = _optimised(captured, name, streaming)
    return graph, _emit(graph, captured, "fp32", target)


def _optimised(captured: Captured, name: str, streaming: Streaming) -> Graph:
    graph = lower(captured, name, time=find_time(captured, streaming))
    optimise(graph)
    return graph


def _emit(graph: Graph, captured: Captured, precision: str, target: str) -> Emitted:
    facts = {
        "captured_by": captured.how,
        "precision": precision,
        "sorts": any(call.op.startswith(UNSTABLE) for call in captured.calls),
        "time_inputs": graph.time_inputs,
        "output_rows": graph.output_rows,
        "work": {"commit": asdict(count_work(graph.nodes)), "prep": asdict(count_work(graph.prep))},
    }
    return emit_library(graph, find_target(target), facts)


def _inputs(model: Any, example: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [example] if isinstance(example, torch.Tensor) else list(example)
    if not inputs and isinstance(model, torch.export.ExportedProgram) and model.example_inputs:
        inputs = list(model.example_inputs[0])
    for index, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor):
            raise BuildError(f"example {index} is a {type(x).__name__}; give tensors, as the model is called")
        if x.dtype in (torch.float16, torch.bfloat16) or x.dtype.is_complex:
            raise BuildError(
                f"example {index} has dtype {x.dtype}; give float32 (call .float() on model and example)"
            )
    if not inputs:
        raise BuildError("an example input is needed: its shapes are the library's shapes")
    return [x.detach().cpu() for x in inputs]


def find_time(captured: Captured, streaming: Streaming) -> dict[str, int] | None:
    """The time dimension by input name, or None for a plain function.

    Raises:
        StreamingError: a name or dimension that is not there, or windows of different lengths.
    """
    if streaming is None or streaming is False:
        return None
    shapes = captured.input_shapes
    if isinstance(streaming, Mapping):
        unknown = [name for name in streaming if name not in shapes]
        if unknown:
            raise StreamingError(f"there is no input {unknown[0]!r}; there are: {', '.join(shapes)}")
        time = {name: int(dim) for name, dim in streaming.items()}
    else:
        dim = 1 if streaming is True else int(streaming)
        length = None
        time = {}
        for name, shape in shapes.items():
            if -len(shape) <= dim < len(shape):
                length = length or shape[dim]
                if shape[dim] == length:
                    time[name] = dim
    for name, dim in time.items():
        rank = len(shapes[name])
        if not -rank <= dim < rank:
            raise StreamingError(f"input {name!r} of shape {shapes[name]} has no dimension {dim}")
        time[name] = dim % rank
    lengths = {name: shapes[name][dim] for name, dim in time.items()}
    if not lengths:
        raise StreamingError(f"no input has dimension {streaming} to run along: {shapes}")
    if len(set(lengths.values())) > 1:
        raise StreamingError(
            f"the inputs' windows differ in length: {lengths}; name the ones that run along time"
        )
    return time


def _identifier(stem: str) -> str:
    name = re.sub(r"\W", "_", stem)
    # a C name must not start with a digit, and one of hotloop's own words would clash
    clash = len(name) < 3 or name[0].isdigit() or name in _RESERVED
    return f"model_{name}" if clash else name


# Words of C and of the generated source that a library's name must not be; all shorter ones are avoided anyway.
_RESERVED = frozenset(
    """main prepare weights memory state source inputs outputs int float double char long short struct union enum void
    const static inline return sizeof switch case while for break continue default do else goto if register signed
    unsigned typedef volatile auto extern restrict sine recip magnitude hotloop_table""".split()  # noqa: SIM905
)


def _write(path: Path, emitted: Emitted, target: str) -> None:
    """Write source and header whole, then compile."""
    source = path.with_suffix(".c")
    header = path.with_suffix(".h")
    # the file is called as the library is, even where that is no name in C
    text = emitted.source.replace(f'#include "{emitted.description["name"]}.h"', f'#include "{header.name}"')
    digest = hashlib.sha256(emitted.source.encode()).hexdigest()
    for file, content in ((source, text), (header, emitted.header)):
        temporary = file.with_name(f".{file.name}.{digest[:8]}")
        with open(temporary, "w") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    compile_shared(source, path, find_target(target), include=[path.parent])
