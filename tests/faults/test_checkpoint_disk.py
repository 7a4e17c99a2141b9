"""A disk that is full, before the save or in the middle of it: the fault is told, the last good one stays."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint import Checkpoints, Snapshot, stream, writer

# The forked children only save, load and end; Python 3.12 warns of any fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def snapshot(step: int, size: int = 1000) -> Snapshot:
    value = torch.full((size,), float(step))
    return Snapshot(step, {"model": {"w": value}}, {"state": {"w": value + 0, "step": step}})


def check_whole(folder: Path, step: int, size: int = 1000) -> None:
    loaded = Checkpoints().load(folder)
    assert loaded is not None
    assert loaded.step == step
    for value in (loaded.tensors["model"]["w"], loaded.objects["state"]["w"]):
        assert torch.equal(value, torch.full((size,), float(step)))
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == [f"step-{step:010d}"]


class Failing(io.FileIO):
    """A file that takes `left` more bytes, over all files together, and then says that the disk is full."""

    left = 0

    def write(self, data: Any) -> int:
        size = len(memoryview(data).cast("B"))
        if Failing.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = super().write(memoryview(data).cast("B")[: Failing.left])
        Failing.left -= size
        return done


def test_full_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_failing(path: Path, mode: str, buffering: int) -> io.BufferedWriter:
        return io.BufferedWriter(Failing(path, "xb"), 512)

    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), wait=True)
    size = sum(path.stat().st_size for path in (tmp_path / "step-0000000001").iterdir())
    random.seed(0)
    named = set()
    for step, left in enumerate([0, 1, size - 1, *(random.randrange(size) for _ in range(40))], start=2):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", open_failing)
            Failing.left = left
            checkpoints.save(tmp_path, snapshot(step))
            with pytest.raises(
                CheckpointError, match=r"/\.saving-step-.*/.*: No space left on device"
            ) as caught:
                checkpoints.wait()
        named.update(
            name for name in ("model.safetensors", "state.pt", "manifest.json") if name in str(caught.value)
        )
        assert "what was saved before is untouched" in str(caught.value)
        check_whole(tmp_path, 1)
    assert named == {"model.safetensors", "state.pt", "manifest.json"}
    checkpoints.save(tmp_path, snapshot(99), wait=True)
    check_whole(tmp_path, 99)


def test_a_failing_fsync_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), wait=True)

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(stream.os, "fsync", fail)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: Input/output error"):
            checkpoints.save(tmp_path, snapshot(2), wait=True)
    check_whole(tmp_path, 1)


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), wait=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=1_050_000)
    with monkeypatch.context() as patch:
        patch.setattr(writer.shutil, "disk_usage", lambda path: usage)
        checkpoints.save(tmp_path, snapshot(2, 100), wait=True)
        with pytest.raises(
            CheckpointError, match=r"takes 8,000 bytes and its file system has 1,050,000 left; make room"
        ):
            checkpoints.save(tmp_path, snapshot(3), wait=True)
    check_whole(tmp_path, 2, 100)


def in_child(work: Any) -> int:
    child = os.fork()
    if child == 0:
        status = 99
        try:
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    def limited() -> None:
        checkpoints = Checkpoints()
        checkpoints.save(tmp_path, snapshot(1), wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        checkpoints.save(tmp_path, snapshot(2, 100_000))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: File too large"):
            checkpoints.wait()
        checkpoints.save(tmp_path, Snapshot(3, {}, {"state": torch.zeros(100_000)}))
        with pytest.raises(CheckpointError, match=r"state\.pt: File too large"):
            checkpoints.wait()

    assert in_child(limited) == 0
    check_whole(tmp_path, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_file_system_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(tmp_path).encode(), b"tmpfs", 0, b"size=3m") != 0:
        pytest.skip("mounting is not allowed here")
    try:
        points = tmp_path / "points"
        checkpoints = Checkpoints()
        checkpoints.save(points, snapshot(1), wait=True)
        with pytest.raises(CheckpointError, match=r"has .* left; make room"):
            checkpoints.save(points, snapshot(2, 600_000))
        # Another program takes the room between the look and the write.
        monkeypatch.setattr(writer, "check_space", lambda folder, size: None)
        checkpoints.save(points, snapshot(2, 600_000))
        with pytest.raises(CheckpointError, match=r"state\.pt: No space left on device"):
            checkpoints.wait()
        check_whole(points, 1)
        checkpoints.save(points, snapshot(3), wait=True)
        check_whole(points, 3)
    finally:
        assert libc.umount(str(tmp_path).encode()) == 0
