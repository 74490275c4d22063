"""Which line of the user's driver an equation comes from, and which workers are meant: as errors say it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

from .jaxprs import current_source, frames_of

_FRAME = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::\d+)? \(.*\)$")


@lru_cache(maxsize=1)
def library_folders() -> tuple[str, ...]:
    """Folders whose frames are never the driver: ours, and those of the libraries that drivers are written with."""
    names = ("adaptive", "collectives", "monitors", "controllers", "flax", "optax", "equinox")
    specs = (find_spec(name) for name in names)
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin)


def line_of(source_info) -> str:
    """`driver.py:15` for an equation's `source_info`, or "" where no line of a user's file is known."""
    frames = frames_of(source_info)
    for frame in reversed(frames):  # the innermost comes last
        match = _FRAME.match(frame)
        if match and not match["file"].startswith(library_folders()):
            return f"{os.path.basename(match['file'])}:{match['line']}"
    return ""


def current_line() -> str:
    """`driver.py:15` for the line of the driver that is being executed or traced."""
    return line_of(current_source())


def line_search_of(source_info) -> str:
    """What to write for a line search of optax's, if the driver came here through one; else nothing."""
    if not any("linesearch.py:" in frame for frame in frames_of(source_info)):
        return ""
    return (
        "\nA line search can try a fixed number of step sizes side by side, their losses in one message: see "
        "'Line searches' in docs/sharp_bits.md."
    )


def at(line: str) -> str:
    """` (driver.py:15)`, or nothing where the line is not known."""
    return f" ({line})" if line else ""


def name_workers(numbers: Sequence[int]) -> str:
    """`worker 3`, or `workers 0, 3`."""
    return f"worker{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"
