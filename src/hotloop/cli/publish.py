"""Pages that a verb writes for a person: under a temporary name first, so that no half-written one is seen."""

from __future__ import annotations

import os
from pathlib import Path

from hotloop.errors import HotloopError

__all__ = ["publish_text"]


def publish_text(name: str, text: str) -> None:
    """Write `text` to the file `name`, whole or not at all.

    Raises:
        HotloopError: it cannot be written.
    """
    path = Path(name)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise HotloopError(f"{name} cannot be written: {error.strerror or error}") from error
