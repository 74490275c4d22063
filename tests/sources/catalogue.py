"""The table of sources in docs/input.md: every kind of source, what a program takes of it, and what it refuses.

`python -m tests.sources.catalogue` writes the table anew, from what the library does with each source.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import jax
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.examples import Examples
from adaptive.data.iterable import IterableData
from adaptive.data.reading import RowsOfArrays
from tests.docs.pages import ROOT
from tests.sources.checks import program_of, refusal
from tests.sources.grain_data import GRAIN
from tests.sources.hugging_face import HUGGING_FACE
from tests.sources.plain import ARRAYS, OWN
from tests.sources.pytorch import TORCH
from tests.sources.rows import Group, Row, name
from tests.sources.stored import HDF5, ZARR
from tests.sources.tables import ARROW, PANDAS, POLARS

GROUPS = (ARRAYS, PANDAS, POLARS, ARROW, HDF5, ZARR, OWN, TORCH, GRAIN, HUGGING_FACE)
PAGE = ROOT / "docs" / "input.md"


def cases(wanted: Callable[[Row], bool]) -> list[Any]:
    """A test's parameters (group, row), skipped where a library is missing."""
    return [
        pytest.param(group, row, id=name(group, row), marks=marks(group, row))
        for group in GROUPS
        for row in group.rows
        if wanted(row)
    ]


def marks(group: Group, row: Row) -> list[Any]:
    """When a row is tested, and why not."""
    if why := group.missing(row):
        return [pytest.mark.skip(reason=why)]
    return [pytest.mark.long] * row.long


# --- the table --------------------------------------------------------------------------------------------------------


def begin(group: Group) -> str:
    """The line before a group's part of the table."""
    return f"<!-- sources: {group.title}, written by python -m tests.sources.catalogue -->"


END = "<!-- end of sources -->"


def part(group: Group) -> str:
    """A group's part of the table, by what the library does now."""
    lines = [begin(group), f"**{group.title}**. {group.about}", "", "| data | one example | how it is read |"]
    lines += ["| --- | --- | --- |", *(line(group, row) for row in group.rows), END]
    return "\n".join(lines)


def line(group: Group, row: Row) -> str:
    """A row of the table."""
    if row.refused:
        return f"| {code(row.data)} | refused | {code(' '.join(refusal(group, row).split()))} |"
    with program_of(row, group.build(row), world=comm.SoloWorld()) as program:
        example, how = in_words(program._parts.data.example), how_read(program)
        notes = [code(note) for note in program._parts.data.notes if row.noted]
    return f"| {code(row.data)} | {code(example)} | {'; '.join(filter(None, [how, row.note, *notes]))} |"


def code(text: str) -> str:
    """Text as code in a cell."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def in_words(example: Any) -> str:
    """The structure of an example, with the dtype and shape of each leaf."""

    def word(leaf: Any) -> str:
        shape = ", ".join(map(str, leaf.shape))
        return f"{leaf.dtype}[{shape}]" if shape else str(leaf.dtype)

    return str(jax.tree.map(lambda leaf: _Word(word(leaf)), example)).replace("'", '"')


class _Word(str):
    def __repr__(self) -> str:
        return str(self)


def how_read(program: ad.Program) -> str:
    """From where, and by whom."""
    data: Any = program._parts.data
    if isinstance(data, IterableData):
        if data.how.per_worker:
            return "in turn, an iterator for each worker"
        program.step()
        state = json.loads(program._parts.stream.place())[3]
        return "in turn, by every process; restored " + ("by skipping" if state is None else "from its state")
    assert isinstance(data, Examples)
    if data.in_memory:
        return "by row, from the file" if data.mapped else "by row, from memory"
    by = "by row" if isinstance(data._reading.source, RowsOfArrays) else "by index"
    if data.num_readers:
        return f"{by}, in {data.num_readers} reader process{'es' * (data.num_readers > 1)}"
    return f"{by}, {'from the file' if by == 'by row' else f'in {data.readers}'}"


def written(page: str, group: Group) -> str:
    """Return the page with a new part for this group."""
    before, found, rest = page.partition(begin(group) + "\n")
    assert found, f"{PAGE.name} has no line {begin(group)}"
    return before + part(group) + rest[rest.index(END) + len(END) :]


def main() -> None:
    logging.disable()
    page = PAGE.read_text()
    for group in GROUPS:
        if why := group.missing(*group.rows):
            print(f"{group.title} stays as it is: {why}")
        else:
            page = written(page, group)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
