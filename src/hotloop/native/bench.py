"""Latency honestly told: pinned, warmed, percentiles by block and in all, cold caches, after idling, a floor, peers."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hotloop.native.faults import InputError
from hotloop.native.handle import make_handle
from hotloop.native.library import Library, open_library
from hotloop.native.peers import PEERS, measure_in_turns, one_thread, prepare_peers
from hotloop.native.timing import Samples, measure_calls, measure_core
from hotloop.native.verify import check_model
from hotloop.native.work import Floor, predict_floor

__all__ = ["BenchResult", "Comparison", "Row", "bench"]


@dataclass(frozen=True)
class Row:
    """Nanoseconds of one way of calling: percentiles of the quietest block, of all calls, and the slowest call."""

    what: str
    p50: float
    p99: float
    p999: float
    all_p50: float
    all_p99: float
    all_p999: float
    highest: float
    calls: int


@dataclass
class Comparison:
    """The library and its model in other runtimes, called from Python in turns; the clock's cost is taken off.

    `relative_error`: how far the library is off the model that was given, None where they could not be compared.
    `failed`: one line for each runtime that could not be timed. `notes`: what to know before comparing.
    """

    rows: list[Row]
    failed: dict[str, str]
    relative_error: float | None
    notes: list[str] = field(default_factory=list)


@dataclass
class BenchResult:
    """All rows of a library, the histogram of its warm calls (edges in ns), the timer's cost (part of each row of
    `rows`), the floors of its parts (none of a library that was built before they were counted), its peers."""

    path: str
    description: dict[str, Any]
    rows: list[Row]
    timer_ns: float
    floors: list[Floor]
    load_average: float
    histogram: tuple[list[float], list[int]] = field(default_factory=lambda: ([], []))
    comparison: Comparison | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = asdict(self)
        for floor, listed in zip(self.floors, told["floors"], strict=True):
            listed["ns"] = floor.ns
        return told


def _row(what: str, samples: Samples) -> Row:
    p50, p99, p999 = (samples.percentile(q) for q in (50, 99, 99.9))
    all_p50, all_p99, all_p999 = (samples.percentile(q, quietest=False) for q in (50, 99, 99.9))
    count = sum(block.size for block in samples.blocks)
    return Row(what, p50, p99, p999, all_p50, all_p99, all_p999, samples.highest(), count)


def bench(
    path: str | os.PathLike[str],
    *,
    calls: int = 20_000,
    blocks: int = 10,
    quick: bool = False,
    against: nn.Module | torch.export.ExportedProgram | None = None,
    example: torch.Tensor | Sequence[torch.Tensor] = (),
    peers: Sequence[str] = ("eager", "compile", "ort"),
) -> BenchResult:
    """Measure a library's latency from C on one pinned core, in real-time priority where that is allowed.

    The clock is the time-stamp counter around each call; its own cost is in every figure and stated. Inputs rotate
    through 16 random rows.

    Args:
        path: the library.
        calls: in a block.
        blocks: how many; the quietest is told beside all.
        quick: fewer of both: a check that it runs, not a figure.
        against: the model that the library was built from; it is timed in other runtimes beside the library.
        example: what `against` is called with; left out, the program's own example, or random numbers in the shapes
            that the library was built for.
        peers: keys of `hotloop.native.peers.PEERS`: eager, compile, ort, openvino, aoti. One that fails is a line
            in `comparison.failed`.

    Raises:
        LibraryError: the file is no library of hotloop's.
        InputError: a peer's name is not known, or `against` does not take the library's inputs.
    """
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise InputError(f"there is no peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    library = open_library(path)
    if quick:
        calls, blocks = min(calls, 2000), min(blocks, 3)
    prep = bool(library.description["streaming"])
    warm = measure_calls(library, calls=calls, blocks=blocks)
    rows = [_row("prep and commit" if prep else "warm", warm)]
    if prep:
        commit = measure_calls(library, calls=calls, blocks=blocks, prep=True)
        rows.insert(0, _row("commit, after prep", commit))
    few = max(20, calls // 400)
    spoilt = {
        "cold caches": measure_calls(library, calls=few, blocks=2, cold=True, prep=prep),
        "after 100 us idle": measure_calls(library, calls=few * 5, blocks=2, idle_us=100.0, prep=prep),
        "after 1 ms asleep": measure_calls(library, calls=few * 5, blocks=2, asleep_us=1000.0, prep=prep),
    }
    rows += [_row(what, samples) for what, samples in spoilt.items()]
    pooled = np.concatenate(warm.blocks)
    edges = np.geomspace(max(pooled.min() * 0.9, 1.0), pooled.max() * 1.1, 61)
    counts, _ = np.histogram(pooled, edges)
    return BenchResult(
        str(Path(path).absolute()),
        library.description,
        rows,
        warm.timer_ns,
        _floors(library),
        os.getloadavg()[0],
        ([float(edge) for edge in edges], [int(count) for count in counts]),
        None if against is None else _compare(library, against, example, peers, calls // 5, blocks),
    )


def _floors(library: Library) -> list[Floor]:
    """Of the commit, and of a state machine's prep."""
    core, d = measure_core(), library.description
    held = int(d["weight_bytes"]) + int(d["arena_bytes"])
    parts = ("commit", "prep") if d["streaming"] else ("commit",)
    names = {"commit": "commit" if d["streaming"] else "call", "prep": "prep"}
    return [predict_floor(names[part], d["work"][part], held, core) for part in parts if "work" in d]


def _draw_example(library: Library) -> list[torch.Tensor]:
    """Random inputs in the shapes of the model (not of one event); zero for integers, which every table has."""
    d, drawn = library.description, []
    for item in library.inputs:
        shape = list(item.shape)
        if item.name in d["time_inputs"]:
            shape[d["time_inputs"][item.name]] = d["window"]
        dtype = getattr(torch, item.dtype)
        drawn.append(
            torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
        )
    return drawn


def _compare(
    library: Library,
    against: nn.Module | torch.export.ExportedProgram,
    example: torch.Tensor | Sequence[torch.Tensor],
    peers: Sequence[str],
    calls: int,
    blocks: int,
) -> Comparison:
    inputs = [example] if isinstance(example, torch.Tensor) else list(example)
    if isinstance(against, nn.Module):
        model = copy.deepcopy(against).cpu().eval()
    else:
        if not inputs and against.example_inputs:
            inputs = list(against.example_inputs[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # its guards are checks of every call that the eager model does not have
            model = against.module(check_guards=False)
    inputs = [x.detach().cpu().contiguous() for x in inputs or _draw_example(library)]
    compiled = make_handle(library, use_own_instance=True)
    try:
        with one_thread():
            error = check_model(compiled, model, inputs, only=("given",)).errors.get("given")
    except Exception as fault:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        text = next(iter(str(fault).splitlines()), "")
        raise InputError(
            f"the model to compare with does not take inputs of shapes {shapes}: {text}"
        ) from None
    arrays: list[npt.NDArray[np.generic]] = []
    for x, item in zip(inputs, library.inputs, strict=True):
        given = x.numpy()
        if item.name in library.description["time_inputs"]:
            given = np.take(given, [0], axis=library.description["time_inputs"][item.name])
        arrays.append(np.ascontiguousarray(given))
    every = [*arrays, *(np.zeros(item.shape, np.float32) for item in library.outputs)]
    into = compiled.into
    with tempfile.TemporaryDirectory(prefix="hotloop-peers-") as folder, one_thread():
        ready, failed = prepare_peers(peers, model, inputs, Path(folder))
        found = measure_in_turns({"hotloop": lambda: into(*every), **ready}, count=calls, blocks=blocks)
    notes = []
    if library.description["streaming"]:
        compiled.reset()
        notes.append(
            "hotloop takes one event, prep and commit; the others compute the whole window of "
            f"{library.description['window']} at each event"
        )
    if not isinstance(against, nn.Module):
        notes.append("an exported program can be slower in eager than the module it was exported from")
    rows = [_row(name, Samples(samples, 0.0)) for name, samples in found.items()]
    return Comparison(rows, failed, error, notes)
