from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hotloop.errors import LaunchError
from hotloop.parallel.target import check_target


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("raise RuntimeError('checking must not run it')\n")
    (tmp_path / "bad.py").write_text("x = (1,\nfor\n")
    package = tmp_path / "launchable"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('checking must not import it')\n")
    (package / "train.py").write_text("")
    (package / "inner" / "__main__.py").write_text("")
    return tmp_path


def test_what_can_be_launched_passes_without_being_run() -> None:
    before = sys.path[:], set(sys.modules)
    check_target("good.py", module=False)
    check_target("good", module=True)
    check_target("launchable.train", module=True)
    check_target("launchable.inner", module=True)
    assert sys.path == before[0]
    assert not {name for name in set(sys.modules) - before[1] if name.startswith(("good", "launchable"))}


@pytest.mark.parametrize(
    ("target", "module", "said"),
    [
        ("gone.py", False, "gone.py does not exist"),
        ("good", False, "For a module: -m good"),
        ("launchable", False, "is a folder"),
        ("bad.py", False, r'bad\.py", line 1(.|\n)*SyntaxError'),
        ("bad", True, r'bad\.py", line 1(.|\n)*SyntaxError'),
        ("good.py", True, "leave out -m"),
        ("dir/good", True, "leave out -m"),
        ("gone", True, "no module gone"),
        ("launchable.gone", True, r"no module launchable\.gone"),
        ("launchable", True, "without a __main__"),
        ("not a name", True, "not the name of a module"),
    ],
)
def test_what_cannot_be_launched_is_told_once(target: str, module: bool, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        check_target(target, module=module)


def test_a_binary_is_no_script(here: Path) -> None:
    (here / "model.pt").write_bytes(b"PK\x03\x04\x00\x00\xff")
    with pytest.raises(LaunchError, match=r"model\.pt"):
        check_target("model.pt", module=False)
