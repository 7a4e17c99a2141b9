"""A progress bar in one process."""

from __future__ import annotations

from typing import Any

from hotloop.accelerate.state import PartialState
from hotloop.errors import SettingError

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by one process of each node only unless `main_process_only` is False.

    Raises:
        SettingError: a bool came first, the form of an older interface.
        ImportError: tqdm is not installed.
    """
    from tqdm.auto import tqdm as bar  # type: ignore[import-untyped]

    if args and isinstance(args[0], bool):
        raise SettingError("give main_process_only=... by name; the first argument is what is iterated")
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=disable)
