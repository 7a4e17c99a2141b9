"""What a sink is: where logged rows end up. Anything with these two methods can be handed to `Log`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hotloop.state.ring import Row

__all__ = ["Sink"]


@runtime_checkable
class Sink(Protocol):
    """Takes rows in order, in bulk, from one thread at a time.

    An adapter for another tracker is a class of a few lines:

    >>> class Printer:
    ...     def write_rows(self, rows):
    ...         for row in rows:
    ...             print(row.step, row.values)
    ...
    ...     def close(self):
    ...         pass
    >>> isinstance(Printer(), Sink)
    True
    >>> Printer().write_rows([Row(step=3, time_s=0.0, values={"loss": 0.5})])
    3 {'loss': 0.5}

    A sink may raise: `Log` says so once, counts the rows of that call as lost and goes on. A sink with a
    method `flush()` has it called by `Log.flush`.
    """

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Store `rows`; all of them or, when raising, none."""

    def close(self) -> None:
        """Store what is left and release files; called once, after the last rows."""
