"""Lines of the user's driver, and workers, as error messages name them."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from adaptive.base.values.jaxprs import current_source, frames_of

_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")
_FRAME = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::\d+)? \(.*\)$")


@lru_cache(maxsize=1)
def library_folders() -> tuple[str, ...]:
    """Return the folders whose frames are never the driver: this library's, flax's, optax's and equinox's."""
    names = ("adaptive", "collectives", "monitors", "controllers", "flax", "optax", "equinox")
    specs = (find_spec(name) for name in names)
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin)


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed library or to this one."""
    return file.startswith((*_INSTALLED, *library_folders()))


def name_line(file: str, line: object) -> str:
    """Return `driver.py:15`; for a cell of a notebook `cell In[3], line 15`, as IPython names it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    if named:
        return f"cell {named[1]}, line {line}"
    return f"{os.path.basename(file)}:{line}"


def line_of_error(error: BaseException) -> str:
    """Return `driver.py:15` for the innermost line of the user's on an error's way, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [name_line(f.filename, f.lineno) for f in frames if not is_library(f.filename)]
    return lines[-1] if lines else ""


def line_of(source_info: Any) -> str:
    """Return `driver.py:15` for an equation's `source_info`, or "" if no line of a user's file is known."""
    frames = frames_of(source_info)
    for frame in reversed(frames):  # the innermost comes last
        match = _FRAME.match(frame)
        if match and not match["file"].startswith(library_folders()):
            return name_line(match["file"], match["line"])
    return ""


def current_line() -> str:
    """Return `driver.py:15` for the line of the driver that is being executed or traced, or ""."""
    return line_of(current_source())


def line_search_of(source_info: Any) -> str:
    """Return advice on optax's line searches if the equation stems from one, else ""."""
    if not any("linesearch.py:" in frame for frame in frames_of(source_info)):
        return ""
    return (
        "\nA line search can try a fixed number of step sizes side by side, their losses in one message: see "
        "'Line searches' in docs/sharp_bits.md."
    )


def at(line: str) -> str:
    """Return ` (driver.py:15)`, or "" if the line is unknown."""
    return f" ({line})" if line else ""


def name_workers(numbers: Sequence[int]) -> str:
    """Return `worker 3`, or `workers 0, 3`."""
    return f"worker{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"
