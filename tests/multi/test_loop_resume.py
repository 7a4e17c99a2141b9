"""Resume over several processes: the same number goes on bit for bit, another one keeps the order of the data."""

import inspect

import pytest
import torch

pytestmark = pytest.mark.multi


def train(
    rank, world, folder, kind="host", accumulation=1, stop=None, read=True, epochs=3, each=4, fault=None
):
    """One run of a script: trains from the checkpoint in `folder`, or saves there after `stop` batches and ends."""
    import os

    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop.loop import loop as loop_module
    from hotloop.state import ResidentState

    os.environ["HOTLOOP_PROGRESS"] = "0"
    torch.set_num_threads(1)
    kept = loop_module.make_state
    if kind == "resident":
        loop_module.make_state = lambda device, nonfinite, *, scaled: ResidentState(
            device, nonfinite, run_ahead=4
        )
    # a new process has other random numbers
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    loop = hotloop.Loop(device="cpu", record=False, accumulation=accumulation, seed=1)
    loop_module.make_state = kept
    torch.manual_seed(5)
    # no dropout where the world changes: how often it draws depends on the number of ranks
    drop = nn.Dropout(0.2 if fault is None else 0.0)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8) if fault is None else nn.Tanh(), drop, nn.Linear(8, 1)
    )
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True if kind == "resident" else None)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(32))
    loader = DataLoader(data, each * (2 // world), shuffle=True)
    model, optimizer, schedule, loader = loop.prepare(model, optimizer, schedule, loader)
    out = {"losses": [], "samples": [], "resumed": loop.resume(folder) if read else False}
    done = 0
    for _ in loop.epochs(epochs):
        for a, b, index in loader:
            loss = F.mse_loss(model(a), b)
            loop.backward(loss)
            loop.mean("all", loss, weight=len(a))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            out["losses"].append(loss.item())
            out["samples"].append(sorted(loop.gather(index).tolist()))
            done += 1
            if done == stop:
                loop.save_state(folder, wait=True)
                loop.end_training()
                return out
    out["mean"] = loop.mean("all")
    out["updates"] = loop.updates
    out["weights"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    loop.end_training()
    return out


def run(run_ranks, calls):
    """Each rank makes the calls of `train` given as keyword dicts, one after another; results by call and rank."""
    script = "from __future__ import annotations\n" + inspect.getsource(train)
    script += f"\ndef main(rank, world):\n    return [train(rank, world, **c) for c in {calls!r}]\n"
    return list(zip(*run_ranks(2, script, timeout=240), strict=True))


@pytest.mark.parametrize("kind", ["host", "resident"])
def test_the_same_number_of_processes_goes_on_bit_for_bit(run_ranks, tmp_path, kind):
    calls = []
    for name, accumulation, stops in [("a", 1, (2, 3)), ("b", 3, (4, 3))]:
        common = {"folder": str(tmp_path / name), "kind": kind, "accumulation": accumulation}
        calls.append({**common, "read": False})
        calls += [{**common, "stop": stop} for stop in stops]
        calls.append(common)
    results = run(run_ranks, calls)
    for whole, first, second, last in (results[:4], results[4:]):
        for rank in (0, 1):
            assert [r[rank]["resumed"] for r in (whole, first, second, last)] == [False, False, True, True]
            parts = first[rank]["losses"] + second[rank]["losses"] + last[rank]["losses"]
            assert parts == whole[rank]["losses"]
            assert torch.equal(last[rank]["weights"], whole[rank]["weights"])
            assert last[rank]["mean"] == whole[rank]["mean"]
            assert last[rank]["updates"] == whole[rank]["updates"]
        assert whole[0]["losses"] != whole[1]["losses"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_another_number_of_processes_keeps_the_order(run_ranks, tmp_path, accumulation, monkeypatch):
    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    common = {"accumulation": accumulation, "fault": "plain"}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    alone = [train(0, 1, **common, folder=one, read=False), train(0, 1, **common, folder=one, stop=5)]
    whole, broken, from_one = run(
        run_ranks,
        [
            {**common, "folder": two, "read": False},
            {**common, "folder": two, "stop": 5},
            {**common, "folder": one},
        ],
    )
    from_two = train(0, 1, **common, folder=two)
    # the unbroken runs agree with each other, and so do those that changed the number of processes in their middle
    assert alone[0]["samples"] == whole[0]["samples"]
    assert alone[1]["samples"] + from_one[0]["samples"] == whole[0]["samples"]
    assert broken[0]["samples"] + from_two["samples"] == whole[0]["samples"]
    for result in (alone[0], from_one[0], from_one[1], from_two):
        torch.testing.assert_close(result["weights"], whole[0]["weights"], rtol=1e-9, atol=1e-12)
        assert result["mean"] == pytest.approx(whole[0]["mean"], rel=1e-9)
        assert result["updates"] == whole[0]["updates"]


def unreadable(rank, world, folder):
    """Rank 1 cannot read what rank 0 can; then each sees another checkpoint."""
    import os

    import torch

    import hotloop
    from hotloop.errors import CheckpointError
    from hotloop.loop.checkpoint import Checkpoints

    os.environ["HOTLOOP_PROGRESS"] = "0"
    loop = hotloop.Loop(device="cpu", record=False)
    model = loop.prepare(torch.nn.Linear(2, 1))
    loop.save_state(folder, wait=True)
    load = Checkpoints.load

    def fail(self, path):
        raise CheckpointError(f"{path}/model.safetensors is truncated")

    texts = []
    for stand_in in (fail, lambda self, path: None):
        if rank == 1:
            Checkpoints.load = stand_in
        try:
            loop.resume(folder)
        except CheckpointError as error:
            texts.append(str(error))
    Checkpoints.load = load
    assert loop.resume(folder)
    return texts, model.weight.detach().sum().item()


def test_what_one_rank_cannot_read_all_raise(run_ranks, tmp_path):
    script = "from __future__ import annotations\n" + inspect.getsource(unreadable)
    script += f"\ndef main(rank, world):\n    return unreadable(rank, world, {str(tmp_path / 'c')!r})\n"
    (first, _), (second, _) = run_ranks(2, script)
    assert "rank 1 cannot read the checkpoint" in first[0]
    assert "is truncated" in first[0]
    assert "is truncated" in second[0]
    assert "different checkpoints ([0, None])" in first[1]
    assert first[1] == second[1]
