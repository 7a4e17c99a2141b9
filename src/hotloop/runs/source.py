"""The code of a run: its git commit, and whatever is not in it, so that no line that ran is lost."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

__all__ = ["capture_source"]

_TIMEOUT_S = 2.0
_LARGEST_FILE_BYTES = 1 << 20
_LARGEST_CHANGED_FILE_BYTES = 8 << 20
_LARGEST_ARCHIVE_BYTES = 16 << 20
_MOST_FILES = 5_000
_MOST_LEFT_OUT = 200
_SECRET_FILE = re.compile(
    r"(^\.env($|\.)|^\.netrc$|^id_(rsa|ed25519|ecdsa)|\.(pem|key|p12|pfx)$)", re.IGNORECASE
)


class _GitError(Exception):
    """git is absent, too slow, or refuses; the text is for the record."""


def capture_source(folder: Path, script: Path | None, *, ignore: Path | None = None) -> dict[str, Any]:
    """Store into `folder` what brings the code at `script` (or the working folder) back, and describe it.

    `code.patch` is the difference to the commit, binary files included: `git apply code.patch`. Files
    unknown to git and not ignored by it go into `untracked.tar.gz`, relative to the repository's root.
    Outside a repository the archive holds the script alone. Files of more than 1 MiB (8 MiB if git knows
    them), those that may hold keys, and those under `ignore` stay out; the answer names the first two
    kinds under "left_out".

    Takes up to 2 seconds for each of seven questions to git. Never raises for git's sake.

    Raises:
        OSError: `folder` cannot be written to.
    """
    start = script.parent if script is not None else Path.cwd()
    try:
        root = Path(_git(start, "rev-parse", "--show-toplevel").decode().removesuffix("\n"))
    except _GitError as error:
        answer: dict[str, Any] = {"repository": None, "why": str(error)}
        if script is not None and script.is_file():
            answer |= _pack(folder, script.parent, [script.name], [])
        return answer
    left_out: list[dict[str, Any]] = []
    answer = {"repository": str(root), "commit": None, "branch": None, "dirty": None}
    try:
        answer["commit"] = _commit(root)
        answer["branch"] = _branch(root)
        changed = _names(_git(root, "diff", "--name-only", "--no-renames", "-z", _base(answer["commit"])))
        untracked = _names(_git(root, "ls-files", "-z", "--others", "--exclude-standard"))
        if ignore is not None:
            untracked = [name for name in untracked if not (root / name).resolve().is_relative_to(ignore)]
        answer["dirty"] = bool(changed or untracked)
        answer["changed"] = changed[:_MOST_FILES]
        if changed:
            answer["patch"] = _write_patch(folder, root, answer["commit"], changed, left_out)
        if untracked:
            answer |= _pack(folder, root, untracked, left_out)
    except _GitError as error:
        answer["why"] = str(error)
    if left_out:
        answer["left_out"] = left_out[:_MOST_LEFT_OUT]
        answer["left_out_count"] = len(left_out)
    return answer


def _commit(root: Path) -> str | None:
    """The commit that is checked out; None in a repository that has none yet."""
    try:
        return _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
    except _GitError:
        return None


def _branch(root: Path) -> str | None:
    """The branch that is checked out; None for a bare commit."""
    try:
        return _git(root, "symbolic-ref", "--short", "-q", "HEAD").decode().strip()
    except _GitError:
        return None


def _base(commit: str | None) -> str:
    """What to compare with: the commit, or git's name for the empty tree."""
    return commit or "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def _write_patch(
    folder: Path, root: Path, commit: str | None, changed: list[str], left_out: list[dict[str, Any]]
) -> str | None:
    """Write `code.patch`; its name, or None if nothing of reasonable size changed."""
    wanted = []
    for name in changed:
        size = _size(root / name)
        if size is not None and size > _LARGEST_CHANGED_FILE_BYTES:
            left_out.append({"path": name, "bytes": size, "why": "changed, but too large"})
        elif _SECRET_FILE.search(Path(name).name):
            left_out.append({"path": name, "bytes": size, "why": "changed, but may hold a secret"})
        else:
            wanted.append(name)
    if not wanted:
        return None
    excluded = [f":(exclude,top,literal){entry['path']}" for entry in left_out]
    patch = _git(
        root,
        # The user's own settings must not change the form of the patch.
        *("-c", "core.quotepath=on", "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false"),
        *("diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames"),
        *("--ignore-submodules=dirty", "--src-prefix=a/", "--dst-prefix=b/", _base(commit), "--", ":(top)"),
        *excluded,
    )
    part = folder / ".code.patch.tmp"
    part.write_bytes(patch)
    os.replace(part, folder / "code.patch")
    return "code.patch"


def _pack(folder: Path, root: Path, names: list[str], left_out: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the files `names` under `root` into `untracked.tar.gz`, as far as size and prudence allow."""
    packed: list[str] = []
    total_bytes = 0
    for name in names:
        size = _size(root / name)
        if size is None:
            why = "no regular file"
        elif size > _LARGEST_FILE_BYTES:
            why = "too large"
        elif _SECRET_FILE.search(Path(name).name):
            why = "may hold a secret"
        elif total_bytes + size > _LARGEST_ARCHIVE_BYTES or len(packed) >= _MOST_FILES:
            why = "too many"
        else:
            packed.append(name)
            total_bytes += size
            continue
        left_out.append({"path": name, "bytes": size, "why": why})
    if not packed:
        return {}
    part = folder / ".untracked.tar.gz.tmp"
    with tarfile.open(part, "w:gz", compresslevel=1) as archive:
        for name in packed:
            try:
                archive.add(root / name, arcname=name, recursive=False)
            except FileNotFoundError:
                left_out.append({"path": name, "bytes": None, "why": "vanished"})
    os.replace(part, folder / "untracked.tar.gz")
    return {"untracked": packed, "archive": "untracked.tar.gz"}


def _size(path: Path) -> int | None:
    """Bytes of a file (a link counts itself); None for a folder (a nested repository) or nothing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return None if path.is_dir() and not path.is_symlink() else status.st_size


def _names(listing: bytes) -> list[str]:
    """The file names of a NUL-separated listing."""
    return [os.fsdecode(name) for name in listing.split(b"\0") if name]


def _git(where: Path, *arguments: str) -> bytes:
    """What git answers to `arguments` in the folder `where`."""
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(where), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            # Only looking: the index of a repository in use is not to be locked for a refresh.
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise _GitError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise _GitError(f"git {arguments[0]} took more than {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _GitError(f"git could not be started: {error}") from None
    if done.returncode:
        raise _GitError(
            done.stderr.decode(errors="replace").strip()[:500] or f"git ended with {done.returncode}"
        )
    return done.stdout
