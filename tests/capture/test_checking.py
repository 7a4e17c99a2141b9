"""Replays compared with the plain step: a check leaves no trace, and what differs is told."""

import pytest
import torch
from torch import nn

from hotloop.errors import SettingError


def build(loop, capture=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    model, optimizer, scheduler = loop.prepare(model, optimizer, scheduler)

    def step(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        loop.log(loss=loss)
        return loss

    return model, scheduler, step if capture is None else loop.capture(step, **capture)


def run(loop, model, step, n=20):
    torch.manual_seed(1)
    return torch.stack([step(torch.randn(8, 4)).detach() for _ in range(n)])


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_check_leaves_no_trace(graph_loop, nonfinite):
    a, b = graph_loop(nonfinite=nonfinite), graph_loop(nonfinite=nonfinite)
    model_a, schedule_a, step_a = build(a, {})
    model_b, schedule_b, step_b = build(b, {"check_every": 3})
    losses_a, losses_b = run(a, model_a, step_a), run(b, model_b, step_b)
    assert step_b.reason is None
    # the first replay is the recording itself
    assert step_b.checks == step_b.replays // 3 == 5
    assert torch.equal(losses_a, losses_b)
    for p, q in zip(model_a.state_dict().values(), model_b.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert schedule_a.get_last_lr() == schedule_b.get_last_lr()
    assert a.updates == b.updates == 20


@pytest.mark.parametrize("what", ["weight", "buffer", "result"])
def test_a_replay_that_differs_is_told_and_the_plain_step_counts(graph_loop, what, capsys):
    plain_loop, loop = graph_loop(), graph_loop()
    model_plain, _, plain = build(plain_loop)
    model, _, step = build(loop, {"check_every": 4})
    expected = run(plain_loop, model_plain, plain)
    torch.manual_seed(1)
    losses = []
    for i in range(20):
        if i == 4:
            [entry] = step._recordings
            replay = entry.recording.replay

            def wrong(replay=replay, entry=entry):
                replay()
                if step.replays < 3:
                    return
                target = {
                    "weight": model[0].weight,
                    "buffer": model[1].running_mean,
                    "result": entry.outputs[0],
                }
                with torch.no_grad():
                    target[what].add_(0.1)

            entry.recording.replay = wrong
        losses.append(step(torch.randn(8, 4)).detach())
    assert step.checks == 1
    assert {"weight": "parameter 0", "buffer": "running_mean", "result": "result 0"}[what] in step.reason
    assert "beside the plain step" in capsys.readouterr().err
    assert torch.equal(torch.stack(losses), expected)
    assert loop.updates == 20


def test_check_every_has_to_be_a_count(graph_loop):
    with pytest.raises(SettingError, match="check_every"):
        graph_loop().capture(lambda x: x, check_every=0)
