from __future__ import annotations

import importlib.util
import logging
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotloop.accelerate
from hotloop.accelerate import Accelerator, ParallelismConfig, init_empty_weights, utils
from hotloop.accelerate.launchers import debug_launcher, notebook_launcher
from hotloop.accelerate.logging import get_logger
from hotloop.accelerate.state import PartialState
from hotloop.accelerate.tracking import GeneralTracker, filter_trackers, register_tracker_class
from hotloop.accelerate.utils import modeling
from hotloop.errors import LaunchError, ProcessError, SettingError


def test_every_exported_name_exists() -> None:
    for module in (hotloop.accelerate, utils):
        for name in module.__all__:
            assert hasattr(module, name), name
        assert len(set(module.__all__)) == len(module.__all__)


def test_names_of_parts_not_built_can_be_imported() -> None:
    accelerate_utils = pytest.importorskip("accelerate.utils")
    for text in utils._NOT_BUILT.values():
        for name in text.split():
            with pytest.raises(NotImplementedError, match=name):
                getattr(utils, name)()
    public = {
        n
        for n in dir(accelerate_utils)
        if n[0] != "_" and not isinstance(getattr(accelerate_utils, n), type(os))
    }
    reasons = {"PYTORCH_VERSION", "TORCH_LAUNCH_PARAMS", "AVAILABLE"}
    missing = {n for n in public if not hasattr(utils, n) and not any(word in n for word in reasons)}
    # parts of accelerate's own launcher and of devices that hotloop does not drive
    assert missing <= {
        "PrepareForLaunch", "check_cuda_fp8_capability", "convert_dict_to_env_variables", "deepspeed_required",
        "get_cpu_distributed_information", "get_gpu_info", "get_grad_scaler",
    }  # fmt: skip


def test_packages_are_found_as_accelerate_finds_them() -> None:
    theirs = pytest.importorskip("accelerate.utils.imports")
    for name in dir(theirs):
        if (
            not name.startswith("is_")
            or not hasattr(utils, name)
            or name.startswith(("is_fp16", "is_pippy", "is_torch_version"))
        ):
            continue
        assert bool(getattr(utils, name)()) == bool(getattr(theirs, name)()), name
    assert utils.is_torch_version(">=", "2.11")
    assert utils.compare_versions("torch", ">=", "2.0")
    assert not utils.compare_versions("torch", "<", "2.0.0")
    with pytest.raises(SettingError, match="=>"):
        utils.compare_versions("torch", "=>", "2.0")


def test_flags_in_the_environment() -> None:
    with utils.patch_environment(my_flag="Yes", my_number=3):
        assert utils.parse_flag_from_env("MY_FLAG")
        assert utils.get_int_from_env(["NOT_THERE", "MY_NUMBER"], 9) == 3
        with utils.clear_environment():
            assert not os.environ
    assert "MY_FLAG" not in os.environ
    with pytest.raises(SettingError, match="maybe"):
        utils.str_to_bool("maybe")

    @utils.purge_accelerate_environment
    def leave_traces() -> None:
        os.environ["ACCELERATE_TRACE"] = "1"

    leave_traces()
    assert "ACCELERATE_TRACE" not in os.environ

    @utils.purge_accelerate_environment
    class Base:
        def leave(self) -> None:
            os.environ["ACCELERATE_TRACE"] = "1"

    class Derived(Base):
        def leave_more(self) -> None:
            os.environ["ACCELERATE_TRACE"] = "2"

    Derived().leave()
    Derived().leave_more()
    assert "ACCELERATE_TRACE" not in os.environ


def test_seeding_seeds_everything() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    utils.set_seed(3)
    first = draw()
    utils.set_seed(3)
    assert draw() == first
    Accelerator()
    utils.set_seed(3, device_specific=True)
    assert draw() == first
    generator = torch.Generator()
    utils.synchronize_rng_states(["torch", "generator"], generator)
    with pytest.raises(SettingError, match="generator"):
        utils.synchronize_rng_states(["generator"])
    with pytest.raises(NotImplementedError, match="npu"):
        utils.synchronize_rng_states(["npu"])


def test_the_batch_size_shrinks_until_it_fits() -> None:
    tried = []

    @utils.find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int, factor: int) -> int:
        tried.append(batch_size)
        if batch_size > 6:
            raise RuntimeError("CUDA out of memory.")
        if batch_size < 0:
            raise ValueError("never")
        return batch_size * factor

    assert train(2) == 12
    assert tried == [10, 9, 8, 7, 6]
    assert train(3) == 18
    with pytest.raises(TypeError, match=r"call `train\(factor=2\)`"):
        train(64, 2)

    @utils.find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=lambda: 0)
    def never(batch_size: int) -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        never()

    @utils.find_executable_batch_size
    def wrong(batch_size: int) -> None:
        raise ValueError("a fault of its own")

    with pytest.raises(ValueError, match="of its own"):
        wrong()


def test_loggers_speak_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("speaks")
    with pytest.raises(ProcessError, match="Accelerator"):
        logger.info("too early")
    PartialState()
    with caplog.at_level(logging.INFO, logger="speaks"):
        logger.info("first %s", "one")
        logger.info("in order", in_order=True)
        logger.info("everywhere", main_process_only=False)
        for _ in range(3):
            logger.warning_once("only once")
    assert caplog.messages == [
        f"[RANK 0] {text}" for text in ("first one", "in order", "everywhere", "only once")
    ]
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_handlers_give_what_differs() -> None:
    assert utils.GradScalerKwargs(init_scale=2.0).to_kwargs() == {"init_scale": 2.0}
    assert utils.InitProcessGroupKwargs().timeout == timedelta(minutes=10)
    assert utils.InitProcessGroupKwargs(backend="gloo").timeout == timedelta(minutes=30)
    assert utils.DistributedDataParallelKwargs(static_graph=True).to_kwargs() == {"static_graph": True}
    assert utils.GradientAccumulationPlugin(num_steps=2).to_kwargs() == {"num_steps": 2}
    assert "bf16" in utils.PrecisionType
    assert "tea" not in utils.PrecisionType
    assert utils.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert str(utils.LoggerType.WANDB) == "wandb"
    assert utils.TorchDynamoPlugin(backend="inductor").to_kwargs()["backend"] == "inductor"
    with pytest.raises(SettingError, match="tokens"):
        utils.GradientAccumulationPlugin(weighting="tokens")
    with pytest.raises(NotImplementedError, match="tp_size=2"):
        ParallelismConfig(tp_size=2)


def test_sizes_and_names() -> None:
    theirs = pytest.importorskip("accelerate.utils.modeling")
    for size in (7, "5MB", "1GiB", "12KB", "8Mb", "0.5GB"):
        assert modeling.convert_file_size_to_int(size) == theirs.convert_file_size_to_int(size), size
    with pytest.raises(SettingError, match="five"):
        modeling.convert_file_size_to_int("five")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert modeling.compute_module_sizes(model) == dict(theirs.compute_module_sizes(model))
    assert modeling.calculate_maximum_sizes(model)[0] == theirs.calculate_maximum_sizes(model)[0]
    assert utils.convert_bytes(2048) == "2.0 KB"
    assert utils.get_pretty_name(model) == "Sequential"
    assert utils.recursive_getattr(model, "0.weight") is model[0].weight
    assert utils.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert utils.is_port_in_use(utils.get_free_port()) is False
    assert utils.get_module_children_bottom_up(model)[-1] is model
    with init_empty_weights():
        empty = torch.nn.Linear(10, 10)
    assert empty.weight.device.type == "meta"
    assert torch.nn.Linear(1, 1).weight.device.type == "cpu"


def test_trackers_of_both_kinds(tmp_path: Path) -> None:
    class Own(GeneralTracker):
        name = "own"
        requires_logging_directory = False

        def __init__(self, run_name: str = "") -> None:
            super().__init__()
            self.rows: list[Any] = []

        @property
        def tracker(self) -> list[Any]:
            return self.rows

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.rows.append((step, values, kwargs))

    own = Own()
    accelerator = Accelerator(log_with=["json", own], project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5), "note": "fine"}, step=3, log_kwargs={"own": {"more": 1}})
    assert accelerator.get_tracker("own", unwrap=True)[0][0] == 3
    assert own.rows[0][2] == {"more": 1}
    with pytest.raises(SettingError, match="tea"):
        accelerator.get_tracker("tea")
    accelerator.end_training()
    import json

    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (row["step"], row["loss"], row["note"]) == (3, 0.5, "fine")
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1}


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(log_with="all", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1, "name": "x", "none": None})
    accelerator.log({"loss": 0.25, "text": "hello", "both": {"a": 1.0}}, step=7)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(7, 0.25)]


def test_trackers_that_cannot_work_say_so(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Unsupported logging capability: tea"):
        filter_trackers("tea")
    with pytest.raises(SettingError, match="requires a `logging_dir`"):
        filter_trackers("json")
    if importlib.util.find_spec("wandb") is None:
        with pytest.warns(UserWarning, match="no supported trackers"):
            Accelerator(log_with="wandb")
    with pytest.raises(NotImplementedError, match="`name`, `requires_logging_directory`, `tracker`"):
        GeneralTracker()
    with pytest.raises(SettingError, match="subclass"):
        register_tracker_class(int)
    assert Accelerator().get_tracker("anything") is not None


def test_launchers_check_before_they_start() -> None:
    called = []
    notebook_launcher(called.append, args=(5,), num_processes=1)
    assert called == [5]
    with pytest.raises(SettingError, match="num_processes"):
        notebook_launcher(called.append)
    with pytest.raises(SettingError, match="fp17"):
        notebook_launcher(called.append, mixed_precision="fp17", num_processes=1)
    PartialState()
    with pytest.raises(LaunchError, match="exists in this process"):
        notebook_launcher(called.append, num_processes=2)


def _check_ranks(folder: str) -> None:
    state = PartialState()
    Path(folder, str(state.process_index)).write_text(
        f"{state.num_processes} {state.device} {state.distributed_type}"
    )


def _fail_on_one() -> None:
    if PartialState().process_index == 1:
        raise KeyError("only here")
    # in an exchange this process would fail as well, and which end is seen first would be chance
    time.sleep(600)


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_function_runs_in_several_processes(tmp_path: Path) -> None:
    debug_launcher(_check_ranks, args=(str(tmp_path),), num_processes=2)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict.fromkeys(
        ("0", "1"), "2 cpu DistributedType.MULTI_CPU"
    )
    notebook_launcher(_check_ranks, args=(str(tmp_path),), num_processes=2, use_port="0")
    with pytest.raises(LaunchError, match="KeyError: 'only here'"):
        debug_launcher(_fail_on_one)
    notebook_launcher(_check_ranks, args=(str(tmp_path),), num_processes=2, rdzv_backend="c10d")
