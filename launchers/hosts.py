"""The hosts of a job, and how many ranks there is a place for on each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"([^\s:]+)(?::(\d+)|(?:\s+\S+=\d+)*?\s+slots\s*=\s*(\d+).*|\s+max[_-]slots.*)?\s*")


class Host(NamedTuple):
    """A host, and for how many ranks it has places."""

    name: str
    slots: int


def named(text: str, each: int = 1) -> list[Host]:
    """Hosts of a command line, as `a:2,b:2`.

    Args:
      each: places of a host that is named once, and without a number.

    Raises:
      ValueError: it is none.
    """
    return _together([_host(word, word) for word in text.split(",")], each)


def listed(path: Path, each: int = 1) -> list[Host]:
    """Hosts of a file, one a line: `a slots=2` as Open MPI has it, or `a:2` as MPICH does, or `a` once for each place.

    Args:
      each: places of a host that is named once, and without a number.

    Raises:
      ValueError: there are none, or a line is neither.
      OSError: it cannot be read.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    hosts = [_host(line, f"line {number} of {path}: {line}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise ValueError(f"{path} names no hosts. Write one a line:  node1 slots=2")
    return _together(hosts, each)


def _host(text: str, where: str) -> tuple[str, int | None]:
    found = _LINE.fullmatch(text.strip())
    if found is None or found[2] == "0" or found[3] == "0":
        raise ValueError(f"{where!r} is no host and its number of ranks. Write, for 2 ranks each:  node1:2,node2:2")
    number = found[2] or found[3]
    return found[1], int(number) if number else None


def _together(hosts: Sequence[tuple[str, int | None]], each: int) -> list[Host]:
    """One of each name, in the order in which they are named first."""
    numbers: dict[str, list[int | None]] = {}
    for name, number in hosts:
        numbers.setdefault(name, []).append(number)
    return [Host(name, each if found == [None] else sum(n or 1 for n in found)) for name, found in numbers.items()]
