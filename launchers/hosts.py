"""The hosts of a job and their slots, from a command line or a hostfile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"([^\s:]+)(?::(\d+)|(?:\s+\S+=\d+)*?\s+slots\s*=\s*(\d+).*|\s+max[_-]slots.*)?\s*")


class Host(NamedTuple):
    """A host and its number of slots: how many ranks it takes."""

    name: str
    slots: int


def named(text: str, each: int = 1) -> list[Host]:
    """Return the hosts of a command line such as `a:2,b:2`.

    Args:
      text: the value of `--hosts`.
      each: slots of a host that is named once and without a number.

    Raises:
      ValueError: a word is not a host with a positive number of slots.
    """
    return _together([_host(word, word) for word in text.split(",")], each)


def listed(path: Path, each: int = 1) -> list[Host]:
    """Return the hosts of a file with one host a line.

    A line is `a slots=2` (Open MPI), `a:2` (MPICH), or `a`, repeated once for each slot.

    Args:
      path: the hostfile.
      each: slots of a host that is named once and without a number.

    Raises:
      ValueError: the file names no hosts, or a line is not a host with a positive number of slots.
      OSError: the file cannot be read.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    hosts = [_host(line, f"line {number} of {path}: {line}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise ValueError(f"{path} names no hosts. Write one per line:  node1 slots=2")
    return _together(hosts, each)


def _host(text: str, where: str) -> tuple[str, int | None]:
    found = _LINE.fullmatch(text.strip())
    if found is None or found[2] == "0" or found[3] == "0":
        raise ValueError(f"{where!r} is not a host with its number of ranks. For 2 ranks each:  node1:2,node2:2")
    number = found[2] or found[3]
    return found[1], int(number) if number else None


def _together(hosts: Sequence[tuple[str, int | None]], each: int) -> list[Host]:
    """Merge repeated hosts by adding their slots; the order is that of each name's first occurrence."""
    numbers: dict[str, list[int | None]] = {}
    for name, number in hosts:
        numbers.setdefault(name, []).append(number)
    return [Host(name, each if found == [None] else sum(n or 1 for n in found)) for name, found in numbers.items()]
