"""One rank is told to stop, or finds that a save is due: all ranks do the same after the same update."""

import inspect
import signal

import pytest

pytestmark = pytest.mark.multi


def train(
    rank, world, folder, *, kind="host", send=None, who=1, at=5, accumulation=1, every=None, step="once"
):
    """How the run ended on this rank, the losses seen, and the updates after which it saved."""
    import os
    import signal
    import time

    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop.loop import every as every_module
    from hotloop.loop import loop as loop_module
    from hotloop.state import ResidentState

    os.environ["HOTLOOP_PROGRESS"] = "0"
    torch.set_num_threads(1)
    kept = loop_module.make_state
    if kind == "resident":
        loop_module.make_state = lambda device, nonfinite, *, scaled: ResidentState(
            device, nonfinite, run_ahead=3
        )
    loop = hotloop.Loop(device="cpu", record=False, accumulation=accumulation, seed=1)
    loop_module.make_state = kept
    fused = True if kind == "resident" else None
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    second = torch.optim.SGD(other.parameters(), lr=0.05, fused=fused)
    x = torch.randn(96, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
    model, other, optimizer, second, loader = loop.prepare(model, other, optimizer, second, loader)
    resumed = loop.resume(folder)
    clock = [0.0]
    real = time.monotonic
    if every is not None:
        # clocks differ between ranks: rank 1's runs twice as fast
        every_module.time.monotonic = lambda: clock[0] * (1 + rank)
    losses, saves = [], []
    end = "finished"
    try:
        for _ in loop.epochs(2):
            for a, b in loader:
                if send is not None and rank == who and loop.updates == at:
                    os.kill(os.getpid(), send)
                    send = None
                loss = F.mse_loss(model(a), b)
                loop.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if step == "twice":
                    loop.backward(F.mse_loss(other(a), b))
                    second.step()
                    second.zero_grad()
                losses.append(loss.item())
                clock[0] += 1.0
                if every is not None and loop.save_state(folder, every=every):
                    saves.append(loop.updates)
    except SystemExit as error:
        end = error.code
    except KeyboardInterrupt:
        end = "interrupted"
    finally:
        every_module.time.monotonic = real
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    loop.end_training()
    return {"end": end, "losses": losses, "saves": saves, "resumed": resumed}


def run(run_ranks, calls):
    script = "from __future__ import annotations\n" + inspect.getsource(train)
    script += f"\ndef main(rank, world):\n    return [train(rank, world, **c) for c in {calls!r}]\n"
    return list(zip(*run_ranks(2, script, timeout=240), strict=True))


@pytest.mark.parametrize("kind", ["host", "resident"])
def test_a_signal_to_one_rank_stops_all(run_ranks, tmp_path, kind):
    term, interrupt = int(signal.SIGTERM), int(signal.SIGINT)
    wanted = [
        {"send": term, "who": 1},
        {"send": term, "who": 0, "accumulation": 3, "at": 2},
        {"send": interrupt, "who": 1, "step": "twice"},
    ]
    calls = []
    for number, options in enumerate(wanted):
        common = {
            "kind": kind,
            "accumulation": options.get("accumulation", 1),
            "step": options.get("step", "once"),
        }
        folder = str(tmp_path / str(number))
        calls += [
            {**common, "folder": folder + "x"},
            {**common, "folder": folder, **options},
            {**common, "folder": folder},
        ]
    results = run(run_ranks, calls)
    for number, options in enumerate(wanted):
        whole, stopped, resumed = results[3 * number : 3 * number + 3]
        for rank in (0, 1):
            assert whole[rank]["end"] == "finished"
            assert stopped[rank]["end"] == ("interrupted" if options["send"] == interrupt else 143)
            assert resumed[rank]["resumed"]
            assert stopped[rank]["losses"] + resumed[rank]["losses"] == whole[rank]["losses"]
        count = len(stopped[0]["losses"])
        assert count == len(stopped[1]["losses"]) < len(whole[0]["losses"])
        saved = [int(path.name[5:]) for path in (tmp_path / str(number)).glob("step-*")]
        assert saved == [count // options.get("accumulation", 1)]


@pytest.mark.parametrize("kind", ["host", "resident"])
def test_saves_by_the_clock_are_rank_0s(run_ranks, tmp_path, kind):
    """Due every 5 s of rank 0, and a step takes 1 s; the wish needs an update to get around."""
    calls = [
        {"kind": kind, "folder": str(tmp_path / "a"), "every": "5 seconds"},
        {"kind": kind, "folder": str(tmp_path / "b"), "every": "5 seconds", "step": "twice"},
    ]
    for first, second in run(run_ranks, calls):
        assert first["saves"] == second["saves"]
        assert first["end"] == second["end"] == "finished"
        gaps = [b - a for a, b in zip(first["saves"], first["saves"][1:], strict=False)]
        late = 1 if kind == "host" else 5
        assert len(first["saves"]) >= 24 // (5 + late) - 1
        assert all(5 <= gap <= 5 + late for gap in gaps), first["saves"]
