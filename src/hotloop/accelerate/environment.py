"""Reading flags from environment variables, and changing the environment for a while."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hotloop.errors import SettingError

__all__ = [
    "are_libraries_initialized",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "get_current_device_type",
    "get_free_port",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "str_to_bool",
]

TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for a word that means yes, 0 for one that means no (as bools with `to_bool`).

    Raises:
        SettingError: the word means neither.
    """
    word = value.lower()
    if word not in TRUE_WORDS and word not in FALSE_WORDS:
        raise SettingError(
            f"invalid truth value {value!r}; write one of {', '.join(TRUE_WORDS + FALSE_WORDS)}"
        )
    answer = word in TRUE_WORDS
    return answer if to_bool else int(answer)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The truth of the environment variable `key`, `default` if it is not set."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of the environment variable `key`, `default` if it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """The first of the variables `env_keys` that holds a number >= 0, else `default`."""
    for key in env_keys:
        number = int(os.environ.get(key, "-1"))
        if number >= 0:
            return number
    return default


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the names that have been imported already."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Kind of this machine's accelerator and the distributed type that goes with it, without starting a driver."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return ("xpu", "MULTI_XPU") if kind is not None and kind.type == "xpu" else ("cuda", "MULTI_GPU")


def check_cuda_p2p_ib_support() -> bool:
    """Always True: whether cards can talk directly is left to NCCL, which finds it out itself."""
    return True


def get_free_port() -> int:
    """A port of this machine that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Within the block, each keyword is the environment variable of its upper-case name."""
    before = {key.upper(): os.environ.get(key.upper()) for key in kwargs}
    os.environ.update({key.upper(): str(value) for key, value in kwargs.items()})
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Within the block no environment variable is set; afterwards they are what they were."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(function: Any) -> Any:
    """Decorator: after each call, variables called ACCELERATE_... are what they were before it.

    On a class it guards every method, and those of subclasses.
    """
    if isinstance(function, type):
        _guard_methods(function)
        return function
    return _guard(function)


def _guard(function: Callable[..., Any]) -> Callable[..., Any]:
    import inspect

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def guarded_coroutine(*args: Any, **kwargs: Any) -> Any:
            before = _accelerate_variables()
            try:
                return await function(*args, **kwargs)
            finally:
                _put_back(before)

        return guarded_coroutine

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before = _accelerate_variables()
        try:
            return function(*args, **kwargs)
        finally:
            _put_back(before)

    return guarded


def _guard_methods(kind: type) -> None:
    for name, member in list(vars(kind).items()):
        if isinstance(member, staticmethod | classmethod):
            setattr(kind, name, type(member)(_guard(member.__func__)))
        elif callable(member) and not isinstance(member, type) and not name.startswith("__init_subclass__"):
            setattr(kind, name, _guard(member))
    inherited = kind.__init_subclass__

    def init_subclass(cls: type, **kwargs: Any) -> None:
        inherited(**kwargs)
        _guard_methods(cls)

    kind.__init_subclass__ = classmethod(init_subclass)  # type: ignore


def _accelerate_variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}


def _put_back(before: dict[str, str]) -> None:
    for key in _accelerate_variables():
        if key not in before:
            del os.environ[key]
    os.environ.update(before)


def _restore(before: dict[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
