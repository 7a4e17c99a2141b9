from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
other = torch.optim.SGD(model.parameters(), lr=0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    other.step()
print(__name__, sys.argv[1:], f"{loss.item():.17g}")
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_output_status_and_results_are_the_scripts_own(script: Path) -> None:
    plain = run("train.py", "40", "--json", cwd=script.parent)
    watched = run("-m", "hotloop", "doctor", "train.py", "40", "--json", cwd=script.parent)
    assert plain.returncode == watched.returncode == 7
    assert watched.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    assert "__main__ ['40', '--json']" in watched.stdout
    assert "No device took part: this is a recording of the CPU alone." in watched.stderr
    assert "hotloop doctor --virtual-gpu" in watched.stderr
    assert "steady steps" in watched.stderr
    assert "USDT:" not in watched.stderr


def test_a_module_and_the_json_report(script: Path) -> None:
    done = run("-m", "hotloop", "doctor", "--json", "--steps", "4", "-m", "train", "30", cwd=script.parent)
    assert done.returncode == 7
    # of four steps the first is left out, and on a busy machine slow ones at the ends
    assert any(f'"steps": {number}' in done.stderr for number in (1, 2, 3, 4))
    assert "__main__ ['30']" in done.stdout


def test_a_short_script_says_that_nothing_was_recorded(script: Path) -> None:
    done = run("-m", "hotloop", "doctor", "train.py", "3", cwd=script.parent)
    assert done.returncode == 7
    assert "3 optimizer steps were seen, and the window begins after 20" in done.stderr


def test_an_exception_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('here')\nf()\n")
    plain = run("bad.py", cwd=tmp_path)
    watched = run("-m", "hotloop", "doctor", "bad.py", cwd=tmp_path)
    assert watched.returncode == plain.returncode == 1
    assert "ValueError: here" in watched.stderr
    assert "runpy" not in watched.stderr
    assert "hotloop/doctor" not in watched.stderr


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    done = run("-m", "hotloop", "doctor", "gone.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "hotloop: there is no script gone.py\n")
