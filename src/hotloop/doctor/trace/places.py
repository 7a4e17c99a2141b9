"""Where in the source something comes from: Python frames of the trace, made exact by the source file if at hand."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.doctor.trace.columns import Category

if TYPE_CHECKING:
    from hotloop.doctor.trace.timeline import Timeline

__all__ = ["Place", "find_place", "ignored_rules", "silenced"]

_FRAME = re.compile(r"^(?P<file>.+?\.py)\((?P<line>\d+)\): (?P<function>.+)$")
_BUILTIN = re.compile(r"^<built-in (?:method|function) (?P<name>\w+)")
# Kineto cuts the beginning of a path that is on sys.path: `torch/...` is the library, `/home/me/torch/...` is not.
_LIBRARY = re.compile(
    r"^(?:torch|torchvision|torchaudio|numpy|hotloop|importlib)/|pytorch/torch/|src/hotloop/"
    r"|site-packages/|dist-packages/|/lib/python\d|^<|^nn\.Module"
)
# modules of the standard library that stand between a program and torch, when their path was cut to the name
_STANDARD = frozenset(
    f"{name}.py"
    for name in (
        "contextlib",
        "functools",
        "threading",
        "runpy",
        "enum",
        "typing",
        "warnings",
        "inspect",
        "queue",
        "copy",
    )
)
_IGNORE = re.compile(r"#\s*hotloop:\s*ignore\[([\w\-, ]+)\]")


@dataclass
class Place:
    """A place in the program.

    Attributes:
        file, function: "" if the trace has no Python stacks. line: the call's line if `exact`, else the line of the
            function's `def` (all that a trace has).
        candidates: lines of the function that have such a call, if there are several.
        method: name of the innermost Tensor method or built-in around it, "" if unknown. callee: what the line itself
            called, which may be a library's function that came to that. op: operator, "" if none.
        annotation: innermost record_function range around it.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    exact: bool = False
    candidates: list[int] = field(default_factory=list)
    method: str = ""
    callee: str = ""
    op: str = ""
    annotation: str = ""
    frames: list[str] = field(default_factory=list)

    @property
    def known(self) -> bool:
        """Whether a source file is known."""
        return bool(self.file)

    def __str__(self) -> str:
        if self.file:
            if self.exact:
                return f"{self.file}:{self.line} in {self.function}"
            if self.candidates:
                return f"{self.file}, line {' or '.join(map(str, self.candidates))} in {self.function}"
            if self.function == "<module>":
                return f"{self.file}, outside any function"
            return f"{self.file}, in {self.function} (defined in line {self.line})"
        where = f" under {self.annotation!r}" if self.annotation else ""
        return f"{self.op or 'outside any operator'}{where} (the trace has no Python stacks)"


def find_place(timeline: Timeline, row: int, called: frozenset[str] = frozenset()) -> Place:
    """The innermost frame of the user's own code around a host event, and the operator it is in.

    Work of a backward pass is told by the line of its forward operator.

    Args:
        called: names one of which the line calls, if it is known what to look for.
    """
    events = timeline.events
    place = Place()
    chain = [row, *timeline.ancestors(row)]
    for at in chain:
        category = int(events.category[at])
        name = events.name_of(at)
        if category == Category.OP and not name.startswith("ProfilerStep"):
            place.op = name  # the outermost wins: it is the one the program called
            stack = events.details.get("stack", {}).get(at)
            if stack and not place.file:
                _from_text(stack, place)
        elif category == Category.ANNOTATION and not place.annotation and not name.startswith("ProfilerStep"):
            place.annotation = name
        elif category == Category.PYTHON:
            place.frames.append(name)
            frame = _FRAME.match(name)
            built_in = _BUILTIN.match(name)
            if not place.file and built_in:
                place.method = place.method or built_in["name"]
                place.callee = built_in["name"]
            elif not place.file and frame and _is_library(frame["file"]):
                place.callee = frame["function"]
            if frame and not place.file and not _is_library(frame["file"]):
                place.file, place.line = frame["file"], int(frame["line"])
                place.function = frame["function"]
    if not place.file and (forward := _forward_of(timeline, chain)) is not None:
        backward = place.op
        place = find_place(timeline, forward, called)
        place.op = place.op or backward
        return place
    if place.file and place.line:
        _sharpen(place, called)
    return place


def _forward_of(timeline: Timeline, chain: list[int]) -> int | None:
    """Row of the forward operator that left the node whose backward is running in one of the rows."""
    events = timeline.events
    for at in chain:
        name = events.name_of(at)
        number = int(events.sequence[at])
        if number >= 0 and name.startswith("autograd::engine::evaluate_function"):
            rows = events.rows(Category.OP)
            same = rows[(events.sequence[rows] == number) & (events.thread[rows] != events.thread[at])]
            return int(same[0]) if len(same) else None
    return None


def _is_library(file: str) -> bool:
    return file in _STANDARD or _LIBRARY.search(file) is not None


def _from_text(stack: str, place: Place) -> None:
    """From the `Call stack` text of 2021's traces: `file.py(line): function;...`, innermost first, exact lines."""
    for part in stack.split(";"):
        frame = _FRAME.match(part.strip())
        if frame and not _is_library(frame["file"]):
            place.file, place.line, place.function = frame["file"], int(frame["line"]), frame["function"]
            place.exact = True
            return


# method or operator -> what it looks like in the source
_LOOKS: dict[str, tuple[str, ...]] = {
    "item": ("item",),
    "_local_scalar_dense": ("item", "float", "int", "bool"),
    "is_nonzero": ("bool",),
    "to": ("to", "cpu", "cuda"),
    "_to_copy": ("to", "cpu", "cuda"),
    "copy_": ("copy_", "to", "cpu", "cuda"),
    "synchronize": ("synchronize",),
}


# operator -> what Python writes for it
_SIGNS: dict[str, tuple[type[ast.AST], ...]] = {
    "add": (ast.Add,),
    "sub": (ast.Sub,),
    "rsub": (ast.Sub,),
    "mul": (ast.Mult,),
    "div": (ast.Div, ast.FloorDiv),
    "pow": (ast.Pow,),
    "matmul": (ast.MatMult,),
    "neg": (ast.USub,),
    "gt": (ast.Gt,),
    "lt": (ast.Lt,),
    "ge": (ast.GtE,),
    "le": (ast.LtE,),
    "eq": (ast.Eq,),
    "ne": (ast.NotEq,),
}


def _sharpen(place: Place, called: frozenset[str] = frozenset()) -> None:
    """The exact line, if the source is at hand and only one line of the function can be meant."""
    if place.exact:
        return
    function = _function_at(place.file, place.line, place.function)
    if function is None:
        return
    lines = _lines_of(place, function, called)
    if isinstance(function, ast.Module) or not _begins(function, place.line):
        # recording began inside: this is where the loop is, and what stands before it is over
        lines = _in_loops(function, lines) or lines
    if len(lines) == 1:
        place.line, place.exact = lines[0], True
    elif lines:
        place.candidates = lines


def _lines_of(place: Place, function: ast.AST, called: frozenset[str]) -> list[int]:
    """Lines of the function that may be meant, by the surest sign that any of them has."""
    short = place.op.rpartition("::")[2]
    wanted = {place.method, short, *_LOOKS.get(place.method, ()), *_LOOKS.get(short, ())} - {""}
    direct = {place.callee, *_LOOKS.get(place.callee, ())} - {""}
    lines = _calls(function, set(called)) or _calls(function, direct) or _calls(function, wanted)
    if not lines and short == "is_nonzero":
        lines = _branches(function)
    if not lines and any(frame.startswith("nn.Module") for frame in place.frames):
        lines = _module_calls(function)
    if not lines and (signs := _SIGNS.get(short.rstrip("_"))):
        lines = sorted(
            {
                node.lineno
                for node in _own(function)
                if (isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)) and isinstance(node.op, signs))
                or (isinstance(node, ast.Compare) and any(isinstance(op, signs) for op in node.ops))
            }
        )
    return lines or _only_line(function)


# what is called in a training step and is no module: methods of tensors and optimizers, built-ins
_NO_MODULES = frozenset(
    [
        "step",
        "zero_grad",
        "backward",
        "autocast",
        "no_grad",
        "scale",
        "update",
        "train",
        "eval",
        "to",
        "cuda",
        "cpu",
        "float",
        "half",
        "bfloat16",
        "double",
        "long",
        "int",
        "bool",
        "item",
        "tolist",
        "numpy",
        "detach",
        "clone",
        "mean",
        "sum",
        "square",
        "pow",
        "sqrt",
        "exp",
        "log",
        "abs",
        "max",
        "min",
        "argmax",
        "argmin",
        "view",
        "reshape",
        "flatten",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "repeat",
        "chunk",
        "split",
        "stack",
        "cat",
        "size",
        "dim",
        "numel",
        "contiguous",
        "pin_memory",
        "cross_entropy",
        "mse_loss",
        "nll_loss",
        "binary_cross_entropy_with_logits",
        "l1_loss",
        "softmax",
        "log_softmax",
        "relu",
        "gelu",
        "dropout",
        "pad",
        "clip_grad_norm_",
        "requires_grad_",
        "zero_",
        "copy_",
        "add_",
        "mul_",
        "fill_",
        "print",
        "format",
        "append",
        "extend",
        "items",
        "keys",
        "values",
        "get",
    ]
) | frozenset(dir(builtins))


def _module_calls(function: ast.AST) -> list[int]:
    """Lines that call something which is neither a method of tensors nor a built-in: a module."""
    return sorted(
        {n.lineno for n in _own(function) if isinstance(n, ast.Call) and _called(n) not in _NO_MODULES}
    )


def _only_line(function: ast.AST) -> list[int]:
    """The line of a function that has but one statement, in one line."""
    body = [
        node
        for node in getattr(function, "body", [])
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    one = len(body) == 1 and body[0].lineno == body[0].end_lineno
    return [body[0].lineno] if one and not isinstance(function, ast.Module) else []


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's own frame: those of functions inside it are left out."""
    waiting = [function]
    while waiting:
        node = waiting.pop()
        yield node
        if node is function or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _calls(function: ast.AST, names: set[str]) -> list[int]:
    """Lines of the function that call one of the names; for printing, those that format a string, too."""
    prints = bool(names & {"__format__", "__repr__", "__str__"})
    lines = set()
    for node in _own(function):
        if isinstance(node, ast.Call) and _called(node) in names | ({"print", "format"} if prints else set()):
            lines.add(
                (node.func.end_lineno or node.lineno) if isinstance(node.func, ast.Attribute) else node.lineno
            )
        elif prints and isinstance(node, ast.FormattedValue):
            lines.add(node.lineno)
    return sorted(lines)


def _branches(function: ast.AST) -> list[int]:
    """Lines that branch on a value: a tensor there is turned into a bool without a call that one could see."""
    lines = set()
    for node in _own(function):
        if isinstance(node, (ast.If, ast.While, ast.Assert, ast.IfExp)):
            names = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
            plain = isinstance(node.test, (ast.Constant, ast.Name)) or (
                isinstance(node.test, ast.Compare) and all(isinstance(op, names) for op in node.test.ops)
            )
            if not plain:
                lines.add(node.test.lineno)
    return sorted(lines)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@lru_cache(maxsize=64)
def _source(file: str) -> tuple[list[str], ast.Module] | None:
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > 4 * 2**20:
            return None
        text = path.read_text(errors="replace")
        return text.splitlines(), ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return None


def _function_at(file: str, line: int, name: str) -> ast.AST | None:
    """The function whose `def`, or first decorator, is in that line, else the innermost of that name around it.

    A frame that was there when recording began is told by the line it was in, not by its `def`.
    """
    source = _source(file)
    if source is None:
        return None
    if name == "<module>":
        return source[1]
    around = None
    for node in ast.walk(source[1]):  # outer ones come first
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if _begins(node, line):
                return node
            if node.name == name and node.lineno <= line <= (node.end_lineno or node.lineno):
                around = node
    return around or (source[1] if line <= 1 else None)


def _begins(function: ast.AST, line: int) -> bool:
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return min([function.lineno, *(d.lineno for d in function.decorator_list)]) <= line <= function.lineno


def _in_loops(function: ast.AST, lines: list[int]) -> list[int]:
    """Those of the lines that stand in a loop."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in _own(function)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
    ]
    return [line for line in lines if any(low <= line <= high for low, high in spans)]


def ignored_rules(place: Place | None) -> set[str]:
    """Rules silenced by `# hotloop: ignore[rule]` on the place's line (or its candidates), if the source is at hand."""
    if place is None or not place.file:
        return set()
    source = _source(place.file)
    if source is None:
        return set()
    lines = source[0]
    found: set[str] = set()
    for line in place.candidates or [place.line]:
        if 0 < line <= len(lines):
            found |= silenced(lines[line - 1])
    return found


def silenced(text: str) -> set[str]:
    """Rules that a line of source silences."""
    match = _IGNORE.search(text)
    return {name.strip() for name in match[1].split(",")} if match else set()
