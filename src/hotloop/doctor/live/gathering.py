"""Several processes under one watch: each leaves its windows in a folder of the machine, and the first one tells.

Files and no collective: a watch must neither add communication to the run nor need its process group, which the
script may have taken down by the time the report is made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotloop.doctor.live.windows import Notes
from hotloop.hardware.processes import Processes

__all__ = ["Gathering", "find_gathering"]

# of a launch; equal in its processes on one machine, and different between launches that run side by side
_NAMES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "GROUP_RANK")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Gathering:
    """Where the ranks of a run leave their traces.

    Attributes:
        folder: the place. rank: this process. ranks: those that leave something there.
    """

    folder: Path
    rank: int
    ranks: tuple[int, ...]

    @property
    def tells(self) -> bool:
        """Whether this process makes the report."""
        return self.rank == 0

    @property
    def takes_part(self) -> bool:
        """False on other machines than the first rank's, whose files it cannot see."""
        return self.rank in self.ranks

    def open(self) -> None:
        """Make the folder, and remove what an earlier run of the same name left for this rank."""
        if self.takes_part:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._end_mark(self.rank).unlink(missing_ok=True)

    def leave(self, files: Sequence[Path], notes: Notes) -> None:
        """Leave this rank's traces, the window for prices first, and what its watch knows besides."""
        if not self.takes_part:
            return
        for number, file in enumerate(files):
            part = self.folder / f".{self.rank}-{number}.part"
            shutil.copyfile(file, part)
            part.replace(self._window(self.rank, number))
        notes.write(self._notes(self.rank))
        self._end_mark(self.rank).write_text(str(len(files)))

    def collect(self, patience_s: float = PATIENCE_S) -> dict[int, tuple[list[Path], Notes]]:
        """What each rank has left, in order of ranks; those that end too late, or died, are missing."""
        until = time.monotonic() + patience_s
        found: dict[int, tuple[list[Path], Notes]] = {}
        while True:
            for rank in self.ranks:
                mark = self._end_mark(rank)
                text = mark.read_text() if rank not in found and mark.is_file() else ""
                if text:
                    files = [self._window(rank, number) for number in range(int(text))]
                    found[rank] = files, Notes.read(self._notes(rank))
            if len(found) == len(self.ranks) or time.monotonic() > until:
                return dict(sorted(found.items()))
            time.sleep(0.05)

    def close(self) -> None:
        """Remove the folder; for the one that tells, when it has read everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _window(self, rank: int, number: int) -> Path:
        return self.folder / f"rank{rank}-window{number}.json"

    def _notes(self, rank: int) -> Path:
        return self.folder / f"rank{rank}-notes.json"

    def _end_mark(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.end"


def find_gathering(processes: Processes, folder: str | None = None) -> Gathering | None:
    """Where this process meets the others of its run; None if it is alone.

    Args:
        processes: this process among the others.
        folder: a folder that all machines see, for the ranks of all of them; default: one of this machine's, for the
            ranks beside rank 0.
    """
    if processes.world == 1:
        return None
    if folder is not None:
        return Gathering(Path(folder), processes.rank, tuple(range(processes.world)))
    run = "\n".join(os.environ.get(name, "") for name in _NAMES)
    name = f"hotloop-doctor-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    # ranks are numbered machine by machine: the first one's are 0 .. local_world - 1
    ranks = tuple(range(min(processes.local_world, processes.world)))
    return Gathering(Path(tempfile.gettempdir()) / name, processes.rank, ranks)
