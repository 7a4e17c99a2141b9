"""`hotloop launch` and `hotloop env` where there are NVIDIA GPUs; the tests of several need several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _hotloop(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "hotloop", *words],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_one_process_per_gpu_and_never_more(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, torch\nfrom hotloop.hardware import find_processes\n"
        "from hotloop.hardware.devices import find_device\n"
        "rank = int(os.environ['LOCAL_RANK'])\ndevice = find_device(local_rank=rank)\n"
        "processes = find_processes(device.type)\n"
        "total = torch.ones(1, device=device)\n"
        "if processes.world > 1: torch.distributed.all_reduce(total)\n"
        "print(processes.rank, processes.world, device, int(total), flush=True)\n"
    )
    count = torch.cuda.device_count()
    done = _hotloop(tmp_path, "launch", "--output", "all", "script.py")
    assert done.returncode == 0, done.stderr
    wanted = [f"[rank {rank}] {rank} {count} cuda:{rank} {count}" for rank in range(count)]
    assert sorted(done.stdout.splitlines()) == wanted
    refused = _hotloop(tmp_path, "launch", "-n", str(count + 1), "script.py")
    assert refused.returncode == 2
    assert f"this machine has {count} cuda device" in refused.stderr
    assert torch.cuda.get_device_name(0) in refused.stderr
    hidden = _hotloop(
        tmp_path, "launch", "--device", "cpu", "-n", str(count + 1), "--output", "all", "script.py"
    )
    assert hidden.returncode == 0, hidden.stderr
    assert f"[rank {count}] {count} {count + 1} cpu {count + 1}" in hidden.stdout.splitlines()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_that_dies_in_a_collective_on_the_gpu_ends_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, torch\nimport torch.distributed as dist\nrank = int(os.environ['LOCAL_RANK'])\n"
        "torch.cuda.set_device(rank)\ndist.init_process_group('nccl')\n"
        "x = torch.ones(1, device='cuda')\ndist.all_reduce(x)\ntorch.cuda.synchronize()\n"
        "if rank == 1: raise KeyError('the cause')\n"
        "while True: dist.all_reduce(x); torch.cuda.synchronize()\n"
    )
    done = _hotloop(tmp_path, "launch", "-n", "2", "script.py")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "KeyError: 'the cause'\nhotloop launch: rank 1 of 2 failed first" in done.stderr


def test_env_agrees_with_cuda_before_and_after_a_context(tmp_path: Path) -> None:
    program = (
        "import json, torch\nfrom hotloop.hardware import describe_machine\n"
        "found = describe_machine()\n"
        "torch.zeros(1, device='cuda')\nprint(json.dumps([found, describe_machine()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert len(before["accelerators"]) == torch.cuda.device_count()
    for index, (early, late) in enumerate(zip(before["accelerators"], after["accelerators"], strict=True)):
        properties = torch.cuda.get_device_properties(index)
        assert early["name"] == late["name"] == properties.name
        assert early["capability"] == late["capability"] == f"{properties.major}.{properties.minor}"
        assert early["precisions"] == late["precisions"]
        assert late["memory_bytes"] == properties.total_memory
        assert abs(early["memory_bytes"] - properties.total_memory) < 0.05 * properties.total_memory
    assert before["versions"]["driver"]
    assert before["versions"]["driver"] == after["versions"]["driver"]
    page = _hotloop(tmp_path, "env")
    assert page.returncode == 0, page.stderr
    assert torch.cuda.get_device_name(0) in page.stdout
