"""What a verb of the command is, and the parser that each begins with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Verb", "make_parser"]


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


def make_parser(name: str, summary: str, epilog: str, *, usage: str | None = None) -> argparse.ArgumentParser:
    """The parser of `hotloop NAME`: `summary` as a sentence, `epilog` as it is written, no abbreviated options."""
    return argparse.ArgumentParser(
        prog=f"hotloop {name}",
        usage=usage,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
