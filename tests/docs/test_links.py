"""Links between pages, and to files, lead somewhere; and the site has all pages."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, name

pytestmark = pytest.mark.seconds(10)

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
COPIED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "examples", "benchmarks")  # by `make site`


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere, or out of what the site has."""
    wrong = []
    for line, target in links(page):
        if target.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = unquote(target).partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or there.is_dir():
            wrong.append(f"{name(page)}:{line}: there is no file {target}")
        elif there.relative_to(ROOT).parts[0] not in COPIED:
            wrong.append(f"{name(page)}:{line}: {target} is not in the site: `make site` copies {', '.join(COPIED)}")
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            wrong.append(f"{name(page)}:{line}: {name(there)} has no heading #{anchor}")
    return wrong


def test_links_lead_somewhere():
    assert [complaint for page in [*PAGES, *RESULTS] for complaint in broken(page)] == []


def test_make_docs_copies_all_link_targets():
    recipe = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "cp -R" in line)
    assert recipe.split()[2:-1] == list(COPIED)


def nav(entries: object) -> list[str]:
    """All pages of the navigation."""
    if isinstance(entries, str):
        return [entries]
    children = entries.values() if isinstance(entries, dict) else entries
    return [page for child in children for page in nav(child)]  # type: ignore[attr-defined]


def test_the_navigation_has_all_pages():
    in_nav = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(in_nav) == len(set(in_nav))
    assert set(in_nav) == {name(page) for page in PAGES}, "mkdocs.yml's nav lists the pages that there are"
    assert {name(page) for page in DOCS} < set(in_nav)
