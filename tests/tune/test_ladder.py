"""Which rungs are tried for which script and machine, in which order, and what is said of the others."""

from __future__ import annotations

from typing import Any

from hotloop.tune import Rung
from hotloop.tune.ladder import Shares, build_ladder
from hotloop.tune.rung import join, write_override

CPU: dict[str, Any] = {
    "device": "cpu",
    "device_name": "a CPU",
    "supported": {"fp32": "in silicon", "bf16": "in silicon"},
    "values": {"precision": "fp32", "capture": "auto"},
    "convolutions": True,
    "parameters": 5_000_000,
    "optimizers": [{"type": "AdamW", "torch": True, "fused": False}],
    "loader": "DataLoader",
    "by_index": True,
    "workers": 0,
    "threads": 8,
    "cores": 8,
    "batch_size": 64,
    "accumulation": 1,
    "captured": [],
    "backward": "/home/me/train.py:57",
    "world": 1,
}
GPU = CPU | {
    "device": "cuda",
    "device_name": "a GPU",
    "supported": dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8"), "in silicon"),
    "captured": [{"name": "train", "mode": "graph", "reason": None}],
}


def names(ladder: Any) -> list[str]:
    return [rung.name for rung in ladder.rungs]


def test_a_cpu_gets_what_a_cpu_can_do() -> None:
    ladder = build_ladder(CPU)
    assert names(ladder) == [
        "threads=4", "precision=bf16", "fused=on", "memory_format=channels_last", "workers=1", "micro_batch=32",
        "threads=1", "precision=bf16-true", "workers=2", "workers=4", "workers=8",
    ]  # fmt: skip
    why = {p.name: p for p in ladder.pruned}
    assert "does not compute" in why["precision=fp16"].why
    assert "train.py:57" in why["capture=compile"].why
    assert "@loop.capture" in why["capture=compile"].diff


def test_a_gpu_gets_graphs_and_formats_and_what_runs_already_is_left_out() -> None:
    ladder = build_ladder(GPU)
    assert {
        "precision=tf32",
        "precision=fp8",
        "capture=full",
        "capture=compile",
        "cudnn_benchmark=on",
    } <= set(names(ladder))
    assert "capture=graph" not in names(ladder), "auto records graphs there"
    blocked = GPU | {"captured": [{"name": "train", "mode": "graph", "reason": "train.py:9 `loss.item()`"}]}
    pruned = {p.name: p.why for p in build_ladder(blocked).pruned}
    assert "train.py:9" in pruned["capture=full"]


def test_findings_set_the_order() -> None:
    findings = [{"rule": "optimizer"}, {"rule": "data-loading"}, {"rule": "never-heard-of"}]
    ladder = build_ladder(CPU, findings)
    assert names(ladder)[:3] == ["fused=on", "threads=4", "workers=1"]
    assert ladder.rungs[0].why == "doctor: optimizer"
    assert ladder.rungs[-1].why == "default order"


def test_hopeless_rungs_are_pruned_by_their_bounds() -> None:
    captured = CPU | {"captured": [{"name": "train", "mode": "off", "reason": None}]}
    ladder = build_ladder(captured, shares=Shares(data=0.001, update=0.005, run_s=3.0))
    tried = {rung.lever for rung in ladder.rungs}
    assert not tried & {"workers", "fused", "capture"}
    whys = " ".join(p.why for p in ladder.pruned)
    assert "waits for data 0.1%" in whys
    assert "the update is 0.5%" in whys
    assert "the whole run takes 3 s" in whys
    assert "capture" in {r.lever for r in build_ladder(captured, shares=Shares(run_s=300.0)).rungs}


def test_exact_leaves_other_formats_out() -> None:
    ladder = build_ladder(CPU, exact=True)
    assert "precision" not in {rung.lever for rung in ladder.rungs}
    assert any("--exact" in p.why for p in ladder.pruned)


def test_own_rungs_come_first_and_accumulation_may_be_merged() -> None:
    own = Rung("mine", {"threads": 3})
    ladder = build_ladder(CPU | {"accumulation": 4}, extra=[own])
    assert ladder.rungs[0] is own
    assert "micro_batch=256" in names(ladder)


def test_rungs_join_and_are_written_as_an_override() -> None:
    settings, environment, setups = join(
        [
            Rung("a", {"fused": True, "threads": 2}),
            Rung("b", {"threads": 1}, environment={"X": "1"}, setup="f.py:g"),
        ]
    )
    assert write_override(settings) == "fused=on,threads=1"
    assert (environment, setups) == ({"X": "1"}, ["f.py:g"])
    assert Rung("a", {"fused": True}).lever == "fused"
