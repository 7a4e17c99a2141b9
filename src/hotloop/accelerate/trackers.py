"""Members of `Accelerator` about trackers and the end of the run."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hotloop.accelerate.kinds import ProjectConfiguration
from hotloop.accelerate.state import AcceleratorState, PartialState
from hotloop.accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from hotloop.errors import SettingError
from hotloop.loop.loop import Loop

__all__ = ["TrackingMembers"]


class TrackingMembers:
    """The part of `Accelerator` that logs."""

    loop: Loop
    state: AcceleratorState
    project_configuration: ProjectConfiguration
    log_with: list[Any]
    trackers: list[Any]

    @property
    def project_dir(self) -> str | None:
        """Where checkpoints go."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    def _say_missing_trackers(self, log_with: Any) -> None:
        if log_with is not None and not self.log_with:
            warnings.warn(
                f"`log_with={log_with}` was passed but no supported trackers are installed.", stacklevel=4
            )

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Open the trackers of `log_with`, in the main process.

        Args:
            project_name: the run's name there.
            config: kept by each.
            init_kwargs: further arguments, by tracker name.
        """
        for tracker in self.log_with:
            if isinstance(tracker, GeneralTracker):
                made: Any = tracker
            else:
                kind = LOGGER_TYPE_TO_CLASS[str(tracker)]
                options = (init_kwargs or {}).get(str(tracker), {})
                folder = (self.logging_dir,) if kind.requires_logging_directory else ()
                made = None
                if PartialState().is_main_process or not kind.main_process_only:
                    made = kind(project_name, *folder, **options)
            if made is not None and self._may_speak(made):
                self.trackers.append(made)
        for tracker in self.trackers:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)

    def _may_speak(self, tracker: Any) -> bool:
        return PartialState().is_main_process or not getattr(tracker, "main_process_only", True)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The open tracker of that name, or what it writes to; outside the main process one that does nothing.

        Raises:
            SettingError: there is none.
        """
        if not self.trackers:
            return GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise SettingError(f"{name} is not an available tracker stored inside the `Accelerator`.")

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Give values to every open tracker, with further arguments by tracker name."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Close trackers, write everything out, leave the process group."""
        for tracker in self.trackers:
            tracker.finish()
        self.loop.end_training()
        # a group that is closed while another rank still exchanges takes that rank down
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            PartialState().wait_for_everyone()
        self.state.destroy_process_group()
