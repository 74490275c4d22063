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


def named(text: str) -> list[Host]:
    """Hosts of a command line, as `a:2,b:2`; without a number there is one place.

    Raises:
      ValueError: it is none.
    """
    return _together([_host(word, word) for word in text.split(",")])


def listed(path: Path) -> list[Host]:
    """Hosts of a file, one a line: `a slots=2` as Open MPI has it, or `a:2` as MPICH does, or `a` once for each place.

    Raises:
      ValueError: there are none, or a line is neither.
      OSError: it cannot be read.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    hosts = [_host(line, f"line {number} of {path}: {line}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise ValueError(f"{path} names no hosts. Write one a line:  node1 slots=2")
    return _together(hosts)


def _host(text: str, where: str) -> Host:
    found = _LINE.fullmatch(text.strip())
    if found is None or found[2] == "0" or found[3] == "0":
        raise ValueError(f"{where!r} is no host and its number of ranks. Write, for 2 ranks each:  node1:2,node2:2")
    return Host(found[1], int(found[2] or found[3] or 1))


def _together(hosts: Sequence[Host]) -> list[Host]:
    """One of each name, in the order in which they are named first."""
    places: dict[str, int] = {}
    for name, slots in hosts:
        places[name] = places.get(name, 0) + slots
    return [Host(name, slots) for name, slots in places.items()]
