"""Saving beside training, keeping and deleting, locking, paths, and what happens at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.errors import CheckpointError, SettingError
from hotloop.loop.checkpoint import Checkpoints, Snapshot, folder, list_checkpoints, newest, store, writer

# The forked children only save, load and end; Python 3.12 warns of any fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def snapshot(step: int, size: int = 8) -> Snapshot:
    value = torch.full((size,), float(step))
    return Snapshot(step, {"model": {"w": value, "v": value.clone()}}, {"state": {"step": step}})


def steps(path: Path) -> list[int]:
    return [int(found.name.removeprefix("step-")) for found in list_checkpoints(path)]


def loaded_step(path: Path | str) -> int:
    loaded = Checkpoints().load(path)
    assert loaded is not None
    assert loaded.tensors["model"]["w"].unique().tolist() == [float(loaded.step)]
    assert loaded.tensors["model"]["v"].unique().tolist() == [float(loaded.step)]
    assert loaded.objects == {"state": {"step": loaded.step}}
    return loaded.step


class Gate:
    """Holds the writing thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        write = writer.write

        def wait_and_write(*args: Any) -> Path:
            assert self.opened.wait(60)
            return write(*args)

        monkeypatch.setattr(store.writer, "write", wait_and_write)


def test_a_save_in_flight_is_not_changed_by_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    weight = torch.full((1000,), 3.0)
    state = {"list": [1], "t": weight}
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, Snapshot(3, {"m": {"w": weight, "view": weight[::2]}}, {"s": state}))
    weight.fill_(9)
    state["list"].append(2)  # type: ignore[union-attr]
    assert newest(tmp_path) is None
    gate.opened.set()
    checkpoints.wait()
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert loaded.tensors["m"]["w"].unique().tolist() == [3.0]
    assert loaded.tensors["m"]["view"].unique().tolist() == [3.0]
    assert loaded.objects["s"]["list"] == [1]
    assert loaded.objects["s"]["t"].unique().tolist() == [3.0]
    assert checkpoints.last == tmp_path / "step-0000000003"


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), keep=5)
    second = threading.Thread(target=checkpoints.save, args=(tmp_path, snapshot(2)), kwargs={"keep": 5})
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join()
    checkpoints.wait()
    assert steps(tmp_path) == [1, 2]


def test_a_fault_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "dump_manifest", lambda manifest: 1 / 0)
        checkpoints.save(tmp_path, snapshot(2))
        with pytest.raises(CheckpointError, match="was not saved: ZeroDivisionError"):
            checkpoints.wait()
        checkpoints.save(tmp_path, snapshot(3))
        with pytest.raises(CheckpointError, match="was not saved: ZeroDivisionError"):
            checkpoints.save(tmp_path, snapshot(4))
        with pytest.raises(CheckpointError, match="was not saved: ZeroDivisionError"):
            checkpoints.save(tmp_path, snapshot(4), wait=True)
    checkpoints.wait()
    store._Saving.tell()
    assert capsys.readouterr().err == ""
    assert loaded_step(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-0000000001"]


def test_keep_counts_whole_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    for step in range(1, 6):
        checkpoints.save(tmp_path, snapshot(step), keep=3, wait=True)
    assert steps(tmp_path) == [3, 4, 5]
    (tmp_path / "step-0000000005" / "model.safetensors").unlink()
    checkpoints.save(tmp_path, snapshot(6), keep=2, wait=True)
    assert steps(tmp_path) == [4, 6]
    assert not (tmp_path / "step-0000000005").exists()
    checkpoints.save(tmp_path, snapshot(7), keep=None, wait=True)
    assert steps(tmp_path) == [4, 6, 7]
    checkpoints.save(tmp_path, snapshot(8), wait=True)
    assert steps(tmp_path) == [8]


def test_a_damaged_one_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, snapshot(step), keep=3, wait=True)
    for step in (2, 3):
        (tmp_path / f"step-{step:010d}" / "manifest.json").unlink()
    checkpoints.save(tmp_path, snapshot(4), keep=3, wait=True)
    assert steps(tmp_path) == [1, 4]
    assert (tmp_path / "step-0000000003").exists()


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_keep_less_than_one_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(SettingError, match="at least 1"):
        Checkpoints().save(tmp_path, snapshot(1), keep=keep)


def test_the_newest_is_the_one_saved_last_and_later_steps_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1000), wait=True)
    checkpoints.save(tmp_path, snapshot(10), wait=True)
    checkpoints.save(tmp_path, snapshot(20), wait=True)
    assert steps(tmp_path) == [1000, 20]
    assert loaded_step(tmp_path) == 20
    assert newest(tmp_path) == tmp_path / "step-0000000020"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, Snapshot(5, objects={"x": "old"}), wait=True)
    checkpoints.save(tmp_path, Snapshot(5, objects={"x": "new"}), wait=True)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".lock", "step-0000000005"]
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert loaded.objects["x"] == "new"


@pytest.mark.parametrize("stop_at", range(6))
def test_a_replacement_cut_short_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    class Cut(BaseException):
        pass

    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(5), wait=True)
    rename, delete, done = os.rename, folder._delete_tree, [0]

    def count() -> None:
        done[0] += 1
        if done[0] > stop_at:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "rename", lambda a, b: (count(), rename(a, b)))
        patch.setattr(folder, "_delete_tree", lambda path: (count(), delete(path)))
        try:
            checkpoints.save(tmp_path, snapshot(5), wait=True)
        except Cut:
            assert done[0] == stop_at + 1
        else:
            assert done[0] <= stop_at
    assert loaded_step(tmp_path) == 5
    checkpoints.save(tmp_path, snapshot(6), wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-0000000006"]


def test_left_over_folders_are_no_checkpoints_and_go_at_the_next_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), wait=True)
    for name in (".saving-step-0000000009-123-0", ".deleted-step-0000000008-123-1"):
        os.system(f"cp -r {tmp_path}/step-0000000001 {tmp_path}/{name}")
    assert loaded_step(tmp_path) == 1
    assert newest(tmp_path / ".saving-step-0000000009-123-0") is None
    checkpoints.save(tmp_path, snapshot(2), wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-0000000002"]


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert Checkpoints().load(tmp_path / "missing") is None
    assert Checkpoints().load(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / ".lock").touch()
    assert Checkpoints().load(tmp_path) is None
    assert list_checkpoints(tmp_path / "missing") == []
    assert newest(tmp_path) is None


def test_one_checkpoint_may_be_given_directly(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    for step in (1, 2):
        checkpoints.save(tmp_path, snapshot(step), keep=2, wait=True)
    assert loaded_step(tmp_path / "step-0000000001") == 1
    os.rename(tmp_path / "step-0000000001", tmp_path / "best")
    assert loaded_step(tmp_path / "best") == 1
    with pytest.raises(CheckpointError, match=r"step-0000000001 does not exist; .* has step-0000000002"):
        checkpoints.load(tmp_path / "step-0000000001")
    assert checkpoints.load(tmp_path / "elsewhere" / "step-0000000001") is None


def test_saving_goes_on_beside_the_checkpoint_that_was_given_directly(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1), wait=True)
    checkpoints.save(tmp_path / "step-0000000001", snapshot(2), keep=2, wait=True)
    assert steps(tmp_path) == [1, 2]
    assert loaded_step(tmp_path / "step-0000000001") == 1


def test_relative_home_and_symlinked_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    checkpoints = Checkpoints()
    checkpoints.save("a/b/../c", snapshot(1))
    monkeypatch.chdir("/")  # a relative path is the one at the time of the call
    checkpoints.wait()
    checkpoints.save("~/points", snapshot(2), wait=True)
    checkpoints.save(tmp_path / "link", snapshot(3), wait=True)
    assert loaded_step(tmp_path / "a" / "c") == 1
    assert loaded_step("~/points") == 2
    assert (tmp_path / "link").is_symlink()
    assert loaded_step(tmp_path / "real") == 3


def test_a_checkpoint_moved_away_behind_a_symlink_is_read_and_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path / "points", snapshot(1), wait=True)
    os.rename(tmp_path / "points" / "step-0000000001", tmp_path / "big")
    (tmp_path / "points" / "step-0000000001").symlink_to(tmp_path / "big")
    assert loaded_step(tmp_path / "points") == 1
    checkpoints.save(tmp_path / "points", snapshot(2), wait=True)
    assert steps(tmp_path / "points") == [2]
    assert loaded_step(tmp_path / "big") == 1  # what lies outside is not ours to delete


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system")
def test_a_folder_on_another_file_system(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        (tmp_path / "link").symlink_to(other)
        Checkpoints().save(tmp_path / "link" / "deep", snapshot(4), wait=True)
        assert loaded_step(Path(other) / "deep") == 4


def in_child(work: Any) -> int:
    """Exit status of a forked child that runs `work`; 99 if it raised."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work() or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_two_processes_cannot_save_into_one_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, snapshot(1))

    def other() -> int:
        with pytest.raises(
            CheckpointError, match=f"is being written by process {os.getppid()} on .*two runs"
        ):
            Checkpoints().save(tmp_path, snapshot(2))
        checkpoints.wait()  # the parent's save is not the child's to wait for
        return 0

    assert in_child(other) == 0
    gate.opened.set()
    checkpoints.wait()
    assert in_child(lambda: Checkpoints().save(tmp_path, snapshot(2), wait=True)) == 0
    assert loaded_step(tmp_path) == 2


def test_two_threads_take_turns(tmp_path: Path) -> None:
    faults: list[BaseException] = []

    def save_many(first: int) -> None:
        try:
            mine = Checkpoints()
            for step in range(first, first + 10):
                mine.save(tmp_path, snapshot(step), keep=2)
            mine.wait()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=save_many, args=(first,)) for first in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    loaded_step(tmp_path)
    assert all(not path.name.startswith((".saving", ".deleted")) for path in tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o755)
        path = Path(outer) / "points"
        Checkpoints().save(path, snapshot(1), wait=True)

        def as_nobody() -> int:
            os.setuid(65534)
            with pytest.raises(
                CheckpointError, match=r"cannot save into .*points: Permission denied.*writable"
            ):
                Checkpoints().save(path, snapshot(2))
            with pytest.raises(CheckpointError, match=r"cannot save into .*new: Permission denied"):
                Checkpoints().save(Path(outer) / "new", snapshot(2))
            return loaded_step(path) - 1

        assert in_child(as_nobody) == 0


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "points").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot save into .*points: it is a file"):
        Checkpoints().save(tmp_path / "points", snapshot(1))
    with pytest.raises(CheckpointError, match=r"cannot save into .*deep"):
        Checkpoints().save(tmp_path / "points" / "deep", snapshot(1))


def test_everything_is_durable_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def note_rename(source: Path, target: Path) -> None:
        log.append(f"rename {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    Checkpoints().save(tmp_path / "points", snapshot(1), wait=True)
    made = log.index("rename step-0000000001")
    assert log[0] == tmp_path.name
    assert log[1:made][:3] == ["model.safetensors", "state.pt", "manifest.json"]
    assert log[made - 1].startswith(".saving-step-0000000001")
    assert log[made + 1] == "points"


SCRIPT = """
import sys, torch
from hotloop.loop.checkpoint import Checkpoints, Snapshot, writer
if {faulty}:
    def fail(*args): raise OSError(28, "No space left on device")
    writer._write_tensors = fail
Checkpoints().save(sys.argv[1], Snapshot(1, {{"m": {{"w": torch.ones(300_000)}}}}))
raise SystemExit({status})
"""


@pytest.mark.parametrize("faulty", [False, True])
def test_a_save_in_flight_is_finished_or_its_fault_told_at_exit(tmp_path: Path, faulty: bool) -> None:
    script = SCRIPT.format(faulty=faulty, status=3)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3, ended.stderr
    if faulty:
        assert "hotloop: checkpoint of step 1 was not saved" in ended.stderr
        assert "No space left on device" in ended.stderr
        assert list_checkpoints(tmp_path) == []
    else:
        assert ended.stderr == ""
        loaded = Checkpoints().load(tmp_path)
        assert loaded is not None
        assert torch.equal(loaded.tensors["m"]["w"], torch.ones(300_000))


def test_pieces_of_a_large_file_are_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.loop.checkpoint import stream

    monkeypatch.setattr(stream, "PIECE_BYTES", 1000)
    tensors = {f"t{i}": torch.randn(i * 37) for i in range(30)}
    blob = torch.randn(5000)
    Checkpoints().save(tmp_path, Snapshot(1, {"m": tensors}, {"o": blob}), wait=True)
    loaded = Checkpoints().load(tmp_path)
    assert loaded is not None
    assert all(torch.equal(loaded.tensors["m"][name], tensors[name]) for name in tensors)
    assert torch.equal(loaded.objects["o"], blob)
    path = tmp_path / "step-0000000001" / "m.safetensors"
    data = bytearray(path.read_bytes())
    data[-1500] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"m\.safetensors is altered: the checksum of bytes \d+ to \d+ is"
    ):
        Checkpoints().load(tmp_path)
