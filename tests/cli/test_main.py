from __future__ import annotations

import subprocess
import sys

import hotloop


def test_python_m_hotloop_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"hotloop {hotloop.__version__}\n"


def test_the_command_itself_imports_little() -> None:
    """On a bare node `launch` and `env` run with torch and the standard library."""
    program = (
        "import sys, torch; before = set(sys.modules); import hotloop.cli; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"hotloop", *sys.stdlib_module_names}
