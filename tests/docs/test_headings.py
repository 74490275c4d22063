"""Headings say where a reader is: none stands twice in one place, and none stands over nothing."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import PAGES, name, tokens


def sections(page: Path) -> list[tuple[int, int, str, bool]]:
    """Line, level and text of each heading of a page, and whether anything stands below it before the next one."""
    found: list[tuple[int, int, str, bool]] = []
    parts = tokens(page)
    for i, token in enumerate(parts):
        if token.type == "heading_open":
            found.append(((token.map or [0])[0] + 1, int(token.tag[1:]), parts[i + 1].content, False))
        elif token.type not in ("inline", "heading_close") and found and token.content.strip()[:5] != "<!---":
            found[-1] = (*found[-1][:3], True)
    return found


def doubled(page: Path) -> list[str]:
    """Headings with the text of another one in the same section."""
    seen, path, complaints = set(), [], []
    for line, level, text, _ in sections(page):
        path = [*path[: level - 1], text]
        complaints += [f"{name(page)}:{line}: {text!r} stands twice"] if tuple(path) in seen else []
        seen.add(tuple(path))
    return complaints


def empty(page: Path) -> list[str]:
    """Headings that nothing stands below: neither text nor a heading of a lower level."""
    found = sections(page)
    levels = [level for _, level, *_ in found[1:]] + [0]
    pairs = zip(found, levels, strict=True)
    return [f"{name(page)}:{line}: {text!r} is empty" for (line, level, text, filled), after in pairs
            if not filled and after <= level]  # fmt: skip


def test_headings_are_unique_and_have_content():
    assert [complaint for page in PAGES for complaint in doubled(page) + empty(page)] == []


def test_doubled_headings_and_empty_sections_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n## B\n\ntext\n\n### D\n\n- a list\n\n## C\n\n<!--- note -->\n\n"
        "## B\n\n```sh\nls\n```\n\n### D\n\n## E\n"
    )
    assert doubled(page) == ["page.md:15: 'B' stands twice", "page.md:21: 'D' stands twice"]
    assert empty(page) == ["page.md:11: 'C' is empty", "page.md:21: 'D' is empty", "page.md:23: 'E' is empty"]


def test_the_same_heading_in_two_sections_is_no_double(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Changes\n\n## 2\n\n### Added\n\na\n\n## 1\n\n### Added\n\nb\n")
    assert doubled(page) + empty(page) == []
