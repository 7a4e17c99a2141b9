"""What hotloop decides by itself, said once, in one line, and kept for the record."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["Notes"]


class Notes:
    """Lines already said; `keep`, if given, also receives each new one."""

    def __init__(self, *, speak: bool) -> None:
        self.lines: list[str] = []
        self.keep: Callable[[str], None] | None = None
        self.show: Callable[[str], None] | None = None
        self._speak = speak

    def say(self, text: str) -> None:
        """Print `text` to stderr as one line, unless it was said before."""
        if text in self.lines:
            return
        self.lines.append(text)
        if self.keep is not None:
            self.keep(text)
        if self._speak:
            line = f"hotloop: {text}"
            if self.show is not None:
                self.show(line)
            else:
                print(line, file=sys.stderr, flush=True)
