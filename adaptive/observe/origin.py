"""Where a run's steps come from: the process that takes them, its hosts, versions, source and settings."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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
        """Return all of it as JSON has it, with the versions of Python and libraries, the command line, and the commit
        of the git checkout that has the script. Reads some files.
        """
        return {
            "process": round(self.process, 3),
            "build": round(self.build, 6),
            "built": round(self.built, 6),
            "hosts": list(self.hosts),
            "settings": dict(self.settings),
            "versions": versions(),
            "command": list(sys.argv),
            "commit": commit_of(Path(sys.argv[0] or ".").absolute().parent),
        }


def process_started() -> float:
    """Return when this process started, in seconds since 1970."""
    with suppress(OSError, ValueError, IndexError):  # Linux, where psutil knows the time only to the second
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    import psutil

    return float(psutil.Process().create_time())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute, by name."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit_of(folder: Path) -> str:
    """Return the commit of the git checkout that contains a folder; "" if there is none. Reads git's files, because a
    process under MPI must not fork.
    """
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        with suppress(OSError, UnicodeDecodeError):
            if git.is_file():  # of a linked work tree: "gitdir: …"
                git = parent / git.read_text().partition("gitdir:")[2].strip()
            if git.is_dir():
                return _head(git)
    return ""


def _head(git: Path) -> str:
    """Return the commit that HEAD of a git directory names; "" if it names none."""
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name, common = head.partition("ref:")[2].strip(), git
    if (git / "commondir").is_file():
        common = git / (git / "commondir").read_text().strip()
    if (common / name).is_file():
        return (common / name).read_text().strip()
    packed = common / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
