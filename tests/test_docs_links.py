"""The documentation hangs together: every page is in the navigation, every link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [page for page in (*TEXTS, *sorted(DOCS.rglob("*.md"))) if page.exists()]

_FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^ *\2`*~*\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`+[^`\n]*`+")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_NAV_PAGE = re.compile(r"^\s*-\s+(?:[^:#]+:\s+)?([\w./-]+\.md)\s*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^(?:https?|mailto):")


def links(page: str) -> Iterator[str]:
    """Targets of the links of a page of Markdown, those in code left out."""
    text = _FENCED.sub("", page)
    yield from (match[1] for match in _LINK.finditer(_CODE.sub("", text)))


def anchors(page: str) -> set[str]:
    """The anchors that Markdown's table of contents gives to the headings of a page."""
    found: set[str] = set()
    for heading in _HEADING.finditer(_FENCED.sub("", page)):
        words = re.sub(r"[^\w\s-]", "", heading[1].replace("`", "")).strip().lower()
        anchor = name = re.sub(r"[-\s]+", "-", words)
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{name}_{number}"
        found.add(anchor)
    return found


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Links of the page `path` that lead nowhere, or out of the folder of pages that a site is made of."""
    for target in links(text):
        if _ELSEWHERE.match(target):
            continue
        file, _, anchor = unquote(target).partition("#")
        goal = (path.parent / file).resolve() if file else path
        if file and not goal.exists():
            yield f"{target}: there is no {file}"
        elif path.is_relative_to(DOCS) and not goal.is_relative_to(DOCS):
            yield f"{target}: leads out of docs, which is all that the site shows"
        elif anchor and (
            goal.suffix != ".md" or anchor not in anchors(text if goal == path else goal.read_text())
        ):
            yield f"{target}: {goal.name} has no heading {anchor}"


def navigation() -> list[str]:
    """The pages that mkdocs.yml puts into the navigation, in order."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return _NAV_PAGE.findall(nav)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
    assert pages
    assert sorted(navigation()) == pages


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert list(broken_links(path, path.read_text())) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_begins_with_its_one_title(path: Path) -> None:
    text = _FENCED.sub("", path.read_text())
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == 1


SAMPLE = """# Title

A [link](quickstart.md), [one with a place](resume.md#stopping), [here](#a-heading-with-code), and
[outside](https://example.org/x.md#y); no link: `[a](b.md)`.

## A heading, with `code`

```python
# no heading
x = "[no link](nowhere.md)"
```

[gone](nowhere.md), [no such place](resume.md#nowhere), [out](../README.md)
"""


def test_broken_links_are_found() -> None:
    assert list(links(SAMPLE))[:2] == ["quickstart.md", "resume.md#stopping"]
    assert anchors(SAMPLE) == {"title", "a-heading-with-code"}
    assert list(broken_links(DOCS / "sample.md", SAMPLE)) == [
        "nowhere.md: there is no nowhere.md",
        "resume.md#nowhere: resume.md has no heading nowhere",
        "../README.md: leads out of docs, which is all that the site shows",
    ]
