"""hotloop's optimizers on two processes equal one process with the same global batch."""

import pytest
import torch

pytestmark = pytest.mark.multi


def train_all(rank, world):
    """Losses and weights of each optimizer, on the host's state and on a device's: the same code for one and two."""
    import os

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop.loop import loop as loop_module
    from hotloop.optim import EMA, SGD, AdamW, Muon, masters_of, split_matrices
    from hotloop.state import ResidentState

    os.environ["HOTLOOP_PROGRESS"] = "0"
    torch.set_num_threads(1)
    kept = loop_module.make_state
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :2])
    makers = {
        "adamw": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
        "sgd": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        "muon": lambda m: Muon(split_matrices(m), lr=0.02, adamw_lr=0.005),
    }
    found = {}
    for name, make in makers.items():
        for kind in ("host", "resident", "bf16"):
            loop_module.make_state = kept
            if kind != "host":
                loop_module.make_state = lambda device, nonfinite, *, scaled: ResidentState(
                    device, nonfinite, run_ahead=4
                )
            precision = "bf16-true" if kind == "bf16" else "fp32"
            loop = hotloop.Loop(device="cpu", record=False, seed=1, precision=precision)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
            model = model if kind == "bf16" else model.double()
            dtype = torch.float32 if kind == "bf16" else torch.float64
            optimizer = make(model)
            rates = [group["lr"] for group in optimizer.param_groups]
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=13)
            loader = DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), 8 // world)
            model, optimizer, loader, schedule = loop.prepare(model, optimizer, loader, schedule)
            ema = EMA(model, 0.8, optimizer=optimizer)
            for _ in loop.epochs(3):
                for inputs, targets in loader:
                    loss = (model(inputs) - targets).square().mean()
                    loop.backward(loss)
                    loop.update(optimizer, schedule, max_norm=1.0)
                    ema.update()
            masters = masters_of(optimizer)
            weights = [
                p.detach() if masters is None or masters.get(p) is None else masters.get(p)
                for p in model.parameters()
            ]
            found[name, kind] = [w.clone() for w in weights] + list(ema.averages.values())
            loop.end_training()
    return found


def test_two_equal_one(run_ranks):
    one = run_ranks(1, train_all)[0]
    two = run_ranks(2, train_all)
    assert len(one) == 9
    for key, expected in one.items():
        # gradients of two halves are rounded to bf16 before they are added
        bound = 0.03 if key[1] == "bf16" else 1e-6 if key[1] == "resident" else 1e-12
        for a, b, value in zip(two[0][key], two[1][key], expected, strict=True):
            assert torch.equal(a, b), key
            assert (a - value).abs().max() <= bound * value.abs().max(), key
