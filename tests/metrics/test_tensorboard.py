from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from hotloop.errors import HotloopError
from hotloop.metrics import Sink, TensorBoard
from hotloop.state.ring import Row


def test_numbers_and_texts_arrive(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoard(tmp_path)
    assert isinstance(sink, Sink)
    sink.write_rows(
        [Row(3, 100.0, {"loss": 0.5, "stage": "warm", "ok": True}), Row(5, 101.0, {"loss": 0.25})]
    )
    sink.flush()
    sink.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader's own dependencies
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path))
        events.Reload()
    assert [(event.step, event.wall_time, event.value) for event in events.Scalars("loss")] == [
        (3, 100.0, 0.5),
        (5, 101.0, 0.25),
    ]
    assert [event.value for event in events.Scalars("ok")] == [1.0]
    assert "stage/text_summary" in events.Tags()["tensors"]


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(HotloopError, match=r"hotloop\[track\]"):
        TensorBoard(tmp_path)
