"""What a path looks like that is no hotloop checkpoint, so that an error can say it."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["describe_foreign"]


def describe_foreign(path: Path, *, prefix: str = "") -> str:
    """A few words on what `path` looks like, after `prefix`; an empty string if it is nothing known."""
    try:
        words = _describe_folder(path) if path.is_dir() else _describe_file(path)
    except OSError:
        words = ""
    return prefix + words if words else ""


def _describe_folder(path: Path) -> str:
    names = {entry.name for entry in path.iterdir()}

    def has(*starts: str) -> bool:
        return any(name.startswith(starts) for name in names)

    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return "a torch.distributed.checkpoint folder"
    if "trainer_state.json" in names or has("checkpoint-"):
        return "a transformers Trainer folder"
    if has("random_states_") or (
        has("pytorch_model", "model.safetensors") and has("optimizer.bin", "scheduler.bin")
    ):
        return "a folder written by Accelerate's save_state"
    if {"config.json", "model.safetensors"} <= names or {"config.json", "pytorch_model.bin"} <= names:
        return "a transformers model folder (save_pretrained)"
    if "latest" in names and has("global_step"):
        return "a DeepSpeed checkpoint folder"
    for name in sorted(names):
        if name.endswith(".ckpt"):
            return f"a folder of Lightning checkpoints ({name})"
    for name in sorted(names):
        if name.endswith((".pt", ".pth", ".bin", ".safetensors")):
            return f"a folder of single weight files ({name})"
    return ""


def _describe_file(path: Path) -> str:
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        return "an empty file"
    with path.open("rb") as file:
        head = file.read(1024)
    if head.startswith(b"PK\x03\x04"):
        return (
            "a file written by torch.save" if b"data.pkl" in head or b"/version" in head else "a zip archive"
        )
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return "a pickle, such as an old torch.save writes"
    if head.startswith(b"\x89HDF"):
        return "an HDF5 file"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 0 < length <= size_bytes - 8:
        return "a safetensors file"
    if head.lstrip()[:1] in (b"{", b"["):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return "text"
        return "a JSON file"
    try:
        head.decode()
    except UnicodeDecodeError:
        return ""
    return "text"
