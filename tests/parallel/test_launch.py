from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotloop.errors import LaunchError
from hotloop.parallel import Launch, launch_processes
from hotloop.parallel.launch import _check_surroundings, _count_processes, _variables


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('was run')\n")
    return str(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"processes": 0}, "at least 1"),
        ({"nodes": 0}, "at least 1"),
        ({"nodes": 2}, "--rendezvous HOST:PORT"),
        ({"rendezvous": "host:1"}, "--nodes is 1"),
        ({"node_rank": 0}, "--nodes is 1"),
        ({"nodes": 2, "rendezvous": "host:1", "node_rank": 2}, r"not in 0\.\.1"),
        ({"nodes": 2, "rendezvous": "host", "node_rank": 1}, "has no port"),
        ({"restarts": -1}, "negative"),
        ({"grace_s": float("nan")}, "not a number of seconds"),
        ({"grace_s": -1.0}, "not a number of seconds"),
        ({"output": "some"}, "main or all"),
        ({"device": "tpu"}, "cpu, cuda, xpu, mps"),
        ({"logs": __file__}, "is a file"),
    ],
)
def test_wrong_combinations_are_errors(script: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        launch_processes(Launch(script, **options))


def test_a_launch_within_a_launch_is_an_error(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"already launched: .*RANK=1, WORLD_SIZE=2"):
        launch_processes(Launch(script))


def test_srun_tasks_and_launchers_do_not_multiply() -> None:
    inside = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    with pytest.raises(LaunchError, match="already started 4 tasks"):
        _check_surroundings(inside, Launch("train.py", processes=2))
    with pytest.raises(LaunchError, match="already started 4 tasks"):
        _check_surroundings(inside, Launch("train.py", nodes=2, rendezvous="host:1"))
    _check_surroundings(inside, Launch("train.py", nodes=4, rendezvous="host:1"))
    _check_surroundings({**inside, "SLURM_NTASKS": "1"}, Launch("train.py", processes=2))
    # a batch script before any srun
    _check_surroundings({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, Launch("train.py", processes=2))


def test_one_process_per_accelerator_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import hotloop.parallel.launch as module

    monkeypatch.setattr(module, "_accelerators", lambda: ("xpu", 4))
    assert _count_processes(Launch("train.py")) == 4
    assert _count_processes(Launch("train.py", processes=2)) == 2
    assert _count_processes(Launch("train.py", processes=9, device="cpu")) == 9
    assert _count_processes(Launch("train.py", device="cpu")) == 1
    with pytest.raises(LaunchError, match=r"this machine has 4 xpu devices.*at most 4.*--device cpu"):
        _count_processes(Launch("train.py", processes=5))
    with pytest.raises(LaunchError, match="--device cuda: this machine has 4 xpu devices"):
        _count_processes(Launch("train.py", device="cuda"))
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")
    assert _count_processes(Launch("train.py")) == 1
    assert _count_processes(Launch("train.py", device="xpu")) == 4
    monkeypatch.setenv("HOTLOOP_OVERRIDE", "precision=bf16,device=cuda:0")
    with pytest.raises(LaunchError, match="HOTLOOP_OVERRIDE cuda: this machine has 4 xpu devices"):
        _count_processes(Launch("train.py"))
    monkeypatch.delenv("HOTLOOP_OVERRIDE")
    monkeypatch.delenv("HOTLOOP_DEVICE")
    monkeypatch.setattr(module, "_accelerators", lambda: (None, 0))
    assert _count_processes(Launch("train.py")) == 1
    assert _count_processes(Launch("train.py", processes=3)) == 3
    with pytest.raises(LaunchError, match="--device cuda: this machine has no accelerator"):
        _count_processes(Launch("train.py", device="cuda"))


def test_threads_are_shared_out_unless_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hotloop.parallel.launch as module

    monkeypatch.setattr(module, "usable_cores", lambda: 9)
    monkeypatch.setattr(module, "_accelerators", lambda: (None, 0))
    assert _variables(Launch("train.py"), 2, {}) == {"OMP_NUM_THREADS": "4"}
    assert capsys.readouterr().err.count("4 CPU threads each") == 1
    assert _variables(Launch("train.py"), 16, {})["OMP_NUM_THREADS"] == "1"
    assert _variables(Launch("train.py"), 2, {"OMP_NUM_THREADS": "3"}) == {}
    capsys.readouterr()
    assert _variables(Launch("train.py"), 1, {}) == {}
    assert capsys.readouterr().err == ""


def test_torch_s_handling_of_nccl_errors_is_off_for_recorded_exchanges_unless_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import hotloop.parallel.launch as module

    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setattr(module, "_accelerators", lambda: ("cuda", 4))
    found = _variables(Launch("train.py"), 4, {})
    assert (found[name], found["HOTLOOP_NCCL_ERRORS"]) == ("0", "launcher")
    assert _variables(Launch("train.py", nodes=2), 1, {})[name] == "0"
    for own in (name, "NCCL_ASYNC_ERROR_HANDLING"):
        assert _variables(Launch("train.py"), 4, {own: "3"}).keys() == {"OMP_NUM_THREADS"}
    assert name not in _variables(Launch("train.py"), 1, {})
    assert name not in _variables(Launch("train.py", device="cpu"), 4, {})
    monkeypatch.setattr(module, "_accelerators", lambda: ("xpu", 4))
    assert name not in _variables(Launch("train.py"), 4, {})


def test_the_device_goes_to_the_processes_as_an_override() -> None:
    found = _variables(
        Launch("train.py", device="cpu"), 1, {"HOTLOOP_OVERRIDE": "precision=bf16,device=cuda"}
    )
    assert found == {"HOTLOOP_OVERRIDE": "precision=bf16,device=cpu", "CUDA_VISIBLE_DEVICES": ""}
