"""The documentation does what it says: every python block runs, every `hotloop` command in a shell block
exists.

All python blocks of a page run in order in one namespace, in a temporary folder. A block that follows the
comment `<!-- run: no -->` is only compiled.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import os
import random
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
_SKIP = re.compile(r"<!--\s*run:\s*no\s*-->")
_PYTHON = ("python", "py", "python3", "pycon")  # pycon: a session with prompts and answers
_SHELL = ("bash", "sh", "shell", "console", "zsh")


@dataclass(frozen=True)
class Block:
    """One fenced block: language, text without indentation, first line, and whether it is to be run."""

    language: str
    text: str
    line: int
    run: bool


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page of Markdown, also those indented in lists and tabs."""
    lines = page.splitlines()
    number = 0
    skip = False
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if not opening:
            if lines[number].strip():
                skip = bool(_SKIP.search(lines[number]))
            number += 1
            continue
        start = number + 1
        closing = re.compile(rf"^ *{re.escape(opening['fence'][0])}{{{len(opening['fence'])},}}\s*$")
        number = start
        while number < len(lines) and not closing.match(lines[number]):
            number += 1
        if number == len(lines):
            raise AssertionError(f"the block that opens on line {start} is never closed")
        indent = len(opening["indent"])
        text = "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines[start:number])
        language = re.split(r"[\s{,]", opening["info"].strip().lower() + " ")[0]
        yield Block(language, text + "\n", start + 1, not skip)
        skip = False
        number += 1


def run_page(page: str, name: str) -> None:
    """Run all python blocks of `page` in one namespace; a fault shows the page's own line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language not in _PYTHON:
            continue
        if block.language == "pycon":
            if block.run:
                _run_session(block, name, namespace)
            continue
        # Empty lines in front make the line numbers those of the page.
        source = "\n" * (block.line - 1) + block.text
        linecache.cache[name] = (len(page), None, page.splitlines(keepends=True), name)
        code = compile(source, name, "exec")
        if block.run:
            exec(code, namespace)


def _run_session(block: Block, name: str, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, namespace, name, name, block.line - 1)
    assert test.examples, f"line {block.line}: a session without a prompt"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert not report, "".join(report)


def unknown_commands(page: str) -> Iterator[str]:
    """Every `hotloop VERB` in a shell block whose verb does not exist."""
    from hotloop.cli.command import VERBS

    known = {verb.name for verb in VERBS}
    for block in blocks(page):
        if block.language not in _SHELL:
            continue
        for line in re.sub(r"\\\n", " ", block.text).splitlines():
            verb = verb_of(line)
            if verb is not None and verb not in known and not verb.startswith("-"):
                yield f"line {block.line}: `hotloop {verb}`: there is no such verb"


def verb_of(line: str) -> str | None:
    """The verb of a shell line that calls `hotloop`, however it gets there; None for any other line."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        words = line.split()
    for position, word in enumerate(words[:-1]):
        called = word == "hotloop" or word.endswith("/hotloop")
        before = words[position - 1] if position else "&&"
        starts = before in ("&&", "||", ";", "|", "-m", "time", "srun", "exec") or "=" in before
        if called and starts:
            return words[position + 1]
    return None


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page may seed, change folder and set variables; the tests after it must not notice."""
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_default_dtype()
    arguments = sys.argv
    sys.argv = ["page.py"]
    yield
    sys.argv = arguments
    os.environ.clear()
    os.environ.update(environment)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_default_dtype(states[3])


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(path: Path) -> None:
    page = path.read_text()
    written = len(re.findall(r"^ *(?:`{3,}|~{3,}) *(?:python|py|python3|pycon)\b", page, flags=re.MULTILINE))
    assert sum(block.language in _PYTHON for block in blocks(page)) == written, "a block was not found"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_page(page, str(path))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(path: Path) -> None:
    assert list(unknown_commands(path.read_text())) == []


SAMPLE = """# Page

```python
x = 1
```

Text with `inline` code.

1. in a list:

    ```python
    def double(v):
        return 2 * v

    seen.append(double(x))
    ```

<!-- run: no -->
```python
import a_module_that_does_not_exist
```

~~~~python title="tilde"
text = '''
```
'''
seen.append(text)
~~~~

```
not python (
```

```bash
$ hotloop env --json && echo done
CUDA_VISIBLE_DEVICES=0 hotloop launch -n 2 train.py   # hotloop nonsense
python -m hotloop frobnicate
.venv/bin/hotloop --version
pip install hotloop torch
```
"""


def test_blocks_are_found_with_their_lines() -> None:
    found = [(block.language, block.line, block.run) for block in blocks(SAMPLE)]
    assert found == [
        ("python", 4, True),
        ("python", 12, True),
        ("python", 20, False),
        ("python", 24, True),
        ("", 31, True),
        ("bash", 35, True),
    ]


@pytest.mark.usefixtures("untouched")
def test_blocks_run_in_one_namespace() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_page(SAMPLE.replace("seen.append", "print"), "sample.md")
    assert output.getvalue() == "2\n\n```\n\n"


def test_a_faulty_block_is_a_fault_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("a\n\n```python\nx = 0\n1 / x\n```\n", "sample.md")
    assert caught.traceback[-1].lineno + 1 == 5
    with pytest.raises(SyntaxError):
        run_page("<!-- run: no -->\n\n```python\n1 +\n```\n", "sample.md")
    with pytest.raises(AssertionError, match="line 1 is never closed"):
        run_page("```python\n1\n", "sample.md")


def test_a_session_is_held_to_its_answers() -> None:
    run_page(
        "```python\nx = 2\n```\n```pycon\n>>> y = x + 1\n>>> y\n3\n```\n```python\nassert y == 3\n```\n",
        "s.md",
    )
    with pytest.raises(AssertionError, match="Expected"):
        run_page("```pycon\n>>> 1 + 1\n3\n```\n", "s.md")


def test_unknown_commands_are_found() -> None:
    assert list(unknown_commands(SAMPLE)) == ["line 35: `hotloop frobnicate`: there is no such verb"]
