"""The same model in other runtimes, each with its cheapest call on one thread, timed beside the compiled one."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hotloop.native.timing import pinned

__all__ = ["PEERS", "measure_in_turns", "one_thread", "prepare_peers", "time_calls", "time_loop"]

Call = Callable[[], Any]
Example = Sequence[torch.Tensor]


class _Plain(nn.Module):
    """An exported program's module as one that may be told to train or not: it refuses, and the exporter tells all."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = False

    def train(self, mode: bool = True) -> _Plain:
        """Nothing: it was in evaluation mode when it was exported."""
        return self

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.inner(*inputs)


def _onnx(model: nn.Module, example: Example, folder: Path) -> Path:
    path = folder / "model.onnx"
    if not path.exists():
        if isinstance(model, torch.fx.GraphModule):
            model = _Plain(model)
        torch.onnx.export(model, tuple(example), str(path), dynamo=False, opset_version=17)
    return path


def _ort(model: nn.Module, example: Example, folder: Path) -> Call:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    path = str(_onnx(model, example, folder))
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for item, x in zip(session.get_inputs(), example, strict=True):
        binding.bind_ortvalue_input(item.name, runtime.OrtValue.ortvalue_from_numpy(x.numpy()))
    for item in session.get_outputs():
        shape = [int(size) for size in item.shape]
        value = runtime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
        binding.bind_ortvalue_output(item.name, value)
    return lambda: session.run_with_iobinding(binding)


def _openvino(model: nn.Module, example: Example, folder: Path) -> Call:
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = core.compile_model(core.read_model(str(_onnx(model, example, folder))), "CPU", settings)
    request = compiled.create_infer_request()
    for index, x in enumerate(example):
        request.set_input_tensor(index, openvino.Tensor(x.numpy(), shared_memory=True))
    infer: Call = request.infer
    return infer


def _aoti(model: nn.Module, example: Example, folder: Path) -> Call:
    inductor: Any = importlib.import_module("torch._inductor")
    given = tuple(example)
    with torch.no_grad():
        program = torch.export.export(model, given)
        path = inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs={"freezing": True}
        )
        runner = inductor.aoti_load_package(path)
    return lambda: runner(*given)


def _compile(model: nn.Module, example: Example, _folder: Path) -> Call:
    compiled: Any = torch.compile(model)
    return lambda: compiled(*example)


def _eager(model: nn.Module, example: Example, _folder: Path) -> Call:
    return lambda: model(*example)


# name: what it is called on the page, and what makes a call of a model
PEERS: Mapping[str, tuple[str, Callable[[nn.Module, Example, Path], Call]]] = {
    "eager": ("eager", _eager),
    "compile": ("torch.compile", _compile),
    "ort": ("ONNX Runtime", _ort),
    "openvino": ("OpenVINO", _openvino),
    "aoti": ("AOTInductor", _aoti),
}


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, as the compiled model is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare_peers(
    names: Sequence[str], model: nn.Module, example: Example, folder: Path
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls that are ready to be timed (some twenty made), and of each peer that failed one line that says why.

    Args:
        names: keys of `PEERS`.
        model: in evaluation mode.
        example: the input that every call gets.
        folder: where their files go; it must outlive the calls.
    """
    ready: dict[str, Call] = {}
    failed: dict[str, str] = {}
    dynamo: Any = importlib.import_module("torch._dynamo")
    for name in names:
        title, make = PEERS[name]
        try:
            with warnings.catch_warnings(), torch.inference_mode(), dynamo.config.patch(allow_rnn=True):
                warnings.simplefilter("ignore")
                call = make(model, example, folder)
                for _ in range(20):
                    call()
            ready[title] = call
        except ImportError as error:
            failed[title] = f"not installed ({error})"
        # whatever a runtime makes of a model, it is that peer's answer and not the end of the comparison
        except Exception as error:
            first = next((text for text in str(error).splitlines() if text.strip()), "")
            failed[title] = f"{type(error).__name__}: {first.strip()[:120]}"
    return ready, failed


def time_calls(call: Call, count: int) -> npt.NDArray[np.float64]:
    """Nanoseconds of `count` calls, each timed by itself, the clock's own cost taken off."""
    clock = time.perf_counter_ns
    found = np.zeros(count)
    empty = []
    for _ in range(200):
        start = clock()
        empty.append(clock() - start)
    own = sorted(empty)[100]
    for index in range(count):
        start = clock()
        call()
        found[index] = clock() - start - own
    return found


def time_loop(call: Call, count: int) -> float:
    """Nanoseconds a call in a bare loop: for calls that are shorter than the clock's own cost."""
    rounds = range(count)
    start = time.perf_counter_ns()
    for _ in rounds:
        call()
    middle = time.perf_counter_ns()
    for _ in rounds:
        pass
    return (middle - start - (time.perf_counter_ns() - middle)) / count


def measure_in_turns(
    calls: Mapping[str, Call], *, count: int, blocks: int, budget_s: float = 0.1
) -> dict[str, list[npt.NDArray[np.float64]]]:
    """Blocks of nanoseconds by name. All take turns, on one pinned core and thread, so that a noisy minute is every
    one's. A block has `count` calls, fewer where they would take longer than `budget_s` seconds."""
    found: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in calls}
    with pinned(), one_thread(), torch.inference_mode():
        slow = {name: max(float(np.median(time_calls(call, 30))), 1.0) for name, call in calls.items()}
        for _ in range(blocks):
            for name, call in calls.items():
                found[name].append(time_calls(call, max(30, min(count, int(budget_s * 1e9 / slow[name])))))
    return found
