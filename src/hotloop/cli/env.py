"""`hotloop env`: what this machine is and has."""

from __future__ import annotations

import json
from typing import Any

from hotloop.cli.verb import Verb, make_parser

__all__ = ["VERB", "format_machine"]

_SUMMARY = "print this machine: versions, CPU, memory, GPUs, precisions, variables"
_EPILOG = """examples:
  hotloop env                a page to read, or to put into a bug report
  hotloop env --json | jq .accelerators"""


def _run(arguments: list[str]) -> int:
    parser = make_parser("env", _SUMMARY, _EPILOG)
    parser.add_argument("--json", action="store_true", help="print it machine-readable")
    options = parser.parse_args(arguments)
    from hotloop.hardware.machine import describe_links, describe_machine

    machine = describe_machine()
    machine["links"] = describe_links() if len(machine["accelerators"]) > 1 else None
    print(json.dumps(machine, indent=2) if options.json else format_machine(machine))
    return 0


def format_machine(machine: dict[str, Any]) -> str:
    """The page that `hotloop env` prints, from what `describe_machine` found."""
    rows: list[tuple[str, str]] = []
    rows += [(name, str(version)) for name, version in machine["versions"].items() if version is not None]
    rows.append(("system", f"{machine['system']} on {machine['hostname']}"))
    rows += _cpu_rows(machine)
    rows += _accelerator_rows(machine)
    if machine["processes"]:
        rows.append(
            ("processes", ", ".join(f"{name} {value}" for name, value in machine["processes"].items()))
        )
    packages = machine["packages"] or {}
    rows.append(("packages", ", ".join(f"{name} {v}" for name, v in packages.items() if v) or "none"))
    rows.append(("not there", ", ".join(name for name, v in packages.items() if not v) or "none"))
    variables = machine["variables"] or {}
    rows += [("variable", f"{name}={value}") for name, value in variables.items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _cpu_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory = machine["cpu"], machine["memory"]
    cores = f"{_or_unknown(cpu['physical_cores'])} physical, {cpu['logical_cores']} logical, "
    cores += f"{cpu['usable_cores']} usable by this process"
    if cpu["cgroup_cores"] is not None:
        cores += f" (control group: {cpu['cgroup_cores']:g})"
    total = f"{_gib(memory['total_bytes'])} in all, {_gib(memory['available_bytes'])} available"
    if memory["cgroup_bytes"] is not None:
        total += f" (control group: {_gib(memory['cgroup_bytes'])})"
    return [
        ("cpu", f"{_or_unknown(cpu['model'])} ({cpu['architecture']})"),
        ("cores", cores),
        ("cpu flags", " ".join(cpu["flags"] or []) or "none that matter"),
        ("cpu precisions", _precisions(machine["cpu_precisions"])),
        ("memory", total),
    ]


def _accelerator_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for device in machine["accelerators"]:
        name = f"{device['kind']}:{device['index']}"
        capability = f", capability {device['capability']}" if device["capability"] else ""
        rows.append((name, f"{_or_unknown(device['name'])}, {_gib(device['memory_bytes'])}{capability}"))
        rows.append((f"{name} precisions", _precisions(device["precisions"])))
    if not rows:
        rows.append(("accelerators", "none"))
    links = machine.get("links")
    if links:
        rows.append(("links", ", ".join(f"{pair} {kind}" for pair, kind in links.items())))
    return rows


def _precisions(found: dict[str, str] | None) -> str:
    if not found:
        return "unknown"
    return ", ".join(name if how == "in silicon" else f"{name} ({how})" for name, how in found.items())


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)


VERB = Verb("env", _SUMMARY, _run)
