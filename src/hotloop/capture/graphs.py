"""Recording a stretch of device work once and launching it as one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from hotloop.capture.ports import Port, PortError, Ports, ports_work
from hotloop.hardware.gate import RECORDING_GATE
from hotloop.hardware.recording import mend_failed_recording, own_casts, run_on

__all__ = ["CudaRecorder", "CudaRecording", "Recorder", "Recording"]

Feed = tuple[torch.Tensor, torch.Tensor]


class Recording(Protocol):
    """Recorded device work."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def port(self, source: torch.Tensor, target: torch.Tensor, end: str) -> Port:
        """What sets one end, "src" or "dst", of the one recorded copy from `source` to `target`.

        Raises:
            PortError: there is no such copy, or the device does not offer it.
        """


class Recorder(Protocol):
    """What records device work.

    Attributes:
        runs_while_recording: recording also does the work once, so that the first replay is already done.
        ports: the ends of recorded copies can be set anew for each launch.
    """

    runs_while_recording: bool

    @property
    def ports(self) -> bool:
        """See above."""

    def warm(self, work: Callable[[], Any]) -> Any:
        """Do `work` once, where it would be recorded."""

    def record(
        self,
        work: Callable[[], Any],
        generators: Sequence[torch.Generator] = (),
        feeds: Sequence[Feed] | None = None,
    ) -> tuple[Recording, Any]:
        """Record `work`; returns the recording and what `work` returned.

        Args:
            work: what is recorded.
            generators: those beside the device's default one that it may draw from: replays go on drawing.
            feeds: with ports, copies (from, to) that are recorded before `work`; None for a recording without ports.
        """

    def apart(self) -> Recorder:
        """One on the same stream whose recordings are in memory of their own.

        In shared memory what a recording leaves for another to read lasts only as long as none is replayed in between.
        """

    def pool_bytes(self) -> int:
        """Device memory that the recordings made so far hold, together."""

    def drop_pool(self, recordings: Sequence[Recording]) -> None:
        """Give up `recordings` and the memory that all made so far have in common; later ones begin a new one."""

    def mark_time(self) -> Any:
        """A point in the current stream's work."""

    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        """Milliseconds of device time between two points; None while the second is not reached."""


class CudaRecording:
    """A CUDA graph.

    Attributes:
        graph: torch's.
        pool: the memory pool that it shares with others.
        replay: launches it on the current stream.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any, ports: Ports | None) -> None:
        self.graph = graph
        self.pool = pool
        self.replay = graph.replay
        self._ports = ports

    def port(self, source: torch.Tensor, target: torch.Tensor, end: str) -> Port:
        """See `Recording.port`."""
        if self._ports is None:
            raise PortError("recorded without ports")
        return self._ports.of(source, target, end)


class CudaRecorder:
    """CUDA graphs on a stream of their own, with one memory pool for all.

    Capture is thread-local: other threads may make CUDA calls meanwhile as long as they keep off this stream. Those of
    loaders make none (see `hotloop.hardware.gate`).
    """

    runs_while_recording = False

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if stream is None else stream
        self._pool: Any = None
        self._made: weakref.WeakSet[CudaRecording] = weakref.WeakSet()

    def close(self) -> None:
        """Give up all recordings, which cannot be launched after that; waits for the device."""
        try:
            torch.cuda.synchronize(self._device)
        finally:
            for recording in tuple(self._made):
                with suppress(RuntimeError):
                    recording.graph.reset()
            self._made.clear()

    def warm(self, work: Callable[[], Any]) -> Any:
        """See `Recorder.warm`. On the stream that will record, so that autograd's nodes belong to it."""
        return run_on(self.stream, work)

    @property
    def ports(self) -> bool:
        """Whether the ends of recorded copies can be set; found out when it is first asked."""
        return ports_work(self._device)

    def record(
        self,
        work: Callable[[], Any],
        generators: Sequence[torch.Generator] = (),
        feeds: Sequence[Feed] | None = None,
    ) -> tuple[CudaRecording, Any]:
        """See `Recorder.record`.

        Raises:
            RuntimeError: something in `work` cannot be recorded; the stream is usable again.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True) if feeds is not None else torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        # a collection in the middle could free device memory that the capture may not touch
        gc.collect()
        torch.cuda.synchronize(self._device)
        # torch takes no pool again whose graphs are all gone
        if not any(made.pool == self._pool for made in tuple(self._made)):
            self._pool = torch.cuda.graph_pool_handle()
        was_enabled = gc.isenabled()
        gc.disable()
        # cuBLAS keeps a workspace per stream, made by the warm-up outside this graph's memory. Others may free it
        # (reduce-overhead compilation does), and the graph would go on writing there. Without one, the capture makes
        # its own in its pool; dropped again afterwards, that one is nobody else's.
        _drop_workspaces()
        try:
            with RECORDING_GATE.closed(), torch.cuda.stream(self.stream), own_casts():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    for source, place in feeds or ():
                        place.copy_(source, non_blocking=True)
                    result = work()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
                if feeds is not None:
                    graph.instantiate()
        except BaseException:
            mend_failed_recording(self.stream)
            # what the allocator makes of the pool now is not known: later recordings begin another
            self._pool = None
            raise
        finally:
            _drop_workspaces()
            if was_enabled:
                gc.enable()
        recording = CudaRecording(graph, self._pool, Ports(graph) if feeds is not None else None)
        self._made.add(recording)
        return recording, result

    def apart(self) -> CudaRecorder:
        """See `Recorder.apart`; `close` gives up its recordings, too."""
        other = CudaRecorder(self._device, self.stream)
        other._made = self._made
        return other

    def pool_bytes(self) -> int:
        """See `Recorder.pool_bytes`; walks the allocator's segments, so it is for after a recording."""
        if self._pool is None:
            return 0
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", ())) == tuple(self._pool)
        )

    def drop_pool(self, recordings: Sequence[Recording]) -> None:
        """See `Recorder.drop_pool`; waits for the device, which may be running one of them."""
        torch.cuda.synchronize(self._device)
        for recording in recordings:
            assert isinstance(recording, CudaRecording)
            recording.graph.reset()
        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def mark_time(self) -> torch.cuda.Event:
        """See `Recorder.mark_time`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """See `Recorder.elapsed_ms`."""
        return float(start.elapsed_time(end)) if end.query() else None


def _drop_workspaces() -> None:
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()
