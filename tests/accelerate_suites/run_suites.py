"""Runs the scripts that ship inside the installed accelerate package against hotloop.accelerate.

    python tests/accelerate_suites/run_suites.py [--processes 2] [--json FILE] [name …]

Each script is read from the installed package, its import lines alone are rewritten in memory
(accelerate → hotloop.accelerate; accelerate.test_utils stays accelerate's own), and every test function in it
runs by itself, in a job of its own: that many processes, on the CPU, through gloo. Nothing of accelerate is
copied into this repository.

A function is reported as passed, failed or not run, with the reason. What each `main` does with a function (its
arguments, the state that it sets up) is restated in `CASES`, so that a failing function does not hide later ones;
`test_sync`'s accumulation matrix, which its own `main` leaves out on several CPUs, is included. The scripts' own
`main` functions run too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# how a case is called: Python text that runs after the script
_MATRIX = list(itertools.product((True, False), repeat=3))
CASES: dict[str, list[tuple[str, str]]] = {
    "test_ops": [
        *(
            (name, f"state = PartialState(); {name}(state)")
            for name in (
                "test_gather",
                "test_gather_object",
                "test_gather_non_contiguous",
                "test_broadcast",
                "test_pad_across_processes",
                "test_reduce_sum",
                "test_reduce_mean",
                "test_reduce_max",
                "test_op_checker",
                "test_copy_tensor_to_devices",
            )
        ),
        ("main", "main()"),
    ],
    "test_sync": [
        ("test_dataloader_break", "Accelerator(); test_dataloader_break()"),
        ("test_distributed_sync", "test_distributed_sync(Accelerator())"),
        ("test_distributed_sync_multiple_fwd", "test_distributed_sync_multiple_fwd(Accelerator())"),
        *(
            (
                f"{name}[split={split},dispatch={dispatch},each={each}]",
                f"Accelerator(); {name}({split}, {dispatch}, {each})",
            )
            for name in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler")
            for split, dispatch, each in _MATRIX
        ),
        ("main", "main()"),
    ],
    "test_script": [
        ("init_state_check", "Accelerator(); init_state_check()"),
        ("process_execution_check", "process_execution_check()"),
        *(
            (name, f"Accelerator(); {name}()")
            for name in (
                "test_split_between_processes_list",
                "test_split_between_processes_nested_dict",
                "test_split_between_processes_tensor",
                "test_split_between_processes_evenly",
                "rng_sync_check",
                "dl_preparation_check",
                "central_dl_preparation_check",
                "custom_sampler_check",
                "check_seedable_sampler",
                "check_seedable_sampler_with_data_seed",
                "check_seedable_sampler_in_batch_sampler_shard",
            )
        ),
        ("training_check[seedable=False]", "Accelerator(); training_check(use_seedable_sampler=False)"),
        ("training_check[seedable=True]", "Accelerator(); training_check(use_seedable_sampler=True)"),
        ("test_trigger", "test_trigger()"),
        ("test_reinstantiated_state", "test_reinstantiated_state()"),
        ("main", "main()"),
    ],
    "test_distributed_data_loop": [
        *(
            (name, f"create_accelerator(); {name}()")
            for name in (
                "test_default_ensures_even_batch_sizes",
                "test_can_disable_even_batches",
                "test_can_join_uneven_inputs",
                "test_join_can_override_even_batches",
                "test_join_can_override_for_mixed_type_dataloaders",
                "test_join_raises_warning_for_iterable_when_overriding_even_batches",
                "test_pickle_accelerator",
            )
        ),
        (
            "test_join_raises_warning_for_non_ddp_distributed",
            "accelerator = create_accelerator(); accelerator.state.distributed_type = DistributedType.FSDP; "
            "test_join_raises_warning_for_non_ddp_distributed(accelerator)",
        ),
        *(
            (
                f"test_data_loader[{name}]",
                f"dataset = DummyDataset(); test_data_loader({loader}, create_accelerator())",
            )
            for name, loader in (
                (
                    "shuffle=False",
                    "DataLoader(dataset, shuffle=False, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)",
                ),
                (
                    "shuffle=True",
                    "DataLoader(dataset, shuffle=True, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)",
                ),
                (
                    "batch_sampler",
                    "DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), BATCH_SIZE, False), "
                    "num_workers=NUM_WORKERS)",
                ),
                (
                    "sampler is a BatchSampler",
                    "DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), BATCH_SIZE, False), "
                    "batch_size=None, collate_fn=default_collate, num_workers=NUM_WORKERS)",
                ),
            )
        ),
        ("test_stateful_dataloader", "test_stateful_dataloader(create_accelerator())"),
        ("test_stateful_dataloader_save_state", "test_stateful_dataloader_save_state(create_accelerator())"),
        ("main", "main()"),
    ],
}

# cases that a script's own main runs on a single process only
ALONE = {"test_sync": [("test_noop_sync", "test_noop_sync(Accelerator())")]}

# functions that cannot be run here, with the reason
NOT_RUN: dict[str, dict[str, str]] = {
    "test_ops": {},
    "test_sync": {},
    "test_script": {
        "test_split_between_processes_dataset": "its own main runs it only where the package `datasets` is installed",
    },
    "test_distributed_data_loop": {},
}

_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)accelerate(?!\.test_utils)(?=[.\s])", re.MULTILINE)

_RANK = """
import ctypes, faulthandler, os, signal, sys, traceback
faulthandler.enable()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
import torch
torch.set_num_threads(1)
source, name, cases = sys.argv[1:4]
namespace = {"__name__": "suite", "__file__": source}
exec(compile(open(source).read(), name, "exec"), namespace)
import json
for case, call in json.loads(cases):
    GradientState = __import__("hotloop.accelerate.state", fromlist=["x"])
    for kind in (GradientState.GradientState, GradientState.AcceleratorState):
        kind._reset_state()
    try:
        exec(compile(call, case, "exec"), namespace)
    except BaseException:
        print("@@" + json.dumps({"case": case, "error": traceback.format_exc(limit=-6)}), flush=True)
        sys.stderr.write(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)  # the other ranks must not wait for this one in an orderly shutdown
    print("@@" + json.dumps({"case": case, "error": None}), flush=True)
"""


@dataclass
class Result:
    """What became of one function of one script."""

    suite: str
    function: str
    outcome: str  # passed, failed, not run
    reason: str = ""
    seconds: float = 0.0


def read_script(name: str) -> str:
    """The text of a script of the installed accelerate, its import lines rewritten."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        raise SystemExit("accelerate is not installed: pip install accelerate==1.15.0")
    text = (Path(spec.origin).parent / "test_utils" / "scripts" / f"{name}.py").read_text()
    return _IMPORT.sub(r"\1hotloop.accelerate", text)


def run_cases(suite: str, cases: list[tuple[str, str]], processes: int, timeout_s: float) -> list[Result]:
    """Run cases one after the other in one job; what a failed or hanging case kept from running starts anew."""
    results: list[Result] = []
    left = list(cases)
    while left:
        begun = time.monotonic()
        for _ in range(3):
            done, error = _run_job(suite, left, processes, timeout_s)
            # another program may take the free port between finding it and listening on it
            if done or error is None or "EADDRINUSE" not in error:
                break
        seconds = (time.monotonic() - begun) / max(done + (error is not None), 1)
        results += [Result(suite, case, "passed", seconds=seconds) for case, _ in left[:done]]
        if error is None:
            break
        results.append(Result(suite, left[done][0], "failed", error, seconds))
        left = left[done + 1 :]
    return results


def _run_job(
    suite: str, cases: list[tuple[str, str]], processes: int, timeout_s: float
) -> tuple[int, str | None]:
    """How many cases passed on every rank, and why the next one did not (None: there is none)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{suite}.py"
        script.write_text(read_script(suite))
        children = []
        for rank in range(processes):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
            }
            out, err = (Path(folder) / f"{rank}.{kind}" for kind in ("out", "err"))
            with open(out, "wb") as stdout, open(err, "wb") as stderr:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _RANK, str(script), f"<{suite}>", json.dumps(cases)],
                        env=env,
                        cwd=folder,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,
                    )
                )
        timed_out = _wait(children, timeout_s)
        lines = [
            [
                json.loads(line[2:])
                for line in _read(folder, rank, "out").splitlines()
                if line.startswith("@@")
            ]
            for rank in range(processes)
        ]
        passed = min(sum(line["error"] is None for line in rank_lines) for rank_lines in lines)
        if passed == len(cases) and not timed_out:
            return passed, None
        errors = [line["error"] for rank_lines in lines for line in rank_lines if line["error"]]
        # the rank that lost its peer only echoes the one that failed
        errors.sort(key=lambda text: "Connection closed by peer" in text)
        if errors:
            return passed, errors[0]
        texts = "\n".join(f"rank {rank}: {_read(folder, rank, 'err')[-2000:]}" for rank in range(processes))
        return min(passed, len(cases) - 1), ("no answer in time\n" if timed_out else "ended early\n") + texts


def _read(folder: str, rank: int, kind: str) -> str:
    return (Path(folder) / f"{rank}.{kind}").read_text(errors="replace")


def _wait(children: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    timed_out = False
    while any(child.poll() is None for child in children):
        codes = [child.poll() for child in children]
        if time.monotonic() > deadline:
            timed_out = True
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGABRT)
            time.sleep(0.5)
            break
        if any(code not in (None, 0) for code in codes):
            time.sleep(1.0)  # let the others say why they fail, if they do
            break
        time.sleep(0.05)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return timed_out


def run_suite(suite: str, processes: int = 2, timeout_s: float = 120.0) -> list[Result]:
    """Every function of one script."""
    results = []
    cases = CASES[suite]
    # `main` takes the process group down at its end, so it has a job of its own
    results += run_cases(suite, [case for case in cases if case[0] != "main"], processes, timeout_s)
    results += run_cases(suite, [case for case in cases if case[0] == "main"], processes, timeout_s)
    results += run_cases(suite, ALONE.get(suite, []), 1, timeout_s)
    results += [Result(suite, name, "not run", reason) for name, reason in NOT_RUN[suite].items()]
    return results


def main() -> int:
    """Run what is asked for, print a line for each function, exit 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="name", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one job")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    unknown = set(options.suites) - set(CASES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results: list[Result] = []
    for suite in options.suites or CASES:
        found = run_suite(suite, options.processes, options.timeout)
        for one in found:
            print(f"{one.outcome:8} {one.suite}.{one.function}")
            if one.reason:
                print("    " + one.reason.strip().replace("\n", "\n    "))
        results += found
    counts = {kind: sum(one.outcome == kind for one in results) for kind in ("passed", "failed", "not run")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if options.json:
        rows: list[dict[str, Any]] = [asdict(one) for one in results]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
