"""The house rules: who may import whom, what is public, what is documented, what an import may cost."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hotloop"

# Each package imports only from those above it; the top-level modules are above all of them.
ORDER = [
    "hardware",
    "kernels",
    "state",
    "stalls",
    "precision",
    "optim",
    "data",
    "metrics",
    "runs",
    "capture",
    "parallel",
    "loop",
    "accelerate",
    "native",
    "doctor",
    "tune",
    "market",
    "cli",
]
# Values are handed over by `loop`, so that metrics work without a record.
NEVER = {("metrics", "runs")}
MAX_LINES = 600
# A module of this name says nothing about what it owns. hotloop.accelerate has another library's names.
EMPTY_NAMES = {"utils", "util", "common", "manager", "base", "helper", "helpers", "misc"}
MIRRORED = "hotloop.accelerate"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
# Running the package as a command is no import.
IMPORTABLE = [name for name in MODULES if not name.endswith("__main__")]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(), str(MODULES[name]))


def imports(name: str, *, at_import: bool) -> Iterator[tuple[str, int]]:
    """(module of hotloop, line) of every import in `name`; `at_import`: only those that run on import."""
    yield from _imports(tree_of(name).body, name, at_import)


def _imports(body: list[ast.stmt], name: str, at_import: bool) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((_module(alias.name), node.lineno) for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node, name)
            if _ours(source):
                for alias in node.names:
                    yield _module(f"{source}.{alias.name}"), node.lineno
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, name, at_import)
        elif not (at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner = getattr(node, field, [])
                yield from _imports(inner if isinstance(inner, list) else [], name, at_import)


def _ours(name: str) -> bool:
    return name == "hotloop" or name.startswith("hotloop.")


def _module(name: str) -> str:
    """The module that `import name` or `from … import …` of that full name runs."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def _absolute(node: ast.ImportFrom, name: str) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    if MODULES[name].name != "__init__.py":
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def package_of(name: str) -> str:
    """Its package below hotloop; "" for the top-level modules and hotloop itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


def order_faults() -> Iterator[str]:
    for name in MODULES:
        package = package_of(name)
        if name in ("hotloop", "hotloop.__main__"):
            continue  # they show everything, so they stand below everything
        for target, line in imports(name, at_import=False):
            where = f"{MODULES[name].relative_to(ROOT)}:{line} imports {target}"
            if target == "hotloop":
                # Only the version, and only once everything is loaded, can come from there. The command,
                # which `import hotloop` does not load, is a user of it as any other.
                if package != "cli" and not _only_version(name, line):
                    yield f"{where}, which stands below it"
                continue
            other = package_of(target)
            if package == other or not other:
                continue
            if not package:
                yield f"{where}, but a top-level module stands above all packages"
            elif ORDER.index(other) > ORDER.index(package):
                yield f"{where}, which stands below {package}"
            elif (package, other) in NEVER:
                yield f"{where}, which it must not know"


def _only_version(name: str, line: int) -> bool:
    at_import = {found for target, found in imports(name, at_import=True) if target == "hotloop"}
    text = MODULES[name].read_text().splitlines()[line - 1].strip()
    return line not in at_import and text == "from hotloop import __version__"


def test_every_package_is_in_the_order() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= set(ORDER)
    assert packages, "no packages were found: this test looks in the wrong place"


def test_packages_import_only_from_above() -> None:
    assert list(order_faults()) == []


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Names along one cycle, the first one repeated at the end; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    for name in graph:
        if found := visit(name, []):
            return found
    return []


def test_find_cycle_finds_cycles() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"a"}}) == ["a", "a"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_modules_import_each_other_without_a_cycle() -> None:
    graph = {name: {target for target, _ in imports(name, at_import=True)} for name in MODULES}
    assert find_cycle(graph) == []


def defined(name: str) -> set[str]:
    """Public functions and classes that a module defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name for node in tree_of(name).body if isinstance(node, kinds) and not node.name.startswith("_")
    }


def reexported(name: str) -> set[str]:
    """Public names that a package's `__init__` takes from the modules inside it."""
    found = set()
    for node in tree_of(name).body:
        if isinstance(node, ast.ImportFrom) and _absolute(node, name).startswith(name + "."):
            found |= {alias.asname or alias.name for alias in node.names}
    return {item for item in found if not item.startswith(("_", "*"))}


@pytest.mark.parametrize("name", IMPORTABLE)
def test_all_is_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    is_package = MODULES[name].name == "__init__.py"
    expected = defined(name) | (reexported(name) if is_package else set())
    if listed is None:
        assert not expected, f"{name} has no __all__ but defines {sorted(expected)}"
        return
    assert len(listed) == len(set(listed)), f"{name}.__all__ names something twice"
    assert [item for item in listed if not hasattr(module, item)] == [], (
        f"{name}.__all__ names what is not there"
    )
    assert expected - set(listed) == set(), f"public in {name} but not in its __all__"


def undocumented(name: str) -> Iterator[str]:
    tree = tree_of(name)
    if not ast.get_docstring(tree):
        yield name
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in tree.body:
        if not isinstance(node, (*functions, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield f"{name}.{node.name}"
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                known = isinstance(item, functions) and (item.name.startswith("_") or _needs_none(item))
                if isinstance(item, functions) and not known and not ast.get_docstring(item):
                    yield f"{name}.{node.name}.{item.name}"


def _needs_none(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    return bool(marks & {"setter", "deleter", "overload", "override"})


def test_everything_public_is_documented() -> None:
    assert [thing for name in MODULES for thing in undocumented(name)] == []


def test_modules_are_short_and_named_for_what_they_own() -> None:
    long = {
        name: count
        for name, path in MODULES.items()
        if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}
    owned = [name for name in MODULES if not name.startswith(MIRRORED + ".")]
    assert [name for name in owned if set(name.split(".")) & EMPTY_NAMES] == []


@pytest.mark.parametrize("name", [n for n in IMPORTABLE if ">>>" in MODULES[n].read_text()])
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0, f"{name} has examples that doctest does not find"
    assert result.failed == 0


TESTS = sorted(path for path in (ROOT / "tests").rglob("test_*.py"))
ASSERTING = re.compile(r"^(assert|check|expect|raises$|warns$|fail$)")


def asserts_nothing(path: Path) -> Iterator[str]:
    """Test functions that can fail only by accident: no assert, no pytest.raises, no function with one."""
    tree = ast.parse(path.read_text(), str(path))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    asserting: set[str] = set()
    while True:
        more = {node.name for node in functions if node.name not in asserting and _asserts(node, asserting)}
        if not more:
            break
        asserting |= more
    for node in functions:
        if node.name.startswith("test_") and node.name not in asserting:
            yield f"{path.name}:{node.lineno} {node.name}"


def _asserts(function: ast.AST, asserting: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in asserting or ASSERTING.match(name):
                return True
        # A helper that asserts may be handed on to be run elsewhere.
        if isinstance(node, ast.Name) and node.id in asserting:
            return True
    return False


def test_tests_assert_something() -> None:
    assert TESTS
    assert [fault for path in TESTS for fault in asserts_nothing(path)] == []


def test_a_test_without_an_assertion_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "def helper():\n    assert 1\n"
        "def test_a():\n    helper()\n"
        "def test_b():\n    print(1)\n"
        "def test_c():\n    with pytest.raises(ValueError):\n        pass\n"
    )
    assert list(asserts_nothing(path)) == ["test_x.py:5 test_b"]


MEASURE = """
import json, sys
import torch, numpy
before = set(sys.modules)
from hotloop import Loop
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_pulls_in_nothing_heavier_than_torch_and_numpy() -> None:
    ended = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    added = json.loads(ended.stdout)
    assert "hotloop.loop.loop" in added
    # numpy loads parts of itself on first use, and with them the runtime of the compiler that made them
    allowed = {*sys.stdlib_module_names, "hotloop", "safetensors", "numpy", "cython_runtime"}
    assert [
        name for name in added if name.partition(".")[0] not in allowed and not name.startswith("_cython_")
    ] == []


# Built from pieces, so that this file does not hold them.
FORBIDDEN = ["/" + "work" + "/", "/" + "root" + "/", "/tmp/" + "spec"]
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".cfg", ".sh", ".ipynb", ".html", ".css", ""}


def tracked() -> list[Path]:
    """Files under version control; in an unpacked archive, which has none, all that ship."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = ("src", "tests", "docs", "examples", "benchmarks")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path for path in paths if path.is_file() and path.suffix in TEXT]


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    paths = tracked()
    assert len(paths) > 10
    found = [
        f"{path.relative_to(ROOT)} has {word}"
        for path in paths
        for word in FORBIDDEN
        if word in path.read_text(errors="replace")
    ]
    assert found == []
