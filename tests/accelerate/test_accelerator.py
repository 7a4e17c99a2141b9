from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hotloop.accelerate import Accelerator
from hotloop.accelerate.optimizer import AcceleratedOptimizer
from hotloop.accelerate.scheduler import AcceleratedScheduler
from hotloop.accelerate.state import AcceleratorState, GradientState, PartialState
from hotloop.accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DummyOptim,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
)
from hotloop.errors import HotloopError, PrecisionError, SettingError


def _data(samples: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator))


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train(
    accelerator: Accelerator, *, epochs: int = 2, clip: float | None = None
) -> tuple[Any, list[float]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(_data(), batch_size=4), scheduler
    )
    rates = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    return model, rates


def _train_by_hand(steps: int, *, epochs: int = 2, clip: float | None = None) -> tuple[Any, list[float]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    rates = []
    done = 0
    for _ in range(epochs):
        batches = list(DataLoader(_data(), batch_size=4))
        for i, (x, y) in enumerate(batches):
            (F.mse_loss(model(x), y) / steps).backward()
            last = i == len(batches) - 1
            done = 0 if last else done + 1
            if last or done % steps == 0:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    return model, rates


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_training_is_that_of_the_plain_loop(steps: int, clip: float | None) -> None:
    model, rates = _train(Accelerator(gradient_accumulation_steps=steps), clip=clip)
    expected, expected_rates = _train_by_hand(steps, clip=clip)
    assert torch.equal(_weights(model), _weights(expected))
    assert rates == expected_rates


def test_prepare_returns_the_same_model_and_passes_others_through() -> None:
    accelerator = Accelerator()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thing = object()
    prepared, made, nothing, other = accelerator.prepare(model, optimizer, None, thing)
    assert prepared is model
    assert model._is_accelerate_prepared
    assert isinstance(made, AcceleratedOptimizer)
    assert isinstance(made, torch.optim.Optimizer)
    assert made.optimizer is optimizer
    assert nothing is None
    assert other is thing
    assert accelerator.prepare(made) is made
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model


def test_an_optimizer_may_come_before_its_model_and_a_scheduler_alone() -> None:
    accelerator = Accelerator()
    model = _model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    model = accelerator.prepare(model)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.1))
    assert isinstance(scheduler, AcceleratedScheduler)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_bf16_computes_in_bf16_and_returns_fp32() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(_model())
    x = torch.randn(4, 3)
    out = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = _model()(x)
    assert expected.dtype == torch.bfloat16
    assert out.dtype == torch.float32
    assert torch.equal(out, expected.float())
    with accelerator.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (x @ x.T).dtype == torch.float32
    assert accelerator.native_amp
    assert accelerator.scaler is None


def test_a_precision_that_the_device_has_not_is_an_error() -> None:
    from hotloop.hardware.precisions import supported_precisions

    if "fp16" in supported_precisions(torch.device("cpu")):
        pytest.skip("this CPU computes in fp16")
    with pytest.raises(PrecisionError, match="bf16"):
        Accelerator(mixed_precision="fp16")


def test_a_second_accelerator_shares_the_state_and_may_not_contradict_it() -> None:
    first = Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    assert Accelerator().state.__dict__ is first.state.__dict__
    with pytest.raises(SettingError, match="mixed_precision='fp16'"):
        Accelerator(mixed_precision="fp16")
    AcceleratorState._reset_state()
    with pytest.raises(
        AttributeError, match=r"`AcceleratorState` object has no attribute `distributed_type`"
    ):
        first.prepare(_model())


def test_what_is_not_supported_says_what_to_use() -> None:
    with pytest.raises(NotImplementedError, match="replicas"):
        FullyShardedDataParallelPlugin()
    with pytest.raises(NotImplementedError, match="DeepSpeed"):
        DummyOptim([])
    with pytest.raises(HotloopError, match="deepspeed_plugin"):
        Accelerator(deepspeed_plugin=object())
    with pytest.raises(NotImplementedError, match="bf16"):
        Accelerator(mixed_precision="fp8")
    AcceleratorState._reset_state()
    with pytest.raises(SettingError, match="Unknown mixed_precision mode"):
        Accelerator(mixed_precision="fp17")
    with pytest.raises(NotImplementedError, match="LOMO"):
        Accelerator().lomo_backward(torch.zeros(()), 0.1)
    with pytest.raises(SettingError, match="only pass one"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])
    with pytest.raises(SettingError, match="not both"):
        Accelerator(
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )


def test_an_abandoned_evaluation_leaves_the_window_alone() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, other = accelerator.prepare(
        model, optimizer, DataLoader(_data(20), batch_size=4), DataLoader(_data(12), batch_size=4)
    )
    flags = []
    kept: Iterator[Any] = iter(other)
    for i, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            flags.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        if i == 1:
            with torch.no_grad():
                for x, _ in other:
                    model(x)
                    break
                next(kept)  # an evaluation that is neither finished nor dropped
    # 5 batches in windows of 2: the last one is an update too
    assert flags == [False, True, False, True, True]


def test_gather_for_metrics_drops_nothing_on_one_process() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_data(22), batch_size=4))
    seen = torch.cat([accelerator.gather_for_metrics(y) for _, y in loader])
    assert torch.equal(seen, _data(22).tensors[1])
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]


def test_weighting_by_samples_corrects_short_windows() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, weighting="samples")
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = _data(19)  # batches of 4: windows of 16 and of 3 samples
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    expected = _model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for rows in (slice(0, 16), slice(16, 19)):
        F.mse_loss(expected(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(_weights(model), _weights(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("clip", [True, False])
def test_weighting_by_samples_leaves_gradients_as_scripts_expect_them(clip: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, weighting="samples")
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(torch.ones(5, 1), batch_size=1)
    )
    norms, after = [], []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            if accelerator.sync_gradients and clip:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            optimizer.step()
            if accelerator.sync_gradients:
                after.append(model.weight.grad.item())
            optimizer.zero_grad()
    assert norms == ([1.0, 1.0] if clip else [])
    assert after == ([1.0, 1.0] if clip else [1.0, 0.25])


def test_skipping_batches_keeps_the_end_of_the_epoch_and_its_number() -> None:
    accelerator = Accelerator()
    torch.manual_seed(3)
    loader = accelerator.prepare(DataLoader(range(22), batch_size=4, shuffle=True))
    short = accelerator.skip_first_batches(loader, 2)
    assert len(short) == 4
    got, ends = [], []
    for batch in short:
        got.append(batch)
        ends.append((accelerator.gradient_state.end_of_dataloader, accelerator.gradient_state.remainder))
    assert [len(b) for b in got] == [4, 4, 4, 2]
    assert ends == [(False, 2)] * 3 + [(True, 2)]
    assert loader.iteration == 1
    stream = accelerator.prepare(DataLoader(_Numbers(), batch_size=4))
    assert torch.cat(list(accelerator.skip_first_batches(stream, 1))).tolist() == list(range(4, 10))


class _Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


def test_free_memory_forgets_everything() -> None:
    accelerator = Accelerator()
    model, optimizer = _model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None
    assert optimizer is None
    assert accelerator._models == []
    assert accelerator._optimizers == []
    again = _model()
    prepared, _ = accelerator.prepare(again, torch.optim.SGD(again.parameters(), lr=0.1))
    assert prepared is again


def test_pickling_and_copying() -> None:
    accelerator = Accelerator()
    model = _model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters()), DataLoader(_data(8), batch_size=4)
    )
    back = pickle.loads(pickle.dumps(accelerator))
    assert back.state.__dict__ is accelerator.state.__dict__
    assert copy.deepcopy(accelerator) is accelerator
    restored = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(restored, AcceleratedOptimizer)
    assert restored.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 2


def test_triggers_are_seen_once() -> None:
    accelerator = Accelerator()
    assert accelerator.check_trigger() is False
    accelerator.set_trigger()
    assert accelerator.check_trigger() is True
    assert accelerator.check_trigger() is False


def test_state_can_be_changed_where_scripts_change_it() -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs()]
    )
    accelerator.gradient_accumulation_steps = 5
    assert GradientState().num_steps == 5
    accelerator.sync_gradients = False
    assert GradientState().sync_gradients is False
    assert accelerator.state.deepspeed_plugin is None
    assert accelerator.parallelism_config is None
    assert PartialState().process_index == 0
    with accelerator.main_process_first(), accelerator.maybe_context_parallel():
        pass


def test_profiles_are_written_per_process(tmp_path: Any) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    accelerator = Accelerator(kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(3) + 1
    assert len(profiler.key_averages()) > 0
    assert [p.name for p in tmp_path.iterdir()] == ["profile_0.json"]
    with pytest.raises(SettingError, match="Invalid profiler activity"):
        ProfileKwargs(activities=["tea"]).build()


def test_every_member_of_accelerates_class_is_there() -> None:
    accelerate = pytest.importorskip("accelerate")
    public = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert public - set(dir(Accelerator)) == set()


def test_an_overflow_holds_the_schedule_and_halves_the_scale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from hotloop.precision import formats

    found = formats.supported_precisions
    # few CPUs compute in fp16, but all can be made to try
    monkeypatch.setattr(
        formats, "supported_precisions", lambda device: {**found(device), "fp16": "for this test"}
    )
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for step in range(3):
        loss = model(torch.ones(3, 2)).mean()
        accelerator.backward(loss * (1e38 if step == 1 else 1.0))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        before = model.weight.detach().clone()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped = torch.equal(before, model.weight.detach())
        assert skipped == accelerator.optimizer_step_was_skipped
        seen.append(
            (norm.isfinite().item(), skipped, accelerator.scaler.get_scale(), scheduler.get_last_lr()[0])
        )
    assert seen == [(True, False, 1024.0, 0.05), (False, True, 512.0, 0.05), (True, False, 512.0, 0.025)]
    accelerator.save_state(tmp_path / "state")
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 2.0})
    accelerator.load_state(tmp_path / "state")
    assert accelerator.scaler.state_dict()["scale"] == 512.0
    assert accelerator.scaler.state_dict()["_growth_tracker"] == 1
    accelerator.backward(model(torch.ones(3, 2)).mean())
    accelerator.unscale_gradients()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    with pytest.raises(NotImplementedError, match=r"0\.5"):
        Accelerator(kwargs_handlers=[GradScalerKwargs(growth_factor=4.0)])
