"""Trackers: where `accelerator.log` puts values. TensorBoard and JSON lines are built in, others are classes."""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotloop.accelerate.installed import _is_package_available, is_tensorboard_available
from hotloop.accelerate.kinds import LoggerType
from hotloop.accelerate.operations import listify
from hotloop.accelerate.state import PartialState
from hotloop.accelerate.unsupported import refuse
from hotloop.errors import SettingError

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "GeneralTracker",
    "JSONTracker",
    "TensorBoardTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]


class _TrackerError(SettingError, NotImplementedError):
    """A tracker class lacks what every tracker must have."""


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of methods: run in the main process only, if the object's `main_process_only` is true."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return method


class GeneralTracker:
    """Base of trackers. A subclass has `name`, `requires_logging_directory` and a property `tracker`.

    Attributes:
        main_process_only: methods marked with `on_main_process` run there only.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [word for word in needed if word not in dir(self)]
        if missing:
            raise _TrackerError(
                f"{type(self).__name__} must define, as attributes of the class, "
                + ", ".join(f"`{word}`" for word in missing)
            )

    def start(self) -> None:
        """Open what is written to; called once processes are up."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep `values` (name -> number or text) for `step`."""

    def finish(self) -> None:
        """Write out and close."""


class TensorBoardTracker(GeneralTracker):
    """Values to TensorBoard's event files, under `logging_dir/run_name`.

    Args:
        run_name: the project's name.
        logging_dir: the folder above.
        **kwargs: arguments of torch's SummaryWriter.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self._options = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the writer."""
        try:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
        except ModuleNotFoundError:
            tensorboard = importlib.import_module("tensorboardX")
        self.writer = tensorboard.SummaryWriter(self.logging_dir, **self._options)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as hyperparameters (what is no number or text, as text), and in a file beside."""
        plain = (bool, int, float, str)
        allowed = {k: v if isinstance(v, plain) else str(v) for k, v in values.items() if v is not None}
        self.writer.add_hparams(allowed, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        # a JSON document is a YAML document too, so this is what readers of hparams.yml can parse
        (folder / "hparams.yml").write_text(json.dumps(values, indent=2, default=str) + "\n")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, text as text, dicts of numbers as scalars in one plot."""
        for name, value in listify(values).items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images by name, [N, C, H, W] unless `dataformats` says otherwise."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()


class JSONTracker(GeneralTracker):
    """Values as lines of JSON in `logging_dir/run_name/metrics.jsonl`, the configuration in config.json beside it."""

    name = "json"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._file: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the file for appending."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    @property
    def tracker(self) -> Any:
        """The open file."""
        return self._file

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration."""
        (self.folder / "config.json").write_text(json.dumps(values, indent=2, default=str) + "\n")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line."""
        row = {"step": step, "time": time.time(), **listify(values)}
        self._file.write(json.dumps(row, default=str) + "\n")
        self._file.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


LOGGER_TYPE_TO_CLASS: dict[str, Any] = {"tensorboard": TensorBoardTracker, "json": JSONTracker}

# what would have to be installed for the trackers that have no class here
_PACKAGES = {"comet_ml": "comet_ml"}


def get_available_trackers() -> list[LoggerType]:
    """The trackers that `log_with="all"` means: those with a class here that can work in this environment."""
    return [LoggerType.TENSORBOARD] if is_tensorboard_available() else []


def register_tracker_class(tracker_class: Any) -> None:
    """Let `log_with` name this subclass of GeneralTracker by its `name`.

    Raises:
        SettingError: it is no such class, or has no name or no `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise SettingError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}")
    name = getattr(tracker_class, "name", None)
    if not name:
        raise SettingError("the tracker class must define a non-empty `name`")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise SettingError("the tracker class must define `requires_logging_directory` (True or False)")
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"A tracker with the name '{name}' is already registered and will be overwritten by {tracker_class}",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """What `log_with` asks for, as far as it can work here: tracker objects and names, each once.

    Raises:
        SettingError: an unknown name, or a tracker that needs a logging directory without one.
        UnsupportedError: a tracker whose package is installed but that has no class here.
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    objects = [one for one in wanted if isinstance(one, GeneralTracker)]
    if "all" in wanted or LoggerType.ALL in wanted:
        return objects + get_available_trackers()
    found: list[Any] = []
    for one in wanted:
        if isinstance(one, GeneralTracker):
            found.append(one)
            continue
        name = str(one)
        if name not in LOGGER_TYPE_TO_CLASS:
            _refuse_tracker(name)
            continue
        key: Any = LoggerType(name) if name in LoggerType else name
        if key == LoggerType.TENSORBOARD and not is_tensorboard_available():
            continue
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            raise SettingError(f"Logging with `{name}` requires a `logging_dir` to be passed in.")
        if key not in found:
            found.append(key)
    return found


def _refuse_tracker(name: str) -> None:
    """An unknown tracker is an error; a known one without a class here only if it could have worked."""
    if name not in LoggerType:
        raise SettingError(f"Unsupported logging capability: {name}. Choose between {LoggerType.list()}")
    if _is_package_available(_PACKAGES.get(name, name)):
        refuse(
            f"log_with={name!r}",
            "built in are 'tensorboard' and 'json'; write a GeneralTracker and register_tracker_class it",
        )
