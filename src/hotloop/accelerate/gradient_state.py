"""Where a run is inside an accumulation window and inside its loaders."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from hotloop.accelerate.kinds import GradientAccumulationPlugin

__all__ = ["GradientState", "attach"]


class GradientState:
    """Where the run is inside an accumulation window and inside its loaders; one state shared by all.

    Attributes:
        sync_gradients: the current micro-batch completes an update.
        plugin_kwargs: what differs from the plugin's defaults.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._dataloader_references_ref: list[Any] = [None]
            self._is_xla_gradients_synced = False
            self.plugin_kwargs = {}
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def initialized(self) -> bool:
        """Whether the shared state is there."""
        return bool(GradientState._shared_state)

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return int(self.plugin_kwargs.get("num_steps") or 1)

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count micro-batches without an update."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a loader is always an update."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch handed out last is the last one of its loader."""
        active = self.active_dataloader
        return active is not None and bool(active.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """How many samples of the last global batch are real; 0 all, -1 not known."""
        active = self.active_dataloader
        return -1 if active is None else int(active.remainder)

    @property
    def active_dataloader(self) -> Any:
        """The loader being iterated, the innermost of several; None outside."""
        return self.dataloader_references[-1]

    @property
    def training_dataloader(self) -> Any:
        """The loader that feeds training: the one that handed out a batch last while gradients were recorded.

        An evaluation that was neither finished nor dropped is not it.
        """
        fed = [loader for loader in self.dataloader_references if getattr(loader, "with_grad", False)]
        return max(fed, key=lambda loader: loader.handed_out, default=self.active_dataloader)

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the loaders being iterated, the innermost last; held weakly."""
        return [None if ref is None else ref() for ref in self._dataloader_references_ref]

    @dataloader_references.setter
    def dataloader_references(self, references: list[Any]) -> None:
        self._dataloader_references_ref = [
            None if loader is None else weakref.ref(loader) for loader in references
        ]

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Kept for its name; XLA is not used."""
        return self._is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._is_xla_gradients_synced = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self._dataloader_references_ref = [*self._dataloader_references_ref, weakref.ref(dataloader)]

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Drop every reference to the loader, and those whose loader is gone."""
        self._dataloader_references_ref = [None] + [
            ref
            for ref in self._dataloader_references_ref
            if ref is not None and ref() is not None and ref() is not dataloader
        ]

    @staticmethod
    def _reset_state() -> None:
        """Forget everything. Meant for tests."""
        GradientState._shared_state.clear()

    def __reduce__(self) -> Any:
        return attach, (GradientState,)

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def attach(kind: Any) -> Any:
    """What a pickled state becomes: a view of the state of the process that loads it."""
    view = kind.__new__(kind)
    view.__dict__ = kind._shared_state
    return view
