"""`hotloop launch`: a script in several processes."""

from __future__ import annotations

import argparse

from hotloop.cli.verb import Verb, make_parser
from hotloop.errors import LaunchError

__all__ = ["VERB", "split_arguments"]

_SUMMARY = "run a script in several processes: one per GPU, or as many as you say"
_USAGE = (
    "hotloop launch [options] SCRIPT [ARGUMENT ...]\n       hotloop launch [options] -m MODULE [ARGUMENT ...]"
)
_EPILOG = """Everything after SCRIPT or MODULE belongs to the script. The exit status is that of the process
that failed first, whose traceback alone is shown. A signal (Ctrl-C, SIGTERM) is passed on once, so that the
script can save; a second Ctrl-C ends everything at once.

examples:
  hotloop launch train.py                              one process per GPU, or one without a GPU
  hotloop launch -n 2 --device cpu train.py --lr 0.1   two processes on the CPU
  hotloop launch -n 8 -m project.train -- data         a module; "-- data" reaches it as it is
  hotloop launch --nodes 2 --rendezvous host0:29400 train.py     the same line on both machines
  hotloop launch -n 4 --logs logs train.py             a file per process and stream, too"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("launch", _SUMMARY, _EPILOG, usage=_USAGE)
    add = parser.add_argument
    add("-n", "--processes", "--nproc-per-node", "--nproc_per_node", type=int, metavar="N", default=None,
        help="processes on this machine (default: one per accelerator, else 1)")  # fmt: skip
    add("--device", choices=("cpu", "cuda", "xpu", "mps"), help="compute there; cpu leaves the GPUs aside")
    add("--nodes", "--nnodes", type=int, default=1, metavar="K",
        help="machines that take part (default: 1)")  # fmt: skip
    add("--node-rank", "--node_rank", type=int, metavar="R",
        help="number of this machine (default: the machines agree by themselves)")  # fmt: skip
    add("--rendezvous", "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT",
        help="where the machines meet; HOST is one of them")  # fmt: skip
    add("--run-id", "--rdzv-id", "--rdzv_id", default="hotloop", metavar="NAME",
        help="keeps apart runs that meet at the same place")  # fmt: skip
    add("--restarts", "--max-restarts", "--max_restarts", type=int, default=0, metavar="K",
        help="start all processes anew after a failure, at most K times (default: 0)")  # fmt: skip
    add("--output", choices=("main", "all"), default="main",
        help="main (default): rank 0, and stderr of the others prefixed; all: all, prefixed")  # fmt: skip
    add("--logs", metavar="DIR", help="write each rank's output to files in DIR, too")
    add("--grace", type=float, default=30.0, metavar="SECONDS",
        help="time to save and end after a signal, until the processes are killed (default: 30)")  # fmt: skip
    add("-m", "--module", metavar="MODULE", help="run a module instead of a script, as `python -m` does")
    return parser


def split_arguments(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Part the launcher's own options from what belongs to the script: its name, and all that follows.

    With -m, the module's name stays with the options. argparse cannot do this by itself: it would take the
    script's `-n` for the launcher's.
    """
    takes_value = {
        option: action.nargs is None for action in parser._actions for option in action.option_strings
    }
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if not word.startswith("-") or word == "-":
            break
        option = word if word.startswith("--") else word[:2]
        attached = "=" in word or (not word.startswith("--") and len(word) > 2)
        position += 2 if takes_value.get(option, False) and not attached else 1
        if option in ("-m", "--module") or word.startswith("--module="):
            break
    position = min(position, len(arguments))
    return arguments[:position], arguments[position:]


def _run(arguments: list[str]) -> int:
    parser = _parser()
    own, rest = split_arguments(arguments, parser)
    options = parser.parse_args(own)
    if options.module is None and not rest:
        raise LaunchError("there is no script to launch; `hotloop launch --help` shows examples")
    from hotloop.parallel.launch import Launch, launch_processes

    target = options.module if options.module is not None else rest.pop(0)
    return launch_processes(
        Launch(
            target=target,
            arguments=tuple(rest),
            module=options.module is not None,
            processes=options.processes,
            device=options.device,
            nodes=options.nodes,
            node_rank=options.node_rank,
            rendezvous=options.rendezvous,
            run_id=options.run_id,
            restarts=options.restarts,
            output=options.output,
            logs=options.logs,
            grace_s=options.grace,
        )
    )


VERB = Verb("launch", _SUMMARY, _run)
