"""The figures in the readme are those of the results."""

from __future__ import annotations

from tests.docs.pages import ROOT


def rows(page: str) -> list[list[str]]:
    """The cells of a page's tables."""
    lines = (ROOT / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_figures_of_the_readme_are_those_of_the_results():
    measured = [row[:2] for row in rows("docs/results.md") if len(row) == 3]
    shown = [row for row in rows("README.md") if len(row) == 2]  # another table is a command's output

    def is_measured(what: str, figure: str) -> bool:
        """Whether a row begins as this one, and has the figure among others."""
        return any(row.startswith(what) and figure in figures for row, figures in measured)

    assert len(shown) > 5
    assert [row for row in shown if not is_measured(*row)] == []
