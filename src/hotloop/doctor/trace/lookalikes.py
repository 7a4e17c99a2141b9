"""Files that are taken for profiler traces and are none: told apart by their content, so that each is named."""

from __future__ import annotations

import re

__all__ = ["name_lookalike"]

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x00\x05\x16\x07", "a macOS resource fork (an AppleDouble `._` file); the trace is the file without `._`"),
    (b"SQLite format 3", "an SQLite database, such as `nsys export` writes; export a Chrome trace from the profiler"),
    (b"PK\x03\x04", "a zip archive, such as torch.save writes"),
    (b"\x80\x04", "a pickle, such as a memory snapshot of torch.cuda.memory"),
    (b"\x80\x02", "a pickle"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"\x7fELF", "a program"),
    (b"%PDF", "a PDF document"),
    (b"<!DOCTYPE", "a web page"),
    (b"<!doctype", "a web page"),
    (b"<html", "a web page"),
    (b"version https://git-lfs", "a Git LFS pointer; `git lfs pull` fetches the trace itself"),
)  # fmt: skip

_KEYS: tuple[tuple[str, str], ...] = (
    (r'"rocprofiler-sdk-tool"', "JSON output of rocprofv3; record with torch.profiler instead"),
    (r'speedscope\.app|"\$schema"\s*:\s*"https://www\.speedscope', "a speedscope profile, as py-spy writes"),
    (r'"schema"\s*:\s*"[^"]*(?:chakra|\d)[^"]*"[\s\S]*"nodes"', "a PyTorch execution trace (operators without times)"),
    (r'"nodes"[\s\S]*"(?:samples|timeDeltas|callFrame)"', "a CPU profile of a browser or of Node.js"),
    (r'"device_traces"|"segments"\s*:\s*\[', "a memory snapshot of torch.cuda.memory"),
    (r'"(?:nvtxKernel|CUPTI_ACTIVITY|StringIds|TraceProcessEvent|CudaEvent)', "a JSON export of Nsight Systems"),
    (r'"data"\s*:\s*\{[\s\S]*"hostname"', "a report of nsys or ncu"),
    (r'"cells"\s*:\s*\[', "a Jupyter notebook"),
    (r'"locations"\s*:|"frames"\s*:', "a profile of a sampling profiler"),
)  # fmt: skip


def name_lookalike(head: bytes, name: str, size_bytes: int) -> str | None:
    """What a file is that begins with `head` (decompressed) and is no trace; None if nothing is known of it.

    `head` may be the first few hundred KiB; `size_bytes` is the size of all that could be read.
    """
    if not head.strip(b"\0 \t\r\n\xef\xbb\xbf"):
        return "empty" if not size_bytes else "nothing but blanks"
    for magic, what in _MAGIC:
        if head.lstrip()[: len(magic)] == magic:
            return what
    if name.endswith((".pftrace", ".perfetto-trace")) or (head[:1] == b"\n" and b"\0" in head[:200]):
        return "a Perfetto protobuf trace; this reads Chrome/Kineto JSON traces"
    if b"\0" in head[:1000]:
        return "a binary file"
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if re.match(r"\[\s*\[", text):
        return "a memory timeline of torch.profiler (times and sizes by category), not a trace of events"
    for pattern, what in _KEYS:
        if re.search(pattern, text):
            return what
    if text[0] not in "{[":
        return "no JSON"
    return None
