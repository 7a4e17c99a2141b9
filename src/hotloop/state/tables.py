"""Schedules as tables: the value for every future update lies on the device before it is needed."""

from __future__ import annotations

import torch

__all__ = ["ScheduleTable"]


class ScheduleTable:
    """Rows of values for each update, float32 [rows, columns], and the row in force.

    The row in force is `current`, float32 [columns]; its elements' views are what optimizers hold as their
    learning rates, momenta and weight decays. Which row that is, only the device need know.
    """

    def __init__(self, device: torch.device, columns: int) -> None:
        # moving to a larger table breaks captured steps: make it large at once, but no more than 4 MiB
        capacity = min(65536, max(4096, 2**20 // max(columns, 1)))
        self.device = device
        self.filled = 0
        self._rows = torch.zeros(capacity, columns, dtype=torch.float32, device=device)
        self._row = torch.zeros(1, columns, dtype=torch.float32, device=device)
        self._position = torch.zeros(1, dtype=torch.float64, device=device)
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self.current = self._row[0]

    @property
    def columns(self) -> int:
        """Values in a row."""
        return len(self.current)

    def restart(self) -> None:
        """Empty the table and go back to row 0, in the same memory: what was captured with it stays good."""
        self.filled = 0
        self._position.zero_()

    def extend(self, rows: list[list[float]]) -> None:
        """Append rows for the updates that follow those filled so far, without waiting."""
        new = torch.tensor(rows, dtype=torch.float32)
        if self.device.type == "cuda":
            new = new.pin_memory()
        while self.filled + len(rows) > len(self._rows):
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
        self._rows[self.filled : self.filled + len(rows)].copy_(new, non_blocking=True)
        self.filled += len(rows)

    def advance(self, refuse: torch.Tensor | None) -> None:
        """Put the next row in force; the same one again where `refuse` (float32 0-d, on the device) is 1."""
        self._position.add_(1.0)
        if refuse is not None:
            self._position.sub_(refuse)
        self.put_in_force()

    def put_in_force(self) -> None:
        """Copy the row of the present position to `current`."""
        self._index.copy_(self._position)
        torch.index_select(self._rows, 0, self._index, out=self._row)

    def position(self) -> int:
        """Number of the row in force; waits for the device."""
        return int(self._position.item())
