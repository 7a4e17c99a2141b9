from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from hotloop.errors import HotloopError
from hotloop.hardware.processes import Processes
from hotloop.metrics import Means
from hotloop.metrics import means as means_module

CPU = torch.device("cpu")


@pytest.fixture
def means() -> Means:
    return Means(CPU, Processes())


def test_numbers_count_one_each(means: Means) -> None:
    for value in (1.0, torch.tensor(2.0), torch.tensor([3]), True, np.float32(0.5), torch.tensor(True)):
        means.add("a", value)
    assert means.names() == ["a"]
    assert means.read("a") == (1 + 2 + 3 + 1 + 0.5 + 1) / 6
    assert means.names() == []
    assert math.isnan(means.read("a"))


def test_a_mean_of_batches_weighted_by_size_is_the_mean_of_all_samples(means: Means) -> None:
    torch.manual_seed(0)
    values = torch.rand(103)
    for batch in values.split(10):
        means.add("by size", batch.mean(), len(batch))
        means.add("by size on device", batch.mean(), torch.tensor(len(batch)))
        means.add("by element", batch)
        means.add("correct", batch > 0.5)
    expected = values.double().mean().item()
    assert means.read("by size") == pytest.approx(expected, rel=1e-7)  # the batch means are float32
    assert means.read("by size on device") == pytest.approx(expected, rel=1e-7)
    assert means.read("by element") == pytest.approx(expected, rel=1e-15)
    assert means.read("correct") == (values > 0.5).sum().item() / 103


def test_weights_broadcast_over_elements(means: Means) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    weight = torch.tensor([[1.0], [0.0], [3.0]])
    means.add("a", value, weight)
    expected = sum(w * v for w, row in zip((1, 0, 3), value.tolist(), strict=True) for v in row) / (4 * 4)
    assert means.read("a") == expected
    means.add("b", value, 2.5)
    means.add("b", torch.tensor(100.0), 30.0)
    assert means.read("b") == (66 * 2.5 + 3000) / 60


def test_what_has_no_weight_may_be_nan(means: Means) -> None:
    nan = float("nan")
    means.add("a", torch.tensor(nan), 0)
    means.add("a", nan, 0.0)
    means.add("a", torch.tensor(nan), torch.tensor(0.0))
    means.add("a", torch.tensor([nan, nan]), torch.tensor([0.0, 0.0]))
    means.add("a", torch.tensor([nan, 4.0, float("inf")]), torch.tensor([False, True, False]))
    assert means.read("a") == 4.0
    means.add("a", torch.tensor(nan), 0)
    assert math.isnan(means.read("a"))
    means.add("a", torch.tensor(nan))
    means.add("a", 1.0)
    assert math.isnan(means.read("a"))
    means.add("a", torch.empty(0))
    means.add("a", 2.0)
    assert means.read("a") == 2.0


def test_half_precision_values_are_summed_in_double(means: Means) -> None:
    value = torch.full((5000,), 0.1, dtype=torch.bfloat16)
    for _ in range(20):
        means.add("a", value)
    assert means.read("a") == pytest.approx(value[0].item(), rel=1e-13)


def test_names_are_apart_and_reset_one_by_one(means: Means) -> None:
    means.add("a", 1.0)
    means.add("b", 2.0)
    assert means.read("a") == 1.0
    means.add("a", 5.0)
    assert means.read("b") == 2.0
    assert means.read("a") == 5.0


def test_graphs_are_not_kept_alive(means: Means) -> None:
    weight = torch.ones((), requires_grad=True)
    means.add("a", weight * 3)
    means.add("a", torch.ones(2) * weight, torch.ones(2) * weight)
    assert means.read("a") == 5 / 3


def test_nonsense_is_refused_by_name(means: Means) -> None:
    for value in (1j, torch.tensor(1j), "text", None, object()):
        with pytest.raises(HotloopError, match="'accuracy'"):
            means.add("accuracy", value)
    with pytest.raises(HotloopError, match=r"\[3\].*\[2\]"):
        means.add("accuracy", torch.zeros(2), torch.zeros(3))
    assert math.isnan(means.read("accuracy"))


class TestOnADevice:
    """The sums of `_DeviceSums`, which on the CPU no value reaches by itself."""

    def test_double_sums(self) -> None:
        sums = means_module._DeviceSums(CPU)
        sums.add(torch.tensor(3.0), torch.tensor([2.0]), 2.0)
        sums.add(torch.tensor(True), torch.tensor(4), 0.5)
        sums.add(torch.tensor([7], dtype=torch.int64), torch.tensor(True))
        sums.add(torch.tensor(0.0), None)
        assert sums.read() == (13.5, 7.0)

    def test_pairs_of_floats_lose_nothing_that_matters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(means_module, "widest_float", lambda device: torch.float32)
        sums = means_module._DeviceSums(CPU)
        assert sums.lines.dtype == torch.float32
        generator = torch.Generator().manual_seed(0)
        values = [*(torch.rand(4000, generator=generator) * 1000).tolist(), 1e8, 1.0, -1e8]
        exact = Fraction(0)
        for value in values:
            tensor = torch.tensor(value)
            sums.add(tensor, torch.tensor(1.0))
            exact += Fraction(tensor.item())
        total, count = sums.read()
        assert count == len(values)
        assert total == pytest.approx(float(exact), rel=1e-11)
        plain = torch.zeros(())
        for value in values:
            plain += value
        assert abs(plain.item() - float(exact)) > 1e3 * abs(total - float(exact))


def test_state_goes_over_into_another_run() -> None:
    first = Means(CPU, Processes())
    first.add("a", 1.0)
    first._device["b"] = means_module._DeviceSums(CPU)
    first._device["b"].add(torch.tensor(6.0), torch.tensor(2.0))
    state = first.state_dict()
    first.add("a", 100.0)
    first._sums("b").add(torch.tensor(100.0), torch.tensor(1.0))
    second = Means(CPU, Processes())
    second.add("c", 1.0)
    second.load_state_dict(state)
    second.add("a", 3.0)
    assert second.names() == ["a", "b"]
    assert second.read("a") == 2.0
    assert second.read("b") == 3.0
