"""What the live hooks see on a CUDA device: each wait with its exact line, each pageable copy, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.stalls import record_syncs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_wait_is_seen_on_its_line():
    device = torch.device("cuda")
    pageable, pinned = torch.randn(1024), torch.randn(1024).pin_memory()
    x = torch.randn(64, device=device)
    wide = torch.empty(1024, device=device)
    with record_syncs(device, copies=True) as syncs:
        x.sum().item()  # seen
        if x.sum() > 1e9:  # seen
            raise AssertionError
        x[x > 0]  # seen
        torch.nonzero(x)  # seen
        x.cpu()  # seen
        x.tolist()  # seen
        f"{x.sum():.3f}"  # seen
        torch.tensor([1.0, 2.0], device=device)  # seen
        pageable.to(device)  # seen
        pageable.to(device, non_blocking=True)  # seen
        pageable.cuda(non_blocking=True)  # seen
        wide.copy_(pageable, non_blocking=True)  # seen
        wide.copy_(pageable, True)  # seen
        pinned.to(device, non_blocking=True)
        wide.copy_(pinned, non_blocking=True)
        (x * 2).to(torch.float16)
        x.zero_()
    lines = Path(__file__).read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# seen")]
    assert sorted({sync.line for sync in syncs}) == marked
    assert {sync.file for sync in syncs} == {__file__}
    assert [lines[sync.line - 1] for sync in syncs if sync.pageable] == [
        lines[number - 1]
        for number in marked
        if "non_blocking" in lines[number - 1] or ", True)" in lines[number - 1]
    ]
    assert "to" not in vars(torch.Tensor) or vars(torch.Tensor)["to"].__name__ != "call"


SCRIPT = """
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
big = torch.randn(16, 1024, 1024)
for step in range(40):
    x = big.to("cuda", non_blocking=True)
    loss = model(x[0, :, :512]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = loss.item()
print(f"{running:.17g}")
"""


def test_a_script_is_watched_and_its_faults_told_by_line(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hotloop", "doctor", "--json", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    print(done.stderr[-6000:])
    assert done.returncode == 0
    facts = json.loads(done.stderr[done.stderr.index("{") : done.stderr.rindex("}") + 1])
    print(json.dumps(facts)[:6000])
    text = json.dumps(facts["findings"] + facts["harmless"])
    assert "blocking-copy" in text
    assert "train.py:8" in text


def test_the_marked_lines_wait_on_this_gpu():
    """What the virtual GPU is held to on the CPU (tests/doctor/live/test_virtual_device.py) is true of a real one."""
    import runpy

    waits = Path(__file__).parents[1] / "doctor" / "live" / "waits.py"
    lines = waits.read_text().splitlines()
    script = runpy.run_path(str(waits))
    with record_syncs(torch.device("cuda"), copies=True) as syncs:
        script["lines"]()
    found = sorted({sync.line for sync in syncs})
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# waits")]
    assert [lines[n - 1] for n in found if n not in marked] == []
    assert [lines[n - 1] for n in marked if n not in found] == []
