"""`hotloop lr-find`: which learning rate a script should train with, from a range test on its own loop."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from hotloop.cli.launch import split_arguments
from hotloop.cli.publish import publish_text
from hotloop.cli.verb import Verb, make_parser
from hotloop.errors import HotloopError
from hotloop.settings import variables_set

__all__ = ["VERB"]

_SUMMARY = "find a script's learning rate: a few steps with growing rates, a curve, suggestions"
_USAGE = """hotloop lr-find [options] SCRIPT.py [ARGUMENT ...]
       hotloop lr-find [options] -m MODULE [ARGUMENT ...]"""
_EPILOG = """SCRIPT is run unchanged, with a Loop or with plain PyTorch, until the test has seen enough, and then ended.
Its first optimizer's learning rate grows by the same factor each step; its schedule is overruled. Nothing is
recorded, steps are not captured, and what the script prints goes to stderr. It begins anew: `loop.resume` finds no
checkpoint, and neither a Loop nor torch.save writes a file, which would hold weights of the test. Groups with other
rates keep their proportion.

`steepest` is where the loss falls fastest, `valley` the middle of its longest fall: a careful choice. The exit status
is 0 with a suggestion, 1 without one (no rate lowers the loss, or all blow it up), else that of the script that failed.

examples:
  hotloop lr-find train.py --epochs 1
  hotloop lr-find --low 1e-5 --high 1 --steps 200 --html rates.html train.py
  hotloop lr-find --json -m project.train | jq .valley"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("lr-find", _SUMMARY, _EPILOG, usage=_USAGE)
    add = parser.add_argument
    add("-m", "--module", metavar="MODULE", help="run a module instead of a script, as `python -m` does")
    add("--low", type=float, default=1e-7, metavar="RATE", help="first rate (default: 1e-7)")
    add("--high", type=float, default=10.0, metavar="RATE", help="last rate (default: 10)")
    add("--steps", type=int, default=100, metavar="N", help="steps from low to high (default: 100)")
    add("--smoothing", type=float, default=0.9, metavar="SHARE",
        help="of the running mean of the loss kept at each step (default: 0.9)")  # fmt: skip
    add("--stop", type=float, default=4.0, metavar="TIMES",
        help="end once the smoothed loss is this many times its lowest value (default: 4)")  # fmt: skip
    add("--optimizer", type=int, default=0, metavar="N",
        help="which one, in the order of their first steps, of a script with several (default: 0)")  # fmt: skip
    add("--html", metavar="FILE", help="also write a page with the curve, for a browser")
    add("--json", action="store_true", help="print it machine-readable")
    return parser


def _run(arguments: list[str]) -> int:
    parser = _parser()
    own, rest = split_arguments(arguments, parser)
    options = parser.parse_args(own)
    if options.module is None and not rest:
        parser.error("there is no SCRIPT to run")
    from hotloop.doctor.live.script import run_script
    from hotloop.optim import Sweep, Takeover, TestOver

    target = options.module if options.module is not None else rest.pop(0)
    sweep = Sweep(options.low, options.high, options.steps, options.smoothing, options.stop)
    status = 0
    with (
        _plain_runs(),
        _nothing_saved(),
        contextlib.redirect_stdout(sys.stderr),
        Takeover(sweep, options.optimizer) as takeover,
        contextlib.suppress(TestOver),
    ):
        status = run_script(target, rest, module=options.module is not None, passes=(TestOver,))
    sys.stderr.flush()
    if status and not sweep.over:
        return status
    if not takeover.steps and not sweep.over:
        several = f": it has {takeover.optimizers} of them" if takeover.optimizers else ""
        raise HotloopError(
            f"{target} made no step of a torch optimizer number {options.optimizer} to take over{several}"
        )
    if not sweep.losses:
        raise HotloopError(
            f"{target} made {takeover.steps} steps without loss.backward() of a loss that is one number: there is "
            "nothing to follow"
        )
    found = takeover.result()
    print(json.dumps(found.as_dict(), indent=2, allow_nan=False) if options.json else found)
    if options.html:
        publish_text(options.html, found.html(f"learning rate range test of {target}"))
    return 0 if found.suggestion is not None else 1


@contextlib.contextmanager
def _nothing_saved() -> Iterator[None]:
    """Weights of the test do not end up in the script's checkpoints, nor does it go on from a run that is over."""
    import torch

    from hotloop.loop.observing import OBSERVERS

    save = torch.save

    def save_in_memory(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for torch.save, which scripts use for copies in memory, too."""
        if isinstance(f, io.BytesIO):
            save(obj, f, *args, **kwargs)

    def resume_nothing(path: Any) -> bool:
        """Stands in for Loop.resume."""
        return False

    def quiet(loop: Any) -> None:
        resume = loop.resume

        def load_state(path: Any) -> None:
            """Stands in for Loop.load_state, whose checkpoint has to be there: weights to begin with."""
            loop.resume = resume
            try:
                type(loop).load_state(loop, path)
            finally:
                loop.resume = resume_nothing

        loop.resume, loop.load_state = resume_nothing, load_state
        loop._saver.save = lambda *args, **kwargs: False

    torch.save = save_in_memory
    OBSERVERS.append(quiet)
    try:
        yield
    finally:
        OBSERVERS.remove(quiet)
        torch.save = save


def _plain_runs() -> contextlib.AbstractContextManager[None]:
    """Loops in the script keep no record, run captured steps eagerly and let a loss explode."""
    wanted = "capture=off,record=false,nonfinite=ignore"
    given = os.environ.get("HOTLOOP_OVERRIDE")
    override = f"{given},{wanted}" if given else wanted
    return variables_set({"HOTLOOP_OVERRIDE": override, "HOTLOOP_PROGRESS": "0"})


VERB = Verb("lr-find", _SUMMARY, _run)
