"""`hotloop native build`, `verify` and `bench`: an exported program to a C library, its truth, its latency."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from hotloop.cli.verb import Verb, make_parser
from hotloop.errors import HotloopError

__all__ = ["VERB"]

_SUMMARY = "compile an exported model to a C library; check it; measure its latency"
_EPILOG = """MODEL.pt2 is what torch.export.save wrote, with the example inputs it was exported with.

examples:
  hotloop native build model.pt2 --out model.so
  hotloop native build model.pt2 --streaming 1 --out machine.so
  hotloop native verify model.so model.pt2
  hotloop native bench model.so --json bench.json --plot bench.svg
  hotloop native bench model.so --against model.pt2 --peers eager,compile,ort,openvino"""


def _run(arguments: list[str]) -> int:
    parser = make_parser("native", _SUMMARY, _EPILOG)
    verbs = parser.add_subparsers(dest="what", required=True, metavar="build | verify | bench")
    build = verbs.add_parser(
        "build", help="compile MODEL.pt2 to a shared library, source and header", allow_abbrev=False
    )
    build.add_argument("model", metavar="MODEL.pt2")
    build.add_argument(
        "--out", default="model.so", help="the library; .c and .h go beside it (default: model.so)"
    )
    build.add_argument(
        "--streaming", type=int, metavar="DIM", help="one event at a time along this dimension"
    )
    build.add_argument("--precision", default="fp32", choices=("fp32", "int8"))
    build.add_argument(
        "--calibration", metavar="FILE", help="for int8: a tensor of inputs, saved by torch.save"
    )
    build.add_argument("--target", default="native", help="native, avx512vnni, avx512, avx2 or generic")
    build.add_argument("--force", action="store_true", help="build int8 even beyond its bound")
    verify = verbs.add_parser("verify", help="check a library against float64 PyTorch", allow_abbrev=False)
    verify.add_argument("library", metavar="LIBRARY.so")
    verify.add_argument(
        "model", metavar="MODEL.pt2", nargs="?", help="without it the stored report is printed"
    )
    verify.add_argument("--json", action="store_true", help="print it machine-readable")
    bench = verbs.add_parser(
        "bench", help="percentiles, cold caches, after idling, the floor", allow_abbrev=False
    )
    bench.add_argument("library", metavar="LIBRARY.so")
    bench.add_argument(
        "--against",
        metavar="MODEL",
        help="time the model beside it in other runtimes: MODEL.pt2, or package.module:name of a module or of what "
        "makes one",
    )
    bench.add_argument(
        "--peers",
        default="eager,compile,ort",
        metavar="LIST",
        help="which: eager, compile, ort, openvino, aoti; one that is not installed or fails is told in a line "
        "(default: eager,compile,ort)",
    )
    bench.add_argument("--quick", action="store_true", help="fewer calls: a check that it runs, not a figure")
    bench.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    bench.add_argument("--plot", metavar="FILE", help="also draw the histogram and all rows as SVG")
    options = parser.parse_args(arguments)
    return {"build": _build, "verify": _verify, "bench": _bench}[options.what](options)


def _load_program(path: str) -> Any:
    import torch

    if not Path(path).is_file():
        raise HotloopError(
            f"there is no file {path}; write one with torch.export.save(torch.export.export(model, args), path)"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        raise HotloopError(f"{path} is no program that torch.export.save wrote: {error}") from None


def _build(options: argparse.Namespace) -> int:
    import torch

    from hotloop import native

    calibration = None
    if options.calibration:
        calibration = [torch.load(options.calibration, weights_only=True)]
    native.build(
        _load_program(options.model),
        (),
        out=options.out,
        streaming=options.streaming,
        precision=options.precision,
        calibration=calibration,
        target=options.target,
        force=options.force,
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    from hotloop import native

    compiled = native.load(options.library)
    report: dict[str, Any] = dict(compiled.facts["report"])
    failed: list[str] = []
    if options.model:
        found = native.verify(compiled, _load_program(options.model))
        report, failed = found.as_report(), found.failed
    if options.json:
        print(json.dumps(report | {"failed": failed}, indent=2))
    else:
        print(
            f"{options.library}: "
            + ("disagrees" if failed else "agrees")
            + f" with {report.get('reference', 'nothing')}"
        )
        for name, error in report.get("errors", {}).items():
            own = report.get("torch_float32_errors", {}).get(name)
            print(
                f"  {name:14} {error:.2e}"
                + (f"   (PyTorch in float32: {own:.1e})" if own is not None else "")
            )
        print(f"  worst {report.get('worst_relative_error')}, bound {report.get('bound')}")
        for text in failed:
            print(f"  {text}")
    return 1 if failed else 0


def _load_model(name: str) -> Any:
    """MODEL.pt2, or package.module:name, where the current folder is looked into too, as `python -m` does."""
    from torch import nn

    module_name, colon, attribute = name.rpartition(":")
    if not colon or name.endswith(".pt2"):
        return _load_program(name)
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise HotloopError(f"--against {name}: {error}; give MODEL.pt2 or package.module:name") from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(found, nn.Module) and callable(found):
        found = found()
    if not isinstance(found, nn.Module):
        raise HotloopError(
            f"--against {name} is a {type(found).__name__}; it must be an nn.Module, or a class or function that "
            "makes one without arguments"
        )
    return found


def _bench(options: argparse.Namespace) -> int:
    from hotloop.native.bench import bench
    from hotloop.native.page import draw_svg, format_result, write_json

    result = bench(
        options.library,
        quick=options.quick,
        against=_load_model(options.against) if options.against else None,
        peers=[name.strip() for name in options.peers.split(",") if name.strip()],
    )
    print(format_result(result))
    if options.json:
        write_json(result, options.json)
    if options.plot:
        draw_svg(result, options.plot)
    return 0


VERB = Verb("native", _SUMMARY, _run)
