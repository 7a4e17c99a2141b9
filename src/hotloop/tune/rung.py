"""One step of the ladder: what is changed for a trial, and why it may help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Rung", "join", "write_override"]


@dataclass(frozen=True)
class Rung:
    """A candidate change.

    Attributes:
        name: as shown, such as "precision=bf16".
        settings: by name, put in force through HOTLOOP_OVERRIDE.
        lever: what kind of change it is; of one lever the alternatives replace each other. Default: the first setting.
        why: what suggested it: a finding of the doctor's, or "default order".
        environment: variables of the trial's process.
        setup: "file.py:function", called in the trial's process before the script starts.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lever: str = ""
    why: str = "default order"
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: str | None = None

    def __post_init__(self) -> None:
        if not self.lever:
            object.__setattr__(self, "lever", next(iter(self.settings), self.name))


def join(rungs: list[Rung]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """(settings, environment, setups) of several rungs together; later ones win."""
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}
    setups: list[str] = []
    for rung in rungs:
        settings |= rung.settings
        environment |= rung.environment
        setups += [rung.setup] if rung.setup else []
    return settings, environment, setups


def write_override(settings: Mapping[str, Any]) -> str:
    """`settings` as the text of HOTLOOP_OVERRIDE."""
    return ",".join(
        f"{name}={'on' if value is True else 'off' if value is False else value}"
        for name, value in settings.items()
    )
