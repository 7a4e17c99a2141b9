"""Members of `Accelerator` about files: states of runs, weights of models, single objects."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hotloop.accelerate.checkpointing import (
    check_folder,
    count_custom_states,
    find_folder,
    load_accelerator_state,
    load_custom_state,
    publish_folder,
    save_accelerator_state,
    save_custom_state,
)
from hotloop.accelerate.filenames import (
    SAFE_WEIGHTS_INDEX_NAME,
    WEIGHTS_INDEX_NAME,
)
from hotloop.accelerate.files import clean_state_dict_for_safetensors, save, write_whole
from hotloop.accelerate.gradient_state import GradientState
from hotloop.accelerate.kinds import ProjectConfiguration
from hotloop.accelerate.logging import get_logger
from hotloop.accelerate.models import extract_model_from_parallel
from hotloop.accelerate.names import get_pretty_name
from hotloop.accelerate.state import AcceleratorState, PartialState
from hotloop.accelerate.weights import split_into_shards
from hotloop.errors import CheckpointError, PrepareError, SettingError

__all__ = ["SavingMembers"]

logger = get_logger(__name__)

_SHARD_NAME = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


class _ObjectError(PrepareError, ValueError):
    """Objects without a state were registered for checkpoints."""


class SavingMembers:
    """The part of `Accelerator` that writes and reads files."""

    state: AcceleratorState
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    scaler: Any
    step: int
    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]

    def _make_hooks(self) -> None:
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()

    @property
    def save_iteration(self) -> int:
        """The number that the next automatically named checkpoint gets."""
        return self.project_configuration.iteration

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write `obj` to a file, in one process (or one of each node, as the project is configured)."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The model's state_dict."""
        if unwrap:
            model = extract_model_from_parallel(model)
        state: dict[str, Any] = model.state_dict()
        return state

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights into a folder, in files of at most `max_shard_size`, with an index if several.

        Raises:
            CheckpointError: weights are on the meta device.
        """
        if os.path.isfile(save_directory):
            logger.error(f"Provided path ({save_directory}) should be a directory, not a file")
            return
        if any(parameter.device.type == "meta" for parameter in model.parameters()):
            raise CheckpointError("You can't save the model since some parameters are on the meta device.")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        state: Any = self.get_state_dict(model)
        if safe_serialization:
            state = clean_state_dict_for_safetensors(state)
        shards = split_into_shards(state, max_shard_size, safe_serialization)
        for name, tensors in shards.items():
            self.save(tensors, folder / name, safe_serialization=safe_serialization)
        if not PartialState().is_main_process:
            return
        index_name = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(t.numel() * t.element_size() for t in state.values())},
                "weight_map": {key: name for name, tensors in shards.items() for key in tensors},
            }
            with write_whole(folder / index_name) as name:
                Path(name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        kept = {*shards, index_name} if len(shards) > 1 else set(shards)
        for entry in folder.iterdir():
            # shards of an earlier save, or their index, would be loaded in place of the new ones
            partial = "-of-" in entry.name or entry.name.endswith(".index.json")
            if partial and _SHARD_NAME.fullmatch(entry.name) and entry.name not in kept:
                entry.unlink()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too; each needs `state_dict` and `load_state_dict`.

        Raises:
            PrepareError: one has not.
        """
        wrong = [
            f"\n\t- Item at index {i}, `{get_pretty_name(thing)}`"
            for i, thing in enumerate(objects)
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"))
        ]
        if wrong:
            raise _ObjectError("these objects have no `state_dict` and `load_state_dict`:" + "".join(wrong))
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before files are written; it may remove weights it writes itself.

        `folder` is where the checkpoint is being made; it takes its final name when it is complete.
        """
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before files are read; it may remove models it loads itself."""
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything prepared and registered into a folder, whole or not at all. Every rank calls it.

        With automatic naming it is `project_dir/checkpoints/checkpoint_<number>`; once it is there, the oldest
        beyond `total_limit` are deleted.

        Returns:
            The folder.

        Raises:
            SettingError: no folder given and none configured, or an automatic name is taken.
            CheckpointError: it could not be written; what was there before is untouched.
        """
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            base = Path(self._project_folder()) / "checkpoints"
            folder = base / f"checkpoint_{self.save_iteration}"
            if folder.exists():
                raise SettingError(
                    f"Checkpoint directory {folder} ({self.save_iteration}) already exists. Set "
                    "project_configuration.iteration to the number to go on with."
                )
        elif output_dir is not None:
            folder = Path(output_dir)
        else:
            raise SettingError(
                "save_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        weights = [self.get_state_dict(model, unwrap=False) for model in self._models]
        with publish_folder(folder) as made:
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(made))
            save_accelerator_state(
                made,
                weights,
                self._optimizers,
                self._schedulers,
                self._dataloaders,
                self.state.process_index,
                self.step,
                self.scaler,
                save_on_each_node=project.save_on_each_node,
                safe_serialization=safe_serialization,
                gradients=self._waiting_gradients(),
            )
            for i, thing in enumerate(self._custom_objects):
                save_custom_state(thing, made, i, save_on_each_node=project.save_on_each_node)
        if project.automatic_checkpoint_naming and project.total_limit is not None:
            self._delete_oldest(folder.parent, project.total_limit)
        project.iteration += 1
        return str(folder)

    def _waiting_gradients(self) -> list[dict[str, torch.Tensor]]:
        """Gradients of an accumulation window that is not complete yet."""
        if self.gradient_state.sync_gradients:
            return []
        return [
            {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}
            for model in self._models
        ]

    def _project_folder(self) -> str:
        folder = self.project_configuration.project_dir
        if folder is None:
            raise SettingError("automatic checkpoint naming needs project_dir=... to be set")
        return folder

    def _delete_oldest(self, base: Path, limit: int) -> None:
        if PartialState().is_main_process:
            for folder in _numbered_folders(base)[: -max(limit, 1)]:
                shutil.rmtree(folder, ignore_errors=True)
        PartialState().wait_for_everyone()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` wrote, or accelerate's own, into the same prepared objects. Every rank calls it.

        Without `input_dir` the newest automatically named checkpoint is taken.

        Raises:
            CheckpointError: there is none, or a file is missing, damaged or does not fit; names it and the fault.
        """
        if input_dir is not None:
            folder = find_folder(input_dir)
        elif self.project_configuration.automatic_checkpoint_naming:
            found = _numbered_folders(Path(self._project_folder()) / "checkpoints")
            if not found:
                raise CheckpointError(f"{self._project_folder()}/checkpoints holds no checkpoint")
            folder = found[-1]
        else:
            raise CheckpointError("No input_dir provided and automatic checkpoint naming is disabled.")
        check_folder(folder)
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(folder))
        place = load_model_func_kwargs.pop("map_location", None)
        if place is None:
            place = "on_device" if self.state.num_processes > 1 else "cpu"
        changed = load_accelerator_state(
            folder,
            models,
            self._optimizers,
            self._schedulers,
            self._dataloaders,
            self.state.process_index,
            self.scaler,
            place,
            load_kwargs,
            **load_model_func_kwargs,
        )
        self.step = changed.get("step", self.step)
        self._load_custom(folder)

    def _load_custom(self, folder: Path) -> None:
        saved = count_custom_states(folder)
        if saved != len(self._custom_objects):
            raise CheckpointError(
                f"Number of custom checkpoints in folder {folder} does not match the number of registered objects: "
                f"{saved} are saved, {len(self._custom_objects)} are registered; register the same objects first"
            )
        for i, thing in enumerate(self._custom_objects):
            load_custom_state(thing, folder, i)


def _numbered_folders(base: Path) -> list[Path]:
    """Automatically named checkpoints, by number."""
    if not base.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in base.iterdir() if (match := re.fullmatch(r".*?_(\d+)", path.name))
    ]
    return [path for _, path in sorted(found) if path.is_dir() and not path.name.startswith(".")]
