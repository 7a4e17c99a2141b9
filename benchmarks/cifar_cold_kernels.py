"""`cifar_cold.cu` compiled by NVRTC and launched through the CUDA driver: no compiler to install, no cache to fill.

`Compilation` needs the standard library alone and runs beside `import torch`, a thread for each kernel.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

from benchmarks.cifar_cold_start import check, libraries

__all__ = ["Compilation", "Kernels"]

PARTS = {
    "POOL_AND_SUM": ("pool_and_sum_0", "pool_and_sum_1"),
    "ADD_UP": ("add_up",),
    "SCALE_AND_GATE": ("scale_and_gate_0", "infer_0", "infer_1"),
    "SLOPE_AND_SUM": ("slope_and_sum",),
    "SLOPE_AND_SCATTER": ("slope_and_scatter_0", "slope_and_scatter_1"),
    "FILTERED": ("filtered",),
}
"""What is compiled apart, by the name that the source knows it by, and the kernels in it."""


class Compilation:
    """Threads that compile the parts for one architecture ("sm_90"); `modules` waits for them."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self._source = Path(__file__).with_name("cifar_cold.cu").read_bytes()
        self._found: dict[str, bytes] = {}
        self._errors: list[BaseException] = []
        for name in ("libnvrtc-builtins.so.1?.?", "libnvrtc.so.1?"):
            self._library = ctypes.CDLL(str(([*libraries(name)] or [Path(name.replace("?", "3"))])[0]))
        self._threads = [threading.Thread(target=self._one, args=(part,)) for part in PARTS]
        for thread in self._threads:
            thread.start()

    def modules(self) -> dict[str, bytes]:
        """Machine code (a cubin) of each part.

        Raises:
            RuntimeError: NVRTC refused one; its log is in the message.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self._found

    def _one(self, part: str) -> None:
        try:
            self._found[part] = self._compile(part)
        except BaseException as error:
            self._errors.append(error)

    def _compile(self, part: str) -> bytes:
        nvrtc, program, size = self._library, ctypes.c_void_p(), ctypes.c_size_t()
        check(
            nvrtc.nvrtcCreateProgram(ctypes.byref(program), self._source, b"cifar_cold.cu", 0, None, None),
            "nvrtcCreateProgram",
        )
        options = [f"--gpu-architecture={self.architecture}".encode(), b"-std=c++17", f"-D{part}".encode()]
        array = (ctypes.c_char_p * len(options))(*options)
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC refused {part}: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return code.raw


class Kernels:
    """Loaded parts; `launch` starts a kernel on a stream of device 0's primary context."""

    def __init__(self, modules: dict[str, bytes]) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context, device = ctypes.c_void_p(), ctypes.c_int()
        check(self._driver.cuInit(0), "cuInit")
        check(self._driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
        check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device), "retain")
        self._enter()
        self._functions: dict[str, ctypes.c_void_p] = {}
        for part, code in modules.items():
            module = ctypes.c_void_p()
            check(self._driver.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
            for name in PARTS[part]:
                function = ctypes.c_void_p()
                check(
                    self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
                    "cuModuleGetFunction",
                )
                self._functions[name] = function

    def _enter(self) -> None:
        # a thread that has called no CUDA function yet (autograd's) has no context
        check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def launch(self, name: str, grid: tuple[int, int], threads: int, stream: int, *values: Any) -> None:
        """Start `name` with these arguments: tensors, and ctypes numbers."""
        self._enter()
        held = [v if isinstance(v, ctypes._SimpleCData) else ctypes.c_void_p(v.data_ptr()) for v in values]
        array = (ctypes.c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
        check(
            self._driver.cuLaunchKernel(
                self._functions[name], *grid, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), array, None
            ),
            f"cuLaunchKernel of {name}",
        )
