"""Recordings under a cap of memory: the one used least recently goes."""

import pytest
import torch

from hotloop.errors import CaptureError, SettingError


def test_the_least_recently_used_goes_and_the_others_come_back(graph_loop, capsys):
    loop = graph_loop()
    step = loop.capture(lambda x: 2 * x, pool_bytes=200)
    for length in (1, 1, 1, 1, 1, 2, 2, 2, 1, 3, 3, 3):
        assert torch.equal(step(torch.ones(length)), torch.full((length,), 2.0))
    # 1 and 2 fit; 3 sends 2 away, which was used before 1
    assert step.evictions == 1
    assert "200" not in capsys.readouterr().err
    lengths = [e.key[-1][0][0][0] for e in step._recordings]
    assert lengths == [1, 3]
    captures = step.captures
    for length in (1, 3, 1, 3):
        step(torch.ones(length))
    # 3 was recorded anew by its third call
    assert step.captures == captures + 1 == 5
    assert step.evictions == 1


def test_what_was_given_up_twice_is_not_recorded_again(graph_loop, capsys):
    loop = graph_loop()
    step = loop.capture(lambda x: 2 * x, pool_bytes=100)
    for _ in range(30):
        for length in (1, 2):
            assert torch.equal(step(torch.ones(length)), torch.full((length,), 2.0))
    assert step.evictions <= 4
    assert step.captures <= 8
    assert "given up 2 times for memory" in capsys.readouterr().err


def test_one_that_is_too_large_alone_runs_eagerly_and_says_the_bytes(graph_loop, capsys):
    loop = graph_loop()
    step = loop.capture(lambda x: 2 * x, pool_bytes=50)
    step._recorder.bytes_each = 2**20
    for _ in range(8):
        assert step(torch.ones(1)).item() == 2.0
    assert step.captures == 1
    assert "1.0 MiB and pool_bytes allows 0.0 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("others", [False, True])
def test_memory_that_runs_out_while_recording(graph_loop, others, monkeypatch, capsys):
    loop = graph_loop()
    step = loop.capture(lambda x: 2 * x)
    recorder = step._recorder
    if others:
        for _ in range(5):
            step(torch.ones(1))
    record, failures = recorder.record, [1]

    def short(work, generators=(), feeds=None):
        if failures.pop() if failures else 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return record(work, generators, feeds)

    monkeypatch.setattr(recorder, "record", short)
    for _ in range(8):
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))
    said = capsys.readouterr().err
    assert step.reason is None
    if others:
        assert "other recordings are made anew" in said
        assert step.captures == 2
    else:
        assert "Tried to allocate 2.00 GiB" in said
        assert step.captures == 0


def test_pool_bytes_has_to_be_a_count(graph_loop):
    with pytest.raises(SettingError, match="pool_bytes"):
        graph_loop().capture(lambda x: x, pool_bytes=0)


def test_an_argument_that_is_another_number_each_time_is_an_error_with_its_cure(graph_loop):
    step = graph_loop().capture(lambda x, k: x * k)
    with pytest.raises(CaptureError, match=r"loop\.scalar"):
        for k in range(40):
            step(torch.ones(1), k)


def test_one_number_with_many_shapes_is_no_error(graph_loop):
    step = graph_loop().capture(lambda x, k: x * k)
    for _ in range(3):
        for length in range(1, 14):
            assert torch.equal(step(torch.ones(length), 2.0), torch.full((length,), 2.0))


def test_an_object_is_known_by_its_identity_and_kept(graph_loop):
    class Factor:
        def __init__(self, value):
            self.value = value

    step = graph_loop().capture(lambda x, f: x * f.value)
    for i in range(20):
        # without being kept, the next one may come to lie where this one lay
        assert step(torch.ones(1), Factor(float(i))).item() == i


def test_numbers_that_come_again_are_recorded_each(graph_loop):
    step = graph_loop().capture(lambda x, k: x * k)
    for i in range(40):
        assert step(torch.ones(1), 1 + i % 2).item() == 1 + i % 2
    assert step.captures == 2
    # 2 and 2.0 are equal, and give another dtype
    assert step(torch.ones(1, dtype=torch.int64), 2).dtype == torch.int64
    assert step(torch.ones(1, dtype=torch.int64), 2.0).dtype == torch.float32


def test_an_argument_that_wants_a_gradient_runs_eagerly(graph_loop, capsys):
    loop = graph_loop(nonfinite="ignore")

    @loop.capture
    def step(x):
        loss = x.square().sum()
        loop.backward(loss)
        return loss

    for i in range(6):
        x = torch.full((2,), float(i), requires_grad=True)
        step(x)
        assert torch.equal(x.grad, torch.full((2,), 2.0 * i))
    assert "requires a gradient" in capsys.readouterr().err


def test_large_and_small_arguments_are_brought_alike(graph_loop):
    step = graph_loop().capture(lambda x, y, z: (x.sum(), y + 1, z + 1))
    for i in range(6):
        large, small, other = torch.full((70_000,), float(i)), torch.full((3,), 2.0 * i), torch.tensor(i)
        total, y, z = step(large, small, other)
        assert total.item() == 70_000.0 * i
        assert y.tolist() == [2.0 * i + 1] * 3
        assert z.item() == i + 1
    assert step.captures == 1
