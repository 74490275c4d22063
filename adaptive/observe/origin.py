"""Where a run's steps come from: the process that takes them, its hosts, versions and settings."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def run_origin(build: float, hosts: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of a program that is built now, for the record; times in seconds since 1970.

    `build`: when its building began; `settings`: the arguments of `Program` that are numbers or texts.
    """
    import psutil

    times = {"process": psutil.Process().create_time(), "build": build, "built": time.time()}
    origin = {name: round(at, 6) for name, at in times.items()}
    return origin | {"hosts": [*hosts], "settings": {**settings}, "versions": _versions(), "command": [*sys.argv]}


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("adaptive-dataflow", "jax", "jaxlib", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
