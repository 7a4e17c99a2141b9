"""What a verb of the command is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Verb"]


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        name: the word on the command line.
        summary: one line for the list of verbs.
        run: takes the arguments after the verb and returns the exit status; may raise HotloopError, or as
            argparse does SystemExit.
    """

    name: str
    summary: str
    run: Callable[[list[str]], int]
