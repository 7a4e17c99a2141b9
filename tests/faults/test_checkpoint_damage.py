"""Damage of every kind to every file: the error names file and fault; an older whole one is used instead."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint import Checkpoints, Snapshot, list_checkpoints, newest

FILES = ["model.safetensors", "optimizer.safetensors", "state.pt", "manifest.json"]


def save(folder: Path, step: int, keep: int = 1) -> Path:
    tensors = {
        "model": {"w": torch.full((100,), float(step)), "b": torch.full((7,), step, dtype=torch.int8)},
        "optimizer": {"m": torch.full((50,), step)},
    }
    Checkpoints().save(folder, Snapshot(step, tensors, {"state": {"step": step}}), keep=keep, wait=True)
    return folder / f"step-{step:010d}"


def check_whole(folder: Path, step: int) -> None:
    loaded = Checkpoints().load(folder)
    assert loaded is not None
    assert loaded.step == step
    assert loaded.objects == {"state": {"step": step}}
    values = torch.cat([tensor.double() for part in loaded.tensors.values() for tensor in part.values()])
    assert values.unique().tolist() == [step]


def truncate(path: Path) -> str:
    os.truncate(path, path.stat().st_size // 2)
    return "truncated"


def empty(path: Path) -> str:
    os.truncate(path, 0)
    return "truncated"


def cut_one_byte(path: Path) -> str:
    os.truncate(path, path.stat().st_size - 1)
    return "truncated"


def lengthen(path: Path) -> str:
    with path.open("ab") as file:
        file.write(b"\0")
    return "altered"


def flip(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    return "altered"


def zero(path: Path) -> str:
    path.write_bytes(bytes(path.stat().st_size))
    return "altered"


def remove(path: Path) -> str:
    path.unlink()
    return "missing"


DAMAGES = [truncate, empty, cut_one_byte, lengthen, flip, zero, remove]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], str]
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2, keep=2)
    word = damage(path / name)
    # An older one is whole: it is used, and a line says why.
    check_whole(tmp_path, 1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"hotloop: {path / name} is ")
    assert word in lines[0]
    assert "passed over for step-0000000001" in lines[0]
    # It was asked for by name: no other will do.
    with pytest.raises(CheckpointError) as caught:
        Checkpoints().load(path)
    assert str(path / name) in str(caught.value)
    assert word in str(caught.value)
    # It is the only one.
    shutil.rmtree(tmp_path / "step-0000000001")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole") as caught:
        Checkpoints().load(tmp_path)
    assert str(path / name) in str(caught.value)
    assert word in str(caught.value)
    # The next save makes all good again.
    save(tmp_path, 3)
    check_whole(tmp_path, 3)
    assert list_checkpoints(tmp_path) == [tmp_path / "step-0000000003"]


def test_a_truncated_file_tells_its_length(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is truncated: has 100 of {size:,} bytes"):
        Checkpoints().load(tmp_path)
    assert newest(tmp_path) is None


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_seen(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1) / name
    data = path.read_bytes()
    random.seed(0)
    # All bits of the first bytes, where headers and lengths are, and some of the rest.
    places = [*range(8 * 64), *random.sample(range(8 * len(data)), 200)]
    for place in places:
        altered = bytearray(data)
        altered[place // 8] ^= 1 << place % 8
        path.write_bytes(altered)
        with pytest.raises(CheckpointError, match=rf"{name} is (altered|no manifest|truncated)"):
            Checkpoints().load(tmp_path)
    path.write_bytes(data)
    check_whole(tmp_path, 1)


def test_swapped_files_are_seen(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2, keep=2)
    shutil.copy(first / "model.safetensors", second / "model.safetensors")
    check_whole(tmp_path, 1)
    shutil.copy(first / "manifest.json", second / "manifest.json")
    with pytest.raises(CheckpointError, match=r"step-0000000002/optimizer\.safetensors is altered"):
        Checkpoints().load(second)


def test_an_extra_file_is_named_and_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, 1)
    (path / "notes.txt").write_text("mine")
    (path / ".DS_Store").write_text("")
    check_whole(tmp_path, 1)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path / 'notes.txt'} is not part of this checkpoint" in error


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "model.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is"):
        Checkpoints().load(tmp_path)


def test_a_step_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-0000000002").write_text("x")
    check_whole(tmp_path, 1)
    assert "step-0000000002 is a file" in capsys.readouterr().err


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.loop.checkpoint import manifest

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT_VERSION", 2)
        save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"manifest\.json has format version 2; .* upgrade hotloop"):
        Checkpoints().load(tmp_path)


def torch_save(path: Path) -> None:
    torch.save({"model": torch.ones(2)}, path)


def old_torch_save(path: Path) -> None:
    torch.save({"model": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def safetensors_file(path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, path)


def accelerate_folder(path: Path) -> None:
    path.mkdir()
    safetensors_file(path / "model.safetensors")
    torch_save(path / "optimizer.bin")
    (path / "random_states_0.pkl").write_bytes(pickle.dumps({}))


def distributed_folder(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").touch()
    (path / "__0_0.distcp").touch()


def lightning_folder(path: Path) -> None:
    path.mkdir()
    torch_save(path / "epoch=1-step=10.ckpt")


def weights_folder(path: Path) -> None:
    path.mkdir()
    torch_save(path / "model.pt")


FOREIGN = [
    (torch_save, "is a file, not a folder of checkpoints; it looks like a file written by torch.save"),
    (old_torch_save, "it looks like a pickle"),
    (safetensors_file, "it looks like a safetensors file"),
    (lambda path: path.write_text('{"a": 1}'), "it looks like a JSON file"),
    (lambda path: path.write_text("hello"), "it looks like text"),
    (lambda path: path.touch(), "it looks like an empty file"),
    (lambda path: path.symlink_to("nowhere"), "is a broken symlink"),
    (
        accelerate_folder,
        "has no hotloop checkpoint and looks like a folder written by Accelerate's save_state",
    ),
    (distributed_folder, r"looks like a torch\.distributed\.checkpoint folder"),
    (lightning_folder, r"looks like a folder of Lightning checkpoints \(epoch=1-step=10\.ckpt\)"),
    (weights_folder, r"looks like a folder of single weight files \(model\.pt\)"),
]


@pytest.mark.parametrize(("make", "text"), FOREIGN, ids=[text for _, text in FOREIGN])
def test_what_another_program_wrote_is_recognised(
    tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(CheckpointError, match=text) as caught:
        Checkpoints().load(path)
    assert str(path) in str(caught.value)


def test_a_foreign_folder_with_a_steps_name(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "step-0000000005")
    with pytest.raises(
        CheckpointError, match=r"manifest\.json is missing; the folder looks like .* Accelerate"
    ):
        Checkpoints().load(tmp_path / "step-0000000005")
    save(tmp_path, 6)
    check_whole(tmp_path, 6)


def test_a_manifest_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(CheckpointError, match=r"manifest\.json is no manifest of a hotloop checkpoint"):
        Checkpoints().load(tmp_path)
