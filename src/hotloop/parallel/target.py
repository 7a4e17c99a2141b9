"""The script or module to launch, checked once before several processes would each find it wrong."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import traceback
import warnings
from pathlib import Path

from hotloop.errors import LaunchError

__all__ = ["check_target"]


def check_target(target: str, *, module: bool) -> None:
    """Check that the target exists and is valid Python, without running any of it.

    Raises:
        LaunchError: it does not exist, is no Python, or a path was given where a module was wanted.
    """
    if module:
        _check_module(target)
    else:
        _check_script(target)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        raise LaunchError(f"{target} is a folder; give a script, or -m with the name of a module")
    if not path.exists():
        hint = ""
        if all(part.isidentifier() for part in target.split(".")):
            hint = f". For a module: -m {target}"
        raise LaunchError(f"script {target} does not exist (looked in {os.getcwd()}){hint}")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise LaunchError(f"script {target} cannot be read: {error.strerror}") from None
    _check_source(source, str(path.absolute()))


def _check_source(source: bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise LaunchError(f"{name} is not valid Python:\n{_show(error)}") from None
    except ValueError as error:
        raise LaunchError(f"{name} is not Python: {error}") from None


def _show(error: SyntaxError) -> str:
    return "".join(traceback.format_exception_only(error)).rstrip()


def _check_module(name: str) -> None:
    if name.endswith(".py") or os.sep in name:
        raise LaunchError(
            f"-m takes the name of a module such as package.train, not the path {name}; leave out -m"
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise LaunchError(f"-m {name}: that is not the name of a module")
    here = os.getcwd()
    path = sys.path[:]
    sys.path[:] = [here, *path]
    try:
        spec = _find(name)
    finally:
        sys.path[:] = path
    if spec is None:
        raise LaunchError(f"there is no module {name} (looked in {here} and in {sys.prefix})")
    if spec.submodule_search_locations is not None:
        inner = importlib.machinery.PathFinder.find_spec("__main__", list(spec.submodule_search_locations))
        if inner is None:
            raise LaunchError(f"module {name} is a package without a __main__.py, so it cannot be run")
        spec = inner
    if spec.origin and spec.origin.endswith(".py"):
        _check_source(Path(spec.origin).read_bytes(), spec.origin)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module without importing the packages around it."""
    head, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except ValueError:  # a module that has no spec, such as __main__
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # by its last name: the full one makes the search for namespace packages look at what is imported
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec
