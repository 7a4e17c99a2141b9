from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch

from hotloop.hardware.processes import Processes
from hotloop.metrics import Log, Means
from hotloop.state.ring import DeviceRing, Row, open_ring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture
def no_waiting(device: torch.device) -> Iterator[None]:
    """Any synchronising call of any thread raises."""
    torch.zeros(1, device=device).item()  # the context is up
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


class Kept:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write_rows(self, rows: list[Row]) -> None:
        self.rows.extend(rows)

    def close(self) -> None:
        pass


def keep_busy(device: torch.device, cycles: int = 200_000_000) -> None:
    """Work that takes the device about a tenth of a second and the host nothing."""
    torch.cuda._sleep(cycles)


def test_values_of_every_kind_arrive_in_order(device: torch.device) -> None:
    ring = open_ring(device)
    assert isinstance(ring, DeviceRing)
    loss = torch.tensor(0.5, device=device, requires_grad=True) * 3
    ring.write(7, {"loss": loss, "lr": 0.1, "n": torch.tensor([3], device=device), "host": torch.tensor(2.5)})
    ring.write(
        8, {"half": loss.bfloat16(), "flag": loss > 1, "text": "x", "big": torch.tensor(2**40, device=device)}
    )
    first, second = ring.drain()
    assert first.values == {"loss": 1.5, "lr": 0.1, "n": 3, "host": 2.5}
    assert second.values == {"half": 1.5, "flag": True, "text": "x", "big": 2**40}
    assert list(second.values) == ["half", "flag", "text", "big"]


@pytest.mark.usefixtures("no_waiting")
def test_a_thousand_rows_without_any_synchronising_call(device: torch.device) -> None:
    sink = Kept()
    log = Log(device, [sink])
    for step in range(1000):
        value = torch.full((), float(step), device=device)
        log.write(step, {"one": value})
        log.write(step, {"one": value, "two": value * 2, "host": step})
        if step % 50 == 0:
            time.sleep(0.06)
    log.close()
    assert log.errors == []
    assert log.dropped == 0
    assert len(sink.rows) == 2000
    for row in sink.rows:
        assert row.values["one"] == row.step
        assert row.values.get("two", 2 * row.step) == 2 * row.step


@pytest.mark.usefixtures("no_waiting")
def test_writing_does_not_wait_for_a_busy_device(device: torch.device) -> None:
    ring = open_ring(device)
    ring.write(0, {"a": torch.zeros((), device=device)})
    ring.drain()
    event = torch.cuda.Event()
    keep_busy(device, 2_000_000_000)
    event.record()
    for step in range(200):
        ring.write(step, {"a": torch.full((), float(step), device=device)})
    assert not event.query()
    assert [row.values["a"] for row in ring.drain()] == [float(step) for step in range(200)]
    assert event.query()


def test_other_threads_run_while_the_reader_waits(device: torch.device) -> None:
    ring = open_ring(device)
    ring.write(0, {"a": torch.zeros((), device=device)})
    ring.drain()
    keep_busy(device, 2_000_000_000)
    ring.write(1, {"a": torch.ones((), device=device)})
    rows: list[Row] = []
    reader = threading.Thread(target=lambda: rows.extend(ring.drain()))
    reader.start()
    turns = 0
    while reader.is_alive():
        turns += 1
    assert turns > 100_000  # the interpreter was ours, not the waiting thread's
    assert [row.values["a"] for row in rows] == [1.0]


def test_rows_written_on_several_streams_are_all_waited_for(device: torch.device) -> None:
    ring = open_ring(device)
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    for turn in range(5):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                value = torch.zeros((), device=device)
                keep_busy(device, 20_000_000 * (3 - number))
                value.add_(10 * turn + number)
                ring.write(number, {"a": value})
        assert [row.values["a"] for row in ring.drain()] == [10.0 * turn + number for number in range(3)]


def test_full_and_wrapping_rings_never_tear_a_row(device: torch.device) -> None:
    ring = DeviceRing(device, 64)
    rows: list[Row] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            rows.extend(ring.drain())

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(5000):
        value = torch.full((), float(step), device=device)
        ring.write(step, {"a": value, "b": value * 2} if step % 3 else {"a": value})
    done.set()
    reader.join()
    rows += ring.drain()
    assert len(rows) + ring.dropped == 5000
    for row in rows:
        assert row.values["a"] == row.step
        assert row.values.get("b", 2 * row.step) == 2 * row.step


def test_a_graph_is_captured_beside_a_busy_log(device: torch.device) -> None:
    sink = Kept()
    log = Log(device, [sink])
    x = torch.ones(64, device=device)
    total = torch.zeros((), device=device)
    for step in range(20):
        log.write(step, {"a": total})
        with log.pause():
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                (x * 2).sum()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                total.add_((x * 2).sum())
                time.sleep(0.02)
        graph.replay()
        log.write(100 + step, {"a": total})
    log.close()
    assert log.errors == []
    values = {row.step: row.values["a"] for row in sink.rows}
    assert [values[step] for step in range(20)] == [128.0 * step for step in range(20)]
    assert [values[100 + step] for step in range(20)] == [128.0 * (step + 1) for step in range(20)]


@pytest.mark.usefixtures("no_waiting")
def test_means_add_without_a_wait_and_read_exactly(device: torch.device) -> None:
    means = Means(device, Processes())
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(100, 32, generator=generator)
    with_weight = torch.arange(100)
    set_mode("default")
    on_device, weights = values.to(device), with_weight.to(device)
    set_mode("error")
    for row, weight in zip(on_device.unbind(), weights.unbind(), strict=True):
        means.add("elements", row)
        means.add("scaled", row.mean(), 32)
        means.add("weighted", row[0], weight)
        means.add("masked", torch.where(weight == 0, float("nan"), row[0]), weight)
        means.add("mixed", row[:2], torch.tensor(2.0))
        means.add("half", row.bfloat16())
    set_mode("default")
    wide = values.double()
    weighted = ((wide[:, 0] * with_weight).sum() / with_weight.sum()).item()
    assert means.read("elements") == pytest.approx(wide.mean().item(), rel=1e-14)
    assert means.read("scaled") == pytest.approx(wide.mean().item(), rel=1e-6)
    assert means.read("weighted") == pytest.approx(weighted, rel=1e-14)
    assert means.read("masked") == pytest.approx(weighted, rel=1e-14)
    assert means.read("mixed") == pytest.approx(wide[:, :2].mean().item(), rel=1e-14)
    assert means.read("half") == pytest.approx(values.bfloat16().double().mean().item(), rel=1e-14)
