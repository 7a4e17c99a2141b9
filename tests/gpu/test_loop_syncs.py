"""A thousand steps with everything on: the host never waits for the device, but for the step it may be ahead of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
import hotloop.seeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMemcpyFromSymbol")


def build(tmp_path, **settings):
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    data = TensorDataset(x, x[:, :1] * 2)
    loop = hotloop.Loop(seed=0, record=tmp_path / "run", **settings)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    return loop, *loop.prepare(model, optimizer, scheduler, loader)


def train(loop, model, optimizer, scheduler, loader, updates):
    while loop.updates < updates:
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loop.backward(loss)
            loop.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loop.log(loss=loss)
            if loop.updates >= updates:
                return


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_thousand_steps_under_sync_debug_error(tmp_path, precision):
    made = build(tmp_path, precision=precision, nonfinite="skip", accumulation=2)
    train(*made, 20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(*made, 1020)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made[0].updates == 1020
    made[0].end_training()


def test_profiler_sees_no_synchronising_call(tmp_path):
    made = build(tmp_path, precision="bf16", nonfinite="skip", accumulation=2)
    train(*made, 50)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        train(*made, 250)
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    names = {}
    for event in events:
        if event.name.startswith("cuda"):
            names[event.name] = names.get(event.name, 0) + 1
    # one device synchronisation belongs to the profiler's own end
    found = {
        name: n
        for name, n in names.items()
        if name in WAITS and not (name == "cudaDeviceSynchronize" and n <= 1)
    }
    assert not found, names
    pageable = [
        e.name
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" in e.name and "Pageable" in e.name
    ]
    assert not pageable
    made[0].end_training()


def test_resident_twin_equals_plain_pytorch_with_tensor_lr(tmp_path):
    """The same fused kernel on the same tensor learning rate: every weight equal to the bit."""
    loop, model, optimizer, scheduler, loader = build(tmp_path, nonfinite="stop")
    train(loop, model, optimizer, scheduler, loader, 100)
    mine = [p.detach().clone() for p in model.parameters()]
    loop.end_training()

    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    data = TensorDataset(x, x[:, :1] * 2)
    hotloop.seeds.seed_everything(0)
    raw = nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True)
    carrier = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(carrier, 2000)
    made = 0
    while made < 100:
        for a, b in DataLoader(data, batch_size=64, shuffle=True):
            F.mse_loss(raw(a.cuda()), b.cuda()).backward()
            nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
            optimizer.step()
            carrier.step()
            scheduler.step()
            optimizer.param_groups[0]["lr"].fill_(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
            made += 1
            if made == 100:
                break
    for p, q in zip(mine, raw.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


def test_nan_at_a_chosen_step_stops_with_weights_before_it(tmp_path):
    loop, model, optimizer, scheduler, loader = build(tmp_path, nonfinite="stop")
    kept = {}
    with pytest.raises(hotloop.NonFiniteError) as caught:
        while True:
            for x, y in loader:
                if loop.updates == 37:
                    x = x * float("nan")
                    torch.cuda.synchronize()
                    kept = {k: v.clone() for k, v in model.state_dict().items()}
                loss = F.mse_loss(model(x), y)
                loop.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert caught.value.step == 37
    assert len(caught.value.indices) == 64
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    loop.end_training()


def test_skip_leaves_no_trace(tmp_path):
    loop, model, optimizer, scheduler, loader = build(tmp_path, nonfinite="skip")
    steps = 0
    for x, y in loader:
        before = {k: v.clone() for k, v in model.state_dict().items()}
        bad = steps in (0, 5, 6)
        loss = F.mse_loss(model(x * float("inf") if bad else x), y)
        loop.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert same == bad
        steps += 1
        if steps == 12:
            break
    assert loop.skipped == 3
    assert scheduler.state_dict()["last_epoch"] == 9
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3), 2000
    )
    for _ in range(9):
        reference.optimizer.step()
        reference.step()
    assert scheduler.get_last_lr() == reference.get_last_lr()
    loop.end_training()
