"""Names that scripts may import or call but that hotloop does not carry out: each says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from hotloop.errors import HotloopError

__all__ = ["UnsupportedError", "refuse", "unsupported_class", "unsupported_function"]


class UnsupportedError(HotloopError, NotImplementedError):
    """A feature of accelerate that hotloop has not; the text names the hotloop form where there is one."""


def refuse(name: str, instead: str) -> NoReturn:
    """Raise the error for `name`; `instead` says what to use.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"hotloop.accelerate does not support {name}: {instead}")


def unsupported_function(name: str, instead: str) -> Any:
    """A function called `name` that raises when it is called."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Not supported: {instead}."
    return function


def unsupported_class(name: str, instead: str) -> Any:
    """A class called `name` that can be named, annotated with and tested against, and raises when built."""

    def init(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    return type(name, (), {"__init__": init, "__doc__": f"Not supported: {instead}."})
