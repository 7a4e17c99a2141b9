from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hotloop.errors import HotloopError
from hotloop.state.ring import DeviceRing, HostRing, Ring, open_ring, widest_float

CPU = torch.device("cpu")


# A DeviceRing on the CPU takes the same way as on an accelerator, but for the side stream.
@pytest.fixture(params=[HostRing, DeviceRing])
def ring(request: pytest.FixtureRequest) -> Ring:
    return HostRing(1024) if request.param is HostRing else DeviceRing(CPU, 1024)


def test_the_cpu_has_no_device_ring() -> None:
    assert isinstance(open_ring(CPU), HostRing)
    assert widest_float(CPU) is torch.float64


def test_rows_come_out_as_they_went_in(ring: Ring) -> None:
    loss = torch.tensor(0.5, requires_grad=True) * 3
    ring.write(7, {"loss": loss, "lr": 0.1, "count": torch.tensor(3), "done": True, "stage": "warm-up"})
    ring.write(8, {"accuracy": torch.tensor([0.25], dtype=torch.bfloat16), "flag": torch.tensor(False)})
    first, second = ring.drain()
    assert first.step == 7
    assert first.values == {"loss": 1.5, "lr": 0.1, "count": 3, "done": True, "stage": "warm-up"}
    assert list(first.values) == ["loss", "lr", "count", "done", "stage"]
    assert [type(value) for value in first.values.values()] == [float, float, int, bool, str]
    assert second.step == 8
    assert second.values == {"accuracy": 0.25, "flag": False}
    assert type(second.values["flag"]) is bool
    assert first.time_s <= second.time_s
    assert ring.drain() == []


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    ],
)
def test_every_real_dtype_keeps_its_value(ring: Ring, dtype: torch.dtype) -> None:
    value = torch.tensor(1.3).to(dtype)
    ring.write(0, {"a": value})
    ring.write(1, {"a": value, "b": value.reshape(1, 1)})
    rows = ring.drain()
    expected = value.item()
    assert [row.values for row in rows] == [{"a": expected}, {"a": expected, "b": expected}]
    assert type(rows[0].values["a"]) is type(expected)


def test_non_finite_values_pass(ring: Ring) -> None:
    ring.write(0, {"nan": torch.tensor(float("nan")), "inf": torch.tensor(float("-inf"))})
    values = ring.drain()[0].values
    assert np.isnan(values["nan"])
    assert values["inf"] == float("-inf")


def test_numpy_scalars_are_plain_when_they_come_out(ring: Ring) -> None:
    ring.write(0, {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.array(2.0)})
    values = ring.drain()[0].values
    assert values == {"a": 0.5, "b": 3, "c": True, "d": 2.0}
    assert [type(value) for value in values.values()] == [float, int, bool, float]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (torch.zeros(2), r"'x' is a tensor of shape \[2\]"),
        (torch.zeros(0), r"shape \[0\]"),
        (torch.tensor(1j), "complex"),
        (np.zeros(3), r"an array of shape \[3\]"),
        ([0.1], r"list \[0\.1\]"),
        (None, "NoneType"),
        (1j, "complex"),
    ],
)
def test_what_is_not_one_number_is_refused_by_name(ring: Ring, value: object, seen: str) -> None:
    with pytest.raises(HotloopError, match=seen):
        ring.write(0, {"x": value})
    assert ring.drain() == []
    ring.write(1, {"x": 1.0})
    assert ring.drain()[0].step == 1


def test_the_value_is_that_of_the_moment_of_writing() -> None:
    for ring in (HostRing(8), DeviceRing(CPU, 8)):
        value = torch.tensor(1.0)
        ring.write(0, {"a": value})
        value.fill_(2.0)
        assert ring.drain()[0].values == {"a": 1.0}


def test_a_full_ring_refuses_new_rows_and_counts_them() -> None:
    for ring in (HostRing(4), DeviceRing(CPU, 4)):
        for step in range(7):
            ring.write(step, {"a": torch.tensor(float(step))})
        assert ring.dropped == 3
        assert ring.waiting() == 4
        assert [(row.step, row.values["a"]) for row in ring.drain()] == [(s, float(s)) for s in range(4)]
        ring.write(9, {"a": torch.tensor(9.0)})
        assert [(row.step, row.values["a"]) for row in ring.drain()] == [(9, 9.0)]
        assert ring.dropped == 3


def test_rows_survive_wrapping_and_widening() -> None:
    ring = DeviceRing(CPU, 8)
    step = 0
    for width in (1, 3, 5, 9, 2, 40, 1):
        expected = []
        for _ in range(5):
            values = {f"v{i}": torch.tensor(float(100 * step + i)) for i in range(width)}
            ring.write(step, values)
            expected.append((step, {name: value.item() for name, value in values.items()}))
            step += 1
        assert [(row.step, row.values) for row in ring.drain()] == expected
    # rows of two widths waiting at once, in different memory
    ring.write(0, {f"v{i}": torch.tensor(float(i)) for i in range(50)})
    ring.write(1, {"host": 1})
    ring.write(2, {f"v{i}": torch.tensor(float(i)) for i in range(100)})
    assert [len(row.values) for row in ring.drain()] == [50, 1, 100]
    assert ring.dropped == 0


def test_rows_are_written_in_any_grad_mode(ring: Ring) -> None:
    with torch.inference_mode():
        ring.write(0, {"a": torch.ones(()), "b": torch.ones(())})
    with torch.no_grad():
        ring.write(1, {"a": torch.ones(())})
    weight = torch.ones((), requires_grad=True)
    ring.write(2, {"a": weight, "b": weight * 2})
    assert [row.values["a"] for row in ring.drain()] == [1.0, 1.0, 1.0]


def test_nothing_is_fetched_from_the_device_in_a_pause() -> None:
    ring = DeviceRing(CPU, 8)
    ring.write(0, {"a": torch.tensor(1.0)})
    with ring.pause(), ring.pause():
        assert ring.drain() == []
        ring.write(1, {"a": torch.tensor(2.0)})
        other = []
        thread = threading.Thread(target=lambda: other.append(ring.lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert other == [False]
    assert [row.step for row in ring.drain()] == [0, 1]


def test_no_row_is_torn_or_lost_between_threads() -> None:
    for ring in (HostRing(64), DeviceRing(CPU, 64)):
        written = 3000
        rows = []
        done = threading.Event()

        def read(ring: Ring = ring, rows: list = rows, done: threading.Event = done) -> None:
            while not done.is_set():
                rows.extend(ring.drain())
                time.sleep(0.001)

        reader = threading.Thread(target=read)
        reader.start()
        for step in range(written):
            value = torch.tensor(float(step))
            ring.write(step, {"a": value, "b": value * 2, "host": step})
        done.set()
        reader.join()
        rows += ring.drain()
        assert len(rows) + ring.dropped == written
        assert [row.step for row in rows] == sorted(row.step for row in rows)
        for row in rows:
            assert row.values == {"a": float(row.step), "b": 2.0 * row.step, "host": row.step}


def test_several_writers_share_a_ring() -> None:
    for ring in (HostRing(10_000), DeviceRing(CPU, 10_000)):

        def write(first: int, ring: Ring = ring) -> None:
            for step in range(first, first + 300):
                ring.write(step, {"a": torch.tensor(float(step))})

        threads = [threading.Thread(target=write, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = ring.drain()
        assert len(rows) == 1200
        assert all(row.values["a"] == row.step for row in rows)


def test_forget_empties_and_works_again(ring: Ring) -> None:
    ring.write(0, {"a": torch.tensor(1.0)})
    ring.forget()
    assert ring.drain() == []
    ring.write(1, {"a": torch.tensor(2.0)})
    assert [row.step for row in ring.drain()] == [1]


def test_a_ring_of_no_rows_is_refused() -> None:
    with pytest.raises(HotloopError, match="1 or more"):
        DeviceRing(CPU, 0)
