"""A model as a list of calls: torch.export's graph before any decomposition, or else a recording of one run.

Exported whole, an LSTM, a convolution, a layer norm stay one call each. Where export fails (a branch on a
parameter's value, say) the operations of one run with the example are recorded as they happen; what a recorded
branch decided is then fixed, and the build says so.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hotloop.native.faults import BuildError, NativeError, StatefulError
from hotloop.native.graph import Origin

__all__ = [
    "Call",
    "Captured",
    "Ref",
    "capture_model",
    "capture_program",
    "copy_model",
    "find_source_line",
    "name_operation",
]


@dataclass(frozen=True)
class Ref:
    """The result of a call; of one with several results, "name#index"."""

    name: str


@dataclass
class Call:
    """One operation: `op` as in "linear" or "lstm.input"; arguments hold `Ref`s, numbers, and tensors."""

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    origin: Origin
    target: Any = None


@dataclass
class Captured:
    """Calls in order, constants by name, the names of inputs (shape, dtype by name) and what is returned."""

    calls: list[Call]
    constants: dict[str, torch.Tensor]
    inputs: list[str]
    input_shapes: dict[str, tuple[int, ...]]
    input_dtypes: dict[str, torch.dtype]
    outputs: list[Ref | torch.Tensor]
    how: str = "export"
    notes: list[str] = field(default_factory=list)


def capture_model(model: nn.Module, example: Sequence[torch.Tensor]) -> Captured:
    """Capture `model`, in evaluation mode, for inputs of exactly the example's shapes.

    Raises:
        NativeError: it is no module with values, or can be neither exported nor recorded; holds both reasons.
    """
    model = copy_model(model).eval().cpu()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        # warnings of torch.export about RNN weights are about its own bookkeeping
        with warnings.catch_warnings(), torch.no_grad(), _quiet_logs():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, tuple(example), strict=False)
            return capture_program(program)
    except StatefulError:
        raise
    except Exception as error:
        from hotloop.native.record import record_model

        captured = record_model(model, example, because=error)
        captured.notes.append(
            f"recorded from one run, because torch.export failed: {_first_line(error)}; branches on values are fixed"
        )
        return captured


def copy_model(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with `model`, tensors that were computed (old weight norm's weight) included.

    Raises:
        BuildError: it is no nn.Module, is compiled by TorchScript, or has parameters without values.
    """
    if not isinstance(model, nn.Module):
        raise BuildError(
            f"the model is a {type(model).__name__}; give an nn.Module or a program of torch.export (a function: "
            "a module whose forward calls it)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise BuildError(
            "the model is a TorchScript module, which torch.export does not read; give the nn.Module"
        )
    computed: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, value in [*module.__dict__.items(), *module._parameters.items(), *module._buffers.items()]:
            place = f"{path}.{name}".removeprefix(".")
            if isinstance(value, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
                raise BuildError(f"{place!r} has no shape yet; run the model once on an input, then build it")
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise BuildError(f"{place!r} is on the meta device and has no values; load the weights first")
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                computed[id(value)] = value.detach().clone()
    return copy.deepcopy(model, computed)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """torch logs, and prints, whole graphs where it cannot export; the reason is told in one line here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def capture_program(program: torch.export.ExportedProgram) -> Captured:
    """Read an exported program.

    Raises:
        NativeError: it takes or returns something that is not a tensor.
    """
    program = _without_writes(program)
    signature = program.graph_signature
    for spec in signature.output_specs:
        if spec.kind == torch.export.graph_signature.OutputKind.BUFFER_MUTATION:
            raise StatefulError(
                f"the model writes to its buffer {spec.target!r}, and a library keeps nothing of a call; take the "
                "state as an input and return the new one (streaming= makes the state of layers by itself)"
            )
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    state: dict[str, Any] = {**program.constants, **program.state_dict}
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind == torch.export.graph_signature.InputKind.USER_INPUT:
            inputs.append(name)
        elif spec.target is not None and isinstance(state.get(spec.target), torch.Tensor):
            constants[name] = state[spec.target].detach()
    found = Captured([], constants, [], {}, {}, [])
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            if any(type(size) is not int for size in value.shape):
                raise NativeError(
                    f"input {node.name!r} has a dynamic shape {tuple(value.shape)}; export with the fixed sizes that "
                    "the library shall have (one library per batch size)"
                )
            found.inputs.append(node.name)
            found.input_shapes[node.name] = tuple(value.shape)
            found.input_dtypes[node.name] = value.dtype
        elif node.op == "get_attr":
            found.constants[node.name] = _attribute(program, str(node.target))
        elif node.op == "call_function":
            found.calls.append(_read_call(node))
        elif node.op == "output":
            found.outputs = _read_outputs(node.args[0], program, found.notes)
    return found


# Their result may stand for their operand where nothing else looks at it.
# fmt: off
_IN_PLACE = frozenset((
    "relu_", "relu6_", "hardtanh_", "hardswish_", "hardsigmoid_", "silu_", "mish_", "leaky_relu_", "elu_", "celu_",
    "selu_", "sigmoid_", "tanh_", "exp_", "add_", "sub_", "mul_", "div_", "clamp_", "masked_fill_", "dropout_",
))
# fmt: on


def _without_writes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with writes in place as new values, where something else may look at what is written."""
    if not any(_writes_elsewhere(node) for node in program.graph.nodes):
        return program
    with warnings.catch_warnings(), torch.no_grad(), _quiet_logs():
        warnings.simplefilter("ignore")
        return program.run_decompositions({})


def _writes_elsewhere(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not node.target._schema.is_mutable:
        return False
    name, written = name_operation(node.target).partition(".")[0], node.args[0]
    if name not in _IN_PLACE or not isinstance(written, torch.fx.Node) or written.op != "call_function":
        return True
    return _looks_at(written) or any(_looks_at(user) for user in written.users)


def _looks_at(node: torch.fx.Node) -> bool:
    """Whether the result may share memory with an operand that is not written."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"
    returned = node.target._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _attribute(program: torch.export.ExportedProgram, target: str) -> torch.Tensor:
    value: Any = program.graph_module
    for part in target.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        raise NativeError(
            f"the exported graph holds {target!r}, which is no tensor but {type(value).__name__}"
        )
    return value.detach()


def _read_outputs(
    outputs: Any, program: torch.export.ExportedProgram, notes: list[str]
) -> list[Ref | torch.Tensor]:
    kept = torch.export.graph_signature.OutputKind.USER_OUTPUT
    found: list[Ref | torch.Tensor] = []
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind == kept and isinstance(value, torch.fx.Node):
            found.append(Ref(value.name))
        elif spec.kind == kept and isinstance(value, torch.Tensor):
            found.append(value)
        elif spec.kind == kept and value is not None:
            notes.append(f"an output that is no tensor ({value!r}) is left out")
    return found


def _read_call(node: torch.fx.Node) -> Call:
    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return Ref(value.name)
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return value

    values = node.meta.get("val")
    tensors = list(values) if isinstance(values, (list, tuple)) else [values]
    return Call(
        node.name,
        name_operation(node.target),
        tuple(convert(arg) for arg in node.args),
        {key: convert(value) for key, value in node.kwargs.items()},
        [tuple(int(s) for s in v.shape) if isinstance(v, torch.Tensor) else () for v in tensors],
        [v.dtype if isinstance(v, torch.Tensor) else torch.float32 for v in tensors],
        _origin(node),
        node.target,
    )


def name_operation(target: Any) -> str:
    """ "linear" for aten.linear.default, "lstm.input" for aten.lstm.input, "getitem" for the Python function."""
    text = (
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )
    text = text.removeprefix("aten.")
    return text.removesuffix(".default")


def _origin(node: torch.fx.Node) -> Origin:
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    return Origin(
        name_operation(node.target), str(module), find_source_line(node.meta.get("stack_trace") or "")
    )


def find_source_line(trace: str) -> str:
    """The innermost line of a stack trace that lies in the user's code, as "file:line: text"."""
    lines = trace.splitlines()
    best = ""
    for place, line in enumerate(lines):
        text = line.strip()
        if text.startswith('File "') and f"{os.sep}torch{os.sep}" not in text:
            parts = text.split('"')
            number = parts[2].split("line")[1].split(",")[0].strip()
            source = lines[place + 1].strip() if place + 1 < len(lines) else ""
            best = f"{parts[1]}:{number}: {source}"
    return best
