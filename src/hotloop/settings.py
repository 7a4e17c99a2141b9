"""Settings: which ones there are, what they may be, and which of several sources decides.

Explicit argument > `HOTLOOP_<NAME>` in the environment > settings file (TOML) > default. Only
`HOTLOOP_OVERRIDE` ("precision=bf16,accumulation=4") beats an argument, and it says so.

Settings that only say how the machine is used (threads, workers, …) are no arguments of `Loop`: they come from the
environment, a file, or the dictionary `Loop(settings={...})`. A file with a table `[machine]` was found on that kind
of machine, and is left aside on any other.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.errors import SettingError

__all__ = ["SETTINGS", "Setting", "Settings", "find_settings", "variables_set"]

# Variables of that prefix which steer other things than a Loop's settings.
_OTHER_VARIABLES = {
    "HOTLOOP_OVERRIDE",
    "HOTLOOP_SHARED",
    "HOTLOOP_RUNS",
    "HOTLOOP_PROGRESS",
    "HOTLOOP_SETTINGS",
    "HOTLOOP_KERNELS",
    "HOTLOOP_NCCL_ERRORS",
}


@dataclass(frozen=True)
class Setting:
    """One setting: its default and the check that turns a given value (maybe text) into a valid one."""

    name: str
    default: Any
    check: Callable[[Any], Any]


def _choice(name: str, values: Mapping[str, str]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        key = str(value).lower()
        if key not in values:
            shown = ", ".join(dict.fromkeys(values.values()))
            raise SettingError(f"{name}={value!r} is not known; valid values are: {shown}")
        return values[key]

    return check


def _positive(name: str) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not str(value).strip().isdigit() or int(value) < 1:
            raise SettingError(f"{name}={value!r} is not a whole number of at least 1")
        return int(value)

    return check


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """None and the empty text leave it to the script."""
    return lambda value: None if value is None or value == "" else check(value)


def _natural(name: str) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not str(value).strip().isdigit():
            raise SettingError(f"{name}={value!r} is not a whole number of at least 0")
        return int(value)

    return check


def _switch(name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        key = str(value).lower()
        if key in {"1", "true", "on", "yes"}:
            return True
        if key in {"0", "false", "off", "no"}:
            return False
        raise SettingError(f"{name}={value!r} is neither on nor off")

    return check


def _seed(value: Any) -> int | None:
    if value is None or value == "":
        return None
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        seed = int(value)
    except (TypeError, ValueError):
        raise SettingError(f"seed={value!r} is not a whole number") from None
    if not 0 <= seed < 2**63:
        raise SettingError(f"seed={value!r} is outside 0 to 2**63 - 1")
    return seed


def _device(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _record(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in {"0", "false", "off", "no"}:
        return False
    if isinstance(value, str) and value.lower() in {"1", "true", "on", "yes", ""}:
        return True
    if isinstance(value, bool | str | os.PathLike):
        return value
    raise SettingError(f"record={value!r} is neither True, nor False, nor a folder")


# Formats by every name that they are known by, here or at peers.
_PRECISIONS = {
    name: name
    for name in ("fp32", "tf32", "bf16", "bf16-true", "fp16", "fp8", "auto", "fp4", "mxfp8", "nvfp4")
} | {
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    "float16": "fp16",
    "float8": "fp8",
    "transformer-engine": "fp8",
}


def _precision(value: Any) -> Any:
    # a `hotloop.precision.Precision` was checked when it was made, and is not imported here
    if isinstance(getattr(value, "name", None), str) and hasattr(value, "autocast"):
        return value
    return _choice("precision", _PRECISIONS)(value)


_MEMORY_FORMATS = {name: name for name in ("contiguous", "channels_last")}

SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("precision", "fp32", _precision),
        Setting(
            "capture",
            "auto",
            _choice("capture", {name: name for name in ("auto", "off", "compile", "graph", "full")}),
        ),
        Setting("accumulation", 1, _positive("accumulation")),
        Setting(
            "nonfinite", "stop", _choice("nonfinite", {name: name for name in ("stop", "skip", "ignore")})
        ),
        Setting("seed", None, _seed),
        Setting("device", None, _device),
        Setting("record", True, _record),
        # how the machine is used; None leaves it to the script
        Setting("fused", None, _optional(_switch("fused"))),
        Setting("memory_format", None, _optional(_choice("memory_format", _MEMORY_FORMATS))),
        Setting("micro_batch", None, _optional(_positive("micro_batch"))),
        Setting("workers", None, _optional(_natural("workers"))),
        Setting("prefetch", None, _optional(_positive("prefetch"))),
        Setting("pin_memory", None, _optional(_switch("pin_memory"))),
        Setting("threads", None, _optional(_positive("threads"))),
        Setting("cudnn_benchmark", None, _optional(_switch("cudnn_benchmark"))),
    )
}


@dataclass(frozen=True)
class Settings:
    """Settled values by name, and for each where it came from ("argument", "default", a variable, a file).

    Attributes:
        notes: what was decided on the way, each in one line.
    """

    values: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def find_settings(
    arguments: Mapping[str, Any],
    file: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    machine: Callable[[str | None], Mapping[str, Any]] | None = None,
) -> Settings:
    """Settle every setting. `arguments` holds those given explicitly (None means not given).

    Args:
        arguments: by name.
        file: a TOML file, or a mapping, whose values count as arguments too; arguments by name come before them.
        machine: gives the kind of this machine, for the device asked for, as `hotloop.hardware.machine_kind` does; a
            file found on another kind is left aside.

    Raises:
        SettingError: an unknown name or value in any source; lists the valid ones and names the source.
    """
    _refuse_unknown_variables()
    if isinstance(file, Mapping):
        _check_names(file, "settings")
        arguments = {**file, **{name: value for name, value in arguments.items() if value is not None}}
        file = None
    file = file if file is not None else os.environ.get("HOTLOOP_SETTINGS")
    notes: list[str] = []
    override = _read_override(os.environ.get("HOTLOOP_OVERRIDE", ""))
    device = override.get("device") or arguments.get("device") or os.environ.get("HOTLOOP_DEVICE") or None
    from_file = _read_file(Path(file), notes, machine, device) if file else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        variable = f"HOTLOOP_{name.upper()}"
        if name in override:
            given, source = override[name], "HOTLOOP_OVERRIDE"
        elif arguments.get(name) is not None:
            given, source = arguments[name], "argument"
        elif variable in os.environ:
            given, source = os.environ[variable], variable
        elif name in from_file:
            given, source = from_file[name], str(file)
        else:
            given, source = setting.default, "default"
        try:
            values[name] = setting.check(given)
        except SettingError as error:
            raise SettingError(f"{error} (from {source})") from None
        sources[name] = source
        if source == "HOTLOOP_OVERRIDE" and arguments.get(name) is not None:
            print(
                f"hotloop: {name}={values[name]} from HOTLOOP_OVERRIDE replaces the argument", file=sys.stderr
            )
    return Settings(values, sources, tuple(notes))


def _refuse_unknown_variables() -> None:
    known = {f"HOTLOOP_{name.upper()}" for name in SETTINGS} | _OTHER_VARIABLES
    for variable in os.environ:
        if variable.startswith("HOTLOOP_") and variable not in known:
            raise SettingError(f"environment variable {variable} is not known{_nearest(variable, known)}")


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{meant} Valid: {', '.join(sorted(known))}"


def _check_names(given: Mapping[str, Any], source: str) -> None:
    for name in given:
        if name not in SETTINGS:
            raise SettingError(f"{source}: setting {name!r} is not known{_nearest(name, set(SETTINGS))}")


def _read_override(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise SettingError(f"HOTLOOP_OVERRIDE: {part!r} is not of the form name=value")
        found[name.strip()] = value.strip()
    _check_names(found, "HOTLOOP_OVERRIDE")
    return found


def _read_file(
    path: Path, notes: list[str], machine: Callable[[str | None], Mapping[str, Any]] | None, device: Any
) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingError(f"settings file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"settings file {path} is not valid TOML: {error}") from None
    table: dict[str, Any] = content.get("settings", content)
    _check_names(table, str(path))
    found_on = content.get("machine") if "settings" in content else None
    if isinstance(found_on, dict) and machine is not None:
        here = machine(None if device is None else str(device))
        other = [name for name in found_on if found_on[name] != here.get(name)]
        if other:
            there = ", ".join(f"{name} {found_on[name]}" for name in other)
            mine = ", ".join(f"{name} {here.get(name)}" for name in other)
            notes.append(f"{path} is left aside: it was found on {there}, and this is {mine}")
            return {}
    return table


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block; afterwards each is what it was, or absent again."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
