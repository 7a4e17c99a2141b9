"""Python effects of a step that a replay would not repeat: printing, appending, counting."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["effects_in", "find_effects"]

_GROWING = {
    "append",
    "extend",
    "add",
    "update",
    "insert",
    "pop",
    "clear",
    "appendleft",
    "write",
    "setdefault",
}


def find_effects(function: Callable[..., Any], own: frozenset[str] = frozenset()) -> list[str]:
    """Lines of `function` that change something outside it in Python, each as "line N: what".

    Args:
        function: the step; where its source cannot be had, nothing is found.
        own: names of objects whose methods are understood by a capture (the loop).

    Names assigned in the function are its own: changing them is no effect.
    """
    try:
        source, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return []
    body = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)), None)
    if body is None:
        return []
    return [f"line {start + line - 1}: {what}" for line, what in effects_in(body, own)]


def effects_in(body: ast.AST, own: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """(line, what) of each effect in the source of a step: a function, or the loop around one.

    Args:
        body: the step's node. own: see `find_effects`.
    """
    local = _local_names(body)
    found: list[tuple[int, str]] = []
    for node in ast.walk(body):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.append((line, f"assigns {', '.join(node.names)} outside the step"))
        elif isinstance(node, ast.Call):
            what = _effect_of_call(node, local, own)
            if what:
                found.append((line, what))
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                outside = _root(target) not in local
                slot = isinstance(target, ast.Attribute) and not _is_tensor_slot(target)
                if outside and (slot or isinstance(target, ast.Subscript)):
                    found.append((line, f"sets {ast.unparse(target)}"))
    return found


def _local_names(body: ast.AST) -> set[str]:
    outside = {name for n in ast.walk(body) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    names = {a.arg for a in ast.walk(body) if isinstance(a, ast.arg)}
    names |= {n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names - outside


def _effect_of_call(node: ast.Call, local: set[str], own: frozenset[str]) -> str | None:
    if isinstance(node.func, ast.Name) and node.func.id in ("print", "input", "next"):
        return f"calls {node.func.id}()"
    if isinstance(node.func, ast.Attribute) and node.func.attr in _GROWING:
        root = _root(node.func.value)
        if root is not None and root not in local and root not in own:
            return f"calls {ast.unparse(node.func)}()"
    return None


def _is_tensor_slot(target: ast.Attribute) -> bool:
    """`p.grad = None` and `p.data = …` are tensor work that a capture records."""
    return target.attr in ("grad", "data")


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
