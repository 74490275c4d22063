"""Where a run's steps come from: the process that takes them, its hosts, versions and settings."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("adaptive-dataflow", "jax", "jaxlib", "numpy")


@dataclass(frozen=True)
class RunOrigin:
    """The process that takes the steps of a run, for the record. Times are in seconds since 1970, by this host's clock.

    Attributes:
      process: when the process started. Local.
      build: when the building of the program began. Local.
      built: when the program was built. Local.
      hosts: names of the hosts of all processes, in the order of their first rank. Replicated.
      settings: the arguments of `Program` that are numbers or texts, by name. Replicated.
    """

    process: float
    build: float
    built: float
    hosts: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return all of it as JSON has it, with the versions of Python and libraries and the command line."""
        versions = {"python": platform.python_version()}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        return {
            "process": round(self.process, 3),
            "build": round(self.build, 6),
            "built": round(self.built, 6),
            "hosts": list(self.hosts),
            "settings": dict(self.settings),
            "versions": versions,
            "command": list(sys.argv),
        }


def process_started() -> float:
    """Return when this process started, in seconds since 1970."""
    import psutil

    return float(psutil.Process().create_time())
