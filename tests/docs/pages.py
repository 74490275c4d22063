"""The documentation as it is read: its pages, their headings, links and blocks of code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin

from tests.mpirun import ROOT

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *DOCS, ROOT / "benchmarks" / "README.md"]


def name(page: Path) -> str:
    """Where a page is, as tests are called."""
    return page.relative_to(ROOT).as_posix()


@cache
def tokens(page: Path) -> list[Token]:
    """What a page is made of; headings have the anchors that forges give them."""
    return MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6).parse(page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return {str(token.attrs["id"]) for token in tokens(page) if token.type == "heading_open"}


def links(page: Path) -> Iterator[tuple[int, str]]:
    """The line and the target of each link and picture."""
    for block in tokens(page):
        for token in block.children or ():
            target = token.attrs.get("href") or token.attrs.get("src")
            if target:
                yield (block.map or [0])[0] + 1, str(target)


def fences(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """The first line and the text of each block of code in one of these languages; "" is none."""
    for token in tokens(page):
        if token.type == "fence" and token.info.strip() in languages:
            yield (token.map or [0])[0] + 2, token.content
