"""Running the C compiler on generated source, and which instructions this processor has."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hotloop.native.emit.writer import Target
from hotloop.native.faults import BuildError

__all__ = ["TARGETS", "compile_shared", "find_compiler", "find_target", "missing_instructions"]

_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx2",
    "-mfma",
    "-mprefer-vector-width=512",
)
TARGETS: dict[str, Target] = {
    "avx512vnni": Target("avx512vnni", (*_AVX512, "-mavx512vnni"), 24, vnni=True),
    "avx512": Target("avx512", _AVX512, 24),
    "avx2": Target("avx2", ("-mavx2", "-mfma", "-mno-avx512f"), 4),
    "generic": Target("generic", (), 2),
}
# Neither -ffast-math nor anything that assumes numbers: NaN must pass through.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-fno-semantic-interposition",
    "-fvisibility=hidden",
    "-Wno-psabi",
)


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def missing_instructions(name: str) -> list[str]:
    """What a target of that name needs and this processor lacks, as /proc/cpuinfo spells it."""
    needed = {
        "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
        "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
        "avx2": ("avx2", "fma"),
    }.get(name, ())
    flags = _cpu_flags()
    # where the list cannot be read nothing is known to be missing
    return [flag for flag in needed if flags and flag not in flags]


def find_target(name: str = "native") -> Target:
    """The target of that name; "native": the best that this processor has.

    Raises:
        BuildError: there is no such target.
    """
    if name != "native":
        if name not in TARGETS:
            raise BuildError(f"target {name!r} is not known; there are: native, {', '.join(TARGETS)}")
        return TARGETS[name]
    flags = _cpu_flags()
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags and platform.machine() == "x86_64":
        return TARGETS["avx512vnni" if "avx512_vnni" in flags else "avx512"]
    return TARGETS["avx2" if {"avx2", "fma"} <= flags else "generic"]


def find_compiler() -> str:
    """The C compiler: $CC, gcc or clang.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CC", ""), "gcc", "clang", "cc"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C compiler found; install gcc (apt-get install gcc) or set CC to one")


def compile_shared(
    source: Path, out: Path, target: Target, *, include: Sequence[Path] = (), extra: Sequence[str] = ()
) -> None:
    """Compile one C file into a shared library, which appears whole or not at all.

    Raises:
        BuildError: the compiler failed; holds its first messages.
    """
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    os.close(handle)
    command = [
        find_compiler(),
        *FLAGS,
        *target.flags,
        *(f"-I{path}" for path in include),
        *extra,
        "-shared",
        "-o",
        temporary,
        str(source),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            first = "\n".join(done.stderr.strip().splitlines()[:12])
            raise BuildError(f"{' '.join(command[:1])} refused {source}:\n{first}")
        os.chmod(temporary, 0o755)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)
    finally:
        Path(temporary).unlink(missing_ok=True)
