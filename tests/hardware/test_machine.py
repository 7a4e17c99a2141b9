from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.hardware import cores, machine
from hotloop.hardware.machine import describe_links, describe_machine


def test_it_says_what_other_sources_say() -> None:
    found = describe_machine()
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["cpu"]["logical_cores"] == os.cpu_count()
    assert 1 <= found["cpu"]["usable_cores"] <= os.cpu_count()
    memory = found["memory"]
    assert memory["total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]
    assert len(found["accelerators"]) == torch.accelerator.device_count()
    assert found["cpu_precisions"]["fp32"] == "in silicon"
    assert found["packages"]["safetensors"]


def test_the_instruction_sets_agree_with_torch() -> None:
    flags = describe_machine()["cpu"]["flags"]
    best = torch.backends.cpu.get_cpu_capability()
    if best == "AVX512":
        assert {"avx2", "avx512f"} <= set(flags)
    elif best == "AVX2":
        assert "avx2" in flags


def test_a_part_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise PermissionError("no")

    for name in (
        "_accelerators",
        "_cpu_model",
        "_cpu_flags",
        "available_memory_bytes",
        "usable_cores",
        "_packages",
    ):
        monkeypatch.setattr(machine, name, fail)
    found = describe_machine()
    assert found["cpu"]["model"] is None
    assert found["memory"]["available_bytes"] is None
    assert found["accelerators"] == []
    from hotloop.cli.env import format_machine

    assert "unknown" in format_machine(found)


def test_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hidden")
    monkeypatch.setenv("SOMETHING_ELSE", "private")
    found = describe_machine()["variables"]
    assert found["CUDA_MODULE_LOADING"] == "LAZY"
    assert not {"TORCH_HUB_TOKEN", "SOMETHING_ELSE"} & set(found)


_SMI = """0, GPU-aaaa, NVIDIA H200, 143771, 9.0, 570.86.15
1, GPU-bbbb, Tesla V100, 16384, 7.0, 570.86.15
"""


def test_nvidia_smi_is_read_in_the_order_that_cuda_counts() -> None:
    devices, driver = machine._parse_nvidia_smi(_SMI, None)
    assert driver == "570.86.15"
    assert [device["name"] for device in devices] == ["NVIDIA H200", "Tesla V100"]
    assert devices[0]["memory_bytes"] == 143771 * 1024 * 1024
    assert devices[0]["capability"] == "9.0"
    assert "bf16" in devices[0]["precisions"]
    assert "bf16" not in devices[1]["precisions"]
    swapped, _ = machine._parse_nvidia_smi(_SMI, "GPU-bbbb,0")
    assert [(device["index"], device["name"]) for device in swapped] == [
        (0, "Tesla V100"),
        (1, "NVIDIA H200"),
    ]
    assert machine._parse_nvidia_smi(_SMI, "") == ([], None)


def test_links_are_read_from_the_matrix() -> None:
    text = "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\x1b[0m\nGPU0\t X \tNV18\tSYS\tPIX\nGPU1\tNV18\t X \tPHB\tSYS\n"
    text += "GPU2\tSYS\tPHB\t X \tSYS\nNIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n  X = Self\n"
    assert machine._parse_links(text) == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="has NVIDIA GPUs")
def test_without_gpus_there_are_no_links() -> None:
    assert not describe_links()


def test_the_tightest_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "job" / "task"
    inner.mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "job" / "memory.max").write_text("max\n")
    (inner / "memory.max").write_text("1073741824\n")
    monkeypatch.setattr(cores, "_cgroup_folders", lambda controller: iter([inner, inner.parent, tmp_path]))
    assert cores.cgroup_cores() == 1.5
    assert cores.cgroup_memory_bytes() == 2**30
    assert cores.usable_cores() == 1


def test_affinity_counts() -> None:
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    program += "from hotloop.hardware.cores import usable_cores; print(usable_cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
