"""What a cold CIFAR-10 process does while torch is imported: start CUDA, read the images, compile kernels.

Only the standard library is used here, so that these threads run before `import torch`; all of them wait in system
calls or in C, where Python's lock is free.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Beside", "architecture", "check", "libraries", "load_libraries", "read_stored", "start_context"]

IMAGE_BYTES, LABEL_BYTES = 32 * 32 * 3, 8


class Beside:
    """Work in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """What the work returned, or its error raised; waits for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


def start_context() -> None:
    """Make device 0's primary context by the driver, which torch's own start then finds made."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, device = ctypes.c_void_p(), ctypes.c_int()
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")


def architecture() -> str:
    """Device 0's, as compilers call it: "sm_90"."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    for out, attribute in ((major, 75), (minor, 76)):
        check(driver.cuDeviceGetAttribute(ctypes.byref(out), attribute, device), "cuDeviceGetAttribute")
    return f"sm_{major.value}{minor.value}"


def check(code: int, name: str) -> None:
    """Raise a RuntimeError unless a CUDA library's function returned 0."""
    if code:
        raise RuntimeError(f"{name} returned {code}")


def libraries(pattern: str) -> list[Path]:
    """Shared objects of that name which the pip packages beside torch bring, or the system's CUDA has."""
    places = [Path(p) for p in sys.path if (Path(p) / "torch" / "lib").is_dir()]
    found = [f for p in places for f in (*p.glob(f"nvidia/*/lib/{pattern}"), *p.glob(f"torch/lib/{pattern}"))]
    return found + [f for p in ("/usr/local/cuda/lib64",) for f in Path(p).glob(pattern)]


def load_libraries() -> None:
    """Open cuBLAS's and cuDNN's shared objects, which torch would open at their first use."""
    names = (
        "libcublasLt.so.1?", "libcublas.so.1?", "libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9",
        "libcudnn_cnn.so.9", "libcudnn_heuristic.so.9", "libcudnn_engines_precompiled.so.9",
        "libcudnn_engines_runtime_compiled.so.9",
    )  # fmt: skip
    for name in names:
        for found in libraries(name)[:1]:
            try:
                ctypes.CDLL(str(found))
            except OSError:
                continue  # torch opens it when it needs it


def read_stored(file: Path) -> tuple[mmap.mmap, mmap.mmap]:
    """Bytes of the uint8 images [N, 32, 32, 3] and int64 labels [N] in a file that `torch.save` wrote.

    Such a file is a zip archive which holds each tensor's memory as it is, uncompressed; both are contiguous.

    Raises:
        ValueError: it holds no two entries whose sizes fit.
    """
    with zipfile.ZipFile(file) as archive:
        entries = [i for i in archive.infolist() if i.filename.rpartition("/")[0].endswith("/data")]
    entries.sort(key=lambda i: i.file_size)
    if len(entries) < 2 or any(i.compress_type != zipfile.ZIP_STORED for i in entries):
        raise ValueError(f"{file} does not hold images and labels as torch.save writes them")
    labels, images = entries[-2:]
    if images.file_size * LABEL_BYTES != labels.file_size * IMAGE_BYTES:
        raise ValueError(
            f"{file} holds {images.file_size} and {labels.file_size} bytes, not images and labels"
        )
    parts = []
    with file.open("rb", buffering=0) as stream:
        for entry in (images, labels):
            # the local header says by itself how long it is
            stream.seek(entry.header_offset + 26)
            name, extra = struct.unpack("<HH", stream.read(4))
            stream.seek(entry.header_offset + 30 + name + extra)
            # a bytearray would be cleared first, with Python's lock held
            part = mmap.mmap(-1, entry.file_size)
            view, at = memoryview(part), 0
            while at < len(part):
                got = stream.readinto(view[at:])
                if not got:
                    raise ValueError(f"{file} ends early")
                at += got
            parts.append(part)
    return parts[0], parts[1]
