"""Copies at the ends of a recorded graph, whose outer end is said anew before each launch.

What a step takes in and what it tells the host can be copied beside the graph, and each such copy costs the host a
launch of its own. Recorded into the graph it costs none. Only the address outside the graph differs from launch to
launch, and the driver lets one set that in a graph ready to run, in less time than a launch takes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from hotloop.errors import CaptureError
from hotloop.hardware.gate import RECORDING_GATE
from hotloop.hardware.recording import mend_failed_recording

__all__ = ["Port", "PortError", "Ports", "can_be_port", "ports_work"]

Port = Callable[[int], None]
"""Says where the next launch's copy reads, or writes; raises `PortError` if the driver does not take it."""

_MEMCPY_NODE = 1  # CU_GRAPH_NODE_TYPE_MEMCPY
_HOST = 1  # CU_MEMORYTYPE_HOST
_DEVICES = ("cuda",)


class PortError(CaptureError):
    """The driver does not set an end of a recorded copy, so the copy has to be made beside the graph."""


class _Copy(ctypes.Structure):
    """The driver's CUDA_MEMCPY3D."""

    _fields_ = [
        *((f"src_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")),
        ("src_type", ctypes.c_int),
        *((f"src_{name}", ctypes.c_uint64) for name in ("host", "device", "array", "reserved")),
        *((f"src_{name}", ctypes.c_size_t) for name in ("pitch", "height")),
        *((f"dst_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")),
        ("dst_type", ctypes.c_int),
        *((f"dst_{name}", ctypes.c_uint64) for name in ("host", "device", "array", "reserved")),
        *((f"dst_{name}", ctypes.c_size_t) for name in ("pitch", "height")),
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth")),
    ]

    def address(self, end: str) -> int:
        """Where it reads ("src") or writes ("dst")."""
        return int(getattr(self, self.field(end)))

    def field(self, end: str) -> str:
        """The field that holds that address."""
        return f"{end}_host" if getattr(self, f"{end}_type") == _HOST else f"{end}_device"


class Ports:
    """The copies of a graph that was recorded with `keep_graph=True` and instantiated.

    Raises:
        PortError: the driver does not tell them.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        driver = _driver()
        if driver is None:
            raise PortError("there is no CUDA driver to ask")
        self._set = driver.cuGraphExecMemcpyNodeSetParams
        self._execution = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        self._context = ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        template = ctypes.c_void_p(graph.raw_cuda_graph())
        count = ctypes.c_size_t(0)
        _check(driver.cuGraphGetNodes(template, None, ctypes.byref(count)))
        nodes = (ctypes.c_void_p * count.value)()
        _check(driver.cuGraphGetNodes(template, nodes, ctypes.byref(count)))
        # node, its parameters, and as recorded: address read from, address written to, bytes
        self._copies: list[tuple[ctypes.c_void_p, _Copy, tuple[int, int, int]]] = []
        for address in nodes:
            node, kind = ctypes.c_void_p(address), ctypes.c_int()
            _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
            if kind.value == _MEMCPY_NODE:
                copy = _Copy()
                _check(driver.cuGraphMemcpyNodeGetParams(node, ctypes.byref(copy)))
                if (copy.height, copy.depth) == (1, 1):
                    recorded = copy.address("src"), copy.address("dst"), copy.width
                    self._copies.append((node, copy, recorded))

    def of(self, source: torch.Tensor, target: torch.Tensor, end: str) -> Port:
        """The port of the one copy from `source` to `target`, at its "src" or "dst" end.

        Raises:
            PortError: there is no such copy, or more than one.
        """
        ends = (source.data_ptr(), target.data_ptr(), source.numel() * source.element_size())
        found = [(node, copy) for node, copy, recorded in self._copies if recorded == ends]
        if len(found) != 1:
            raise PortError(f"{len(found)} recorded copies lead from {ends[0]:#x} to {ends[1]:#x}")
        node, copy = found[0]
        set_ends, execution, context = self._set, self._execution, self._context
        field, reference, last = copy.field(end), ctypes.byref(copy), 0

        def port(address: int) -> None:
            nonlocal last
            if address == last:
                return
            setattr(copy, field, address)
            code = set_ends(execution, node, reference, context)
            if code:
                raise PortError(f"error {code} of the CUDA driver in setting an end of a recorded copy")
            last = address

        return port


def can_be_port(outside: torch.Tensor, inside: torch.Tensor) -> bool:
    """Whether copying between the two is a copy of one stretch of memory on their device."""
    return (
        # one of a type of its own may lie anywhere
        type(outside) in (torch.Tensor, torch.nn.Parameter)
        and outside.device == inside.device
        and outside.device.type in _DEVICES
        and outside.dtype == inside.dtype
        and outside.layout is torch.strided
        and outside.numel() > 0
        # a clone keeps the strides of what fills one stretch of memory, and of nothing else
        and outside.stride() == inside.stride()
        and not (outside.is_conj() or outside.is_neg())
    )


@functools.cache
def _driver() -> Any:
    try:
        # the calls are over in microseconds: other threads need not be let in meanwhile
        driver = ctypes.PyDLL("libcuda.so.1")
        for name in (
            "cuGraphGetNodes",
            "cuGraphNodeGetType",
            "cuGraphMemcpyNodeGetParams",
            "cuCtxGetCurrent",
        ):
            getattr(driver, name).restype = ctypes.c_int
        driver.cuGraphExecMemcpyNodeSetParams.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return driver


def _check(code: int) -> None:
    if code:
        raise PortError(f"error {code} of the CUDA driver in reading a recorded graph")


@functools.cache
def ports_work(device: torch.device) -> bool:
    """Whether the ends of recorded copies can be set here: tried once, on a graph of two copies."""
    if device.type != "cuda" or _driver() is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        return False
    first, second, held = (torch.full((4,), float(i), device=device) for i in range(3))
    rows = torch.zeros(3, 4, pin_memory=True)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        torch.cuda.synchronize(device)
        with RECORDING_GATE.closed(), torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            held.copy_(first, non_blocking=True)
            rows[0].copy_(held, non_blocking=True)
            graph.capture_end()
        graph.instantiate()
        ports = Ports(graph)
        read, write = ports.of(first, held, "src"), ports.of(held, rows[0], "dst")
        with torch.cuda.stream(stream):
            for source, row in ((second, rows[1]), (first, rows[2])):
                read(source.data_ptr())
                write(row.data_ptr())
                graph.replay()
        stream.synchronize()
    except RuntimeError:
        mend_failed_recording(stream)
        return False
    return rows.tolist() == [[0.0] * 4, [1.0] * 4, [0.0] * 4]
