"""What surrounds a run: versions, installed packages, environment variables, the command and its process."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from hotloop.runs.jsonfile import looks_secret

__all__ = [
    "find_packages",
    "find_variables",
    "find_versions",
    "identify_process",
    "process_lives",
    "show_command",
]

_PREFIXES = (
    "HOTLOOP_",
    "CUDA_",
    "CUBLAS_",
    "HIP_",
    "ROCR_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "PYTORCH_",
    "TORCH_",
    "SLURM_",
)
_NAMES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED"})
# For variables any mention is enough: nothing that explains a run is lost by leaving one of them out.
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_METADATA = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist-info|egg-info)$")


def find_versions() -> dict[str, str]:
    """Versions of what computes: hotloop, torch, numpy, Python, and of the system."""
    versions = {"hotloop": sys.modules["hotloop"].__version__, "torch": torch.__version__}
    if "numpy" in sys.modules:
        versions["numpy"] = sys.modules["numpy"].__version__
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version:
            versions[name] = version
    versions["python"] = platform.python_version()
    versions["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return versions


def find_packages() -> dict[str, str]:
    """Installed packages and versions, read from the names of their metadata folders on sys.path.

    importlib.metadata opens a file for each package: tens of milliseconds, of which the interpreter is
    held most. The folder names say the same; of a package found twice the first counts, as for imports.
    """
    found: dict[str, str] = {}
    for place in dict.fromkeys(sys.path):
        try:
            entries = sorted(os.listdir(place or "."))
        except OSError:
            continue
        for entry in entries:
            match = _METADATA.match(entry)
            if match:
                found.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return dict(sorted(found.items()))


def find_variables() -> dict[str, str]:
    """Environment variables that change how a run behaves; none whose name hints at a secret."""
    return {
        name: _URL_LOGIN.sub("<withheld>@", value)
        for name, value in sorted(os.environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and not any(word in name.upper() for word in _SECRET_WORDS)
    }


def show_command() -> list[str]:
    """The command line as the interpreter got it, with the values of options that name a secret withheld."""
    words = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])
    shown: list[str] = []
    after_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if after_secret and not word.startswith("-"):
            shown.append("<withheld>")
            after_secret = False
            continue
        secret = looks_secret(name)
        after_secret = secret and not equals and word.startswith("-")
        shown.append(f"{name}=<withheld>" if secret and equals else _URL_LOGIN.sub("<withheld>@", word))
    return shown


def identify_process() -> dict[str, Any]:
    """This process, so that another can tell later whether it lives, even if its number was reused."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "boot": _boot(), "began": _began(pid)}


def process_lives(process: dict[str, Any]) -> bool | None:
    """Whether a process described by `identify_process` lives; None if that cannot be told here."""
    if process.get("host") != socket.gethostname() or not isinstance(process.get("pid"), int):
        return None
    if process.get("boot") != _boot():
        return False
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process.get("began") == _began(process["pid"])


def _boot() -> str | None:
    """A name for the time since this machine was started; None where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _began(pid: int) -> int | None:
    """When process `pid` began, in clock ticks since the machine's start; None where the system does not say.

    A dead process that its parent has not waited for counts as gone.
    """
    try:
        # The name in parentheses may hold spaces; what follows it does not.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in ("Z", "X") else int(fields[18])
