"""The command as a whole: finds the verb, runs it, and turns hotloop's errors into one message each."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

from hotloop import __version__
from hotloop.cli import doctor, env, launch, lr_find, native, runs, tune
from hotloop.cli.verb import Verb
from hotloop.errors import HotloopError

__all__ = ["VERBS", "main"]

VERBS: tuple[Verb, ...] = (
    launch.VERB,
    doctor.VERB,
    tune.VERB,
    lr_find.VERB,
    env.VERB,
    runs.VERB,
    native.VERB,
)

_EXAMPLES = """examples:
  hotloop launch -n 2 train.py --epochs 3
  hotloop runs show last"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: this process's arguments); returns the exit status.

    0 is success, 2 a mistake in what was asked for (told in one message on stderr); `launch` also returns the
    exit status of the process that failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"hotloop {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    verbs = {verb.name: verb for verb in VERBS}
    if name not in verbs:
        return _fail(f"there is no verb {name!r}{_nearest(name, list(verbs))}")
    try:
        return verbs[name].run(rest)
    except HotloopError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # the reader, such as `head`, has seen enough; nothing more may be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + 13
    except SystemExit as stop:  # argparse has said its piece already
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2


def _help() -> str:
    width = max(len(verb.name) for verb in VERBS)
    lines = "\n".join(f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS)
    return (
        "usage: hotloop VERB ...\n\nYour own PyTorch loop, as fast as the machine allows.\n\n"
        f"verbs:\n{lines}\n\n{_EXAMPLES}\n\n"
        "`hotloop VERB --help` tells more; `hotloop --version` prints the version."
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return f"{meant} There are: {', '.join(known)}"


def _fail(text: str) -> int:
    print(f"hotloop: {text}", file=sys.stderr)
    return 2
