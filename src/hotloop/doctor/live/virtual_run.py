"""A script without a GPU, in a process of its own: `python -m hotloop.doctor.live.virtual_run ANSWER HOW KIND TARGET`.

HOW is "device" (with a virtual GPU) or "parameters" (without), KIND "script" or "module"; the script's arguments
follow. The answer is a JSON file: the lines that would wait, and what broke if the virtual GPU could not run it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from hotloop.doctor.live.cuda_names import DeviceNames, redirect_cuda
from hotloop.doctor.live.device_tensor import Dispatch, make_device
from hotloop.doctor.live.script import run_script, show_exception
from hotloop.doctor.live.stall_log import StallLog, users_frame
from hotloop.doctor.live.steps import StepMarks
from hotloop.doctor.live.stoppers import Stopper, find_stoppers, optimizer_stopper
from hotloop.doctor.live.virtual import VirtualDevice

__all__ = ["main"]

# torch and all of this project
_LIBRARIES = tuple(
    str(folder) + os.sep
    for folder in (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[2])
)


def main() -> int:
    """Run the script; the exit status is its own."""
    answer, how, kind, target, *arguments = sys.argv[1:]
    dispatch = Dispatch(StallLog())
    taint = VirtualDevice()

    def count() -> None:
        dispatch.log.steps += 1

    broke, there = "", False
    with ExitStack() as stack:
        marks = stack.enter_context(StepMarks(count))
        there = how == "device" and make_device()
        if there:
            redirect_cuda(dispatch.log)
            stack.enter_context(dispatch)
            stack.enter_context(DeviceNames())
        stack.enter_context(taint)
        try:
            status = run_script(target, arguments, module=kind == "module", passes=(Exception,))
        except Exception as error:
            status = 1
            if there and _is_library(error):
                broke = f"{type(error).__name__}: {error}".splitlines()[0] + _where(error)
            else:
                show_exception(error)
    sys.stdout.flush()
    log = dispatch.log if dispatch.made else taint.log
    waits = [(stall.file, stall.line, stall.why) for stall in log.stalls() if stall.recurs]
    stoppers = find_stoppers(marks.place, waits)
    stoppers += [s for each in marks.optimizers.values() if (o := each()) and (s := optimizer_stopper(o))]
    stoppers += [Stopper(file, line, text, why) for file, line, text, why in dispatch.changing_shapes()]
    told = {
        "status": status,
        "device": bool(dispatch.made),
        "broke": broke,
        "steps": log.steps,
        "stalls": [asdict(stall) for stall in log.stalls()],
        "stoppers": [asdict(stopper) for stopper in stoppers],
    }
    Path(answer).write_text(json.dumps(told))
    return status


def _is_library(error: BaseException) -> bool:
    """Whether an exception was raised in torch or here, and not by the script itself."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and str(Path(frames.tb_frame.f_code.co_filename).resolve()).startswith(
        _LIBRARIES
    )


def _where(error: BaseException) -> str:
    """Where in the script, as " at file:line"."""
    frames, place = error.__traceback__, ""
    while frames is not None:
        if users_frame(frames.tb_frame) is frames.tb_frame:
            place = f" at {frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}"
        frames = frames.tb_next
    return place


if __name__ == "__main__":
    sys.exit(main())
