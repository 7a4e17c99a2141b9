from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from hotloop.runs import source
from hotloop.runs.source import capture_source

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of git here has an answer, however busy the machine."""
    monkeypatch.setattr(source, "_TIMEOUT_S", 60.0)


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(where), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "package").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    (root / "train.py").write_text("print(1)\n")
    (root / "package" / "model é.py").write_text("a = 1\nb = 2\n")
    (root / "gone.py").write_text("x\n")
    (root / "picture.bin").write_bytes(bytes(range(256)))
    (root / ".gitignore").write_text("ignored.txt\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def test_a_clean_repository_is_its_commit(repository: Path, tmp_path: Path) -> None:
    found = capture_source(tmp_path, repository / "train.py")
    assert found["commit"] == git(repository, "rev-parse", "HEAD")
    assert found["branch"] == "main"
    assert found["dirty"] is False
    assert found["repository"] == str(repository)
    assert not (tmp_path / "code.patch").exists()
    assert not (tmp_path / "untracked.tar.gz").exists()


def test_commit_patch_and_archive_restore_every_file_that_ran(repository: Path, tmp_path: Path) -> None:
    # settings of the user that change what `git diff` prints
    for name in ("diff.noprefix", "diff.mnemonicPrefix", "color.ui", "core.quotepath"):
        git(repository, "config", name, "always" if name == "color.ui" else "true")
    (repository / "train.py").write_text("print(2)\n")
    (repository / "package" / "model é.py").write_text("a = 1\nb = 3\n")
    (repository / "picture.bin").write_bytes(bytes(reversed(range(256))))
    (repository / "gone.py").unlink()
    (repository / "staged.py").write_text("new\n")
    git(repository, "add", "staged.py")
    (repository / "package" / "loose file.py").write_text("untracked\n")
    (repository / "ignored.txt").write_text("ignored")
    folder = tmp_path / "record"
    folder.mkdir()
    # from a folder below the root
    found = capture_source(folder, repository / "package" / "model é.py")
    assert found["dirty"] is True
    assert set(found["changed"]) == {"train.py", "package/model é.py", "picture.bin", "gone.py", "staged.py"}
    assert found["untracked"] == ["package/loose file.py"]
    assert "left_out" not in found

    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    git(copy, "checkout", "-q", found["commit"])
    git(copy, "apply", str(folder / found["patch"]))
    with tarfile.open(folder / found["archive"]) as archive:
        archive.extractall(copy, filter="data")
    (repository / "ignored.txt").unlink()
    assert files_of(copy) == files_of(repository)


def test_what_is_large_secret_or_a_run_stays_out(repository: Path, tmp_path: Path) -> None:
    (repository / "weights.bin").write_bytes(b"\0" * (source._LARGEST_FILE_BYTES + 1))
    (repository / ".env").write_text("KEY=1")
    (repository / "runs" / "one").mkdir(parents=True)
    (repository / "runs" / "one" / "run.json").write_text("{}")
    (repository / "new.py").write_text("")
    (repository / "picture.bin").write_bytes(b"\1" * (source._LARGEST_CHANGED_FILE_BYTES + 1))
    (repository / "train.py").write_text("print(2)\n")
    found = capture_source(tmp_path, repository / "train.py", ignore=(repository / "runs").resolve())
    assert found["untracked"] == ["new.py"]
    assert {(entry["path"], entry["why"]) for entry in found["left_out"]} == {
        ("weights.bin", "too large"),
        (".env", "may hold a secret"),
        ("picture.bin", "changed, but too large"),
    }
    patch = (tmp_path / "code.patch").read_text()
    assert "print(2)" in patch
    assert "picture.bin" not in patch


def test_links_and_nested_repositories_do_no_harm(repository: Path, tmp_path: Path) -> None:
    os.symlink("/nowhere", repository / "dangling")
    nested = repository / "nested"
    nested.mkdir()
    git(nested, "init", "-q")
    (nested / "file.py").write_text("")
    found = capture_source(tmp_path, repository / "train.py")
    assert found["untracked"] == ["dangling"]
    assert found["left_out"] == [{"path": "nested/", "bytes": None, "why": "no regular file"}]


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    (root / "train.py").write_text("1\n")
    git(root, "add", "train.py")
    found = capture_source(tmp_path, root / "train.py")
    assert (found["commit"], found["branch"], found["dirty"]) == (None, "main", True)
    assert "+1" in (tmp_path / "code.patch").read_text()


def test_outside_git_the_script_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    found = capture_source(tmp_path, script)
    assert found["repository"] is None
    assert "not a git repository" in found["why"]
    with tarfile.open(tmp_path / "untracked.tar.gz") as archive:
        assert archive.getnames() == ["train.py"]


def test_absent_git_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert capture_source(tmp_path, None) == {"repository": None, "why": "git is not installed"}


def test_a_git_that_hangs_is_given_up(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(source, "_TIMEOUT_S", 0.1)
    found = capture_source(tmp_path, repository / "train.py")
    assert found["why"] == "git rev-parse took more than 0.1 s"
