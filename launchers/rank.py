"""The program that the launcher starts on each rank: `python rank.py train.py …`, `-m module …`, or `-- command …`.

It replaces `python -m mpi4py`. A rank that fails does not abort the others but reports to the launcher, which knows
whether they end by themselves. The rank is a child of the process that mpirun starts (`supervisor.py`). This file is
started by its path, so that it imports only the standard library: JAX reads some of its settings when it is imported,
and scripts set them before that.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder

import importlib.util
import os
import runpy
import signal
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

GPUS = "ADAPTIVE_GPUS_PER_HOST"  # set by the launcher: ranks see parts of this many GPUs; 0: every rank sees all
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The user's settings of GPU memory; by default JAX preallocates three quarters of it.
_MEMORY = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


def load(name: str) -> ModuleType:
    """Return a module of the package `launchers`, without importing the package; a later import finds the module."""
    whole = f"launchers.{name}"
    spec = importlib.util.spec_from_file_location(whole, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[whole] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def see_own_gpus(environ: MutableMapping[str, str]) -> None:
    """Restrict this rank to its part of the visible GPUs, by its number on its host: one, or with `--gpus-per-host`
    an equal share.

    Args:
      environ: environment variables, of which CUDA_VISIBLE_DEVICES is changed.

    Raises:
      SystemExit: `--gpus-per-host` was given, and the host has no GPU for this rank or its number is unknown.
    """
    local = _first(_LOCAL_RANKS, environ)
    if GPUS not in environ:
        _see_one_of_those_there(local, environ)
        return
    if environ[GPUS] == "0":
        return
    gpus = [gpu for gpu in environ.get(_VISIBLE, "").split(",") if gpu] or [str(i) for i in range(int(environ[GPUS]))]
    if local is None:
        raise SystemExit(
            f"adaptive run: the launcher does not say which rank of its host this is ({_LOCAL_RANKS[0]}, …)"
        )
    if local >= len(gpus):
        raise SystemExit(
            f"adaptive run: there is no GPU for rank {local} of this host: {_VISIBLE} has {', '.join(gpus)}. "
            "Start fewer ranks there, or let them share GPUs, without --gpus-per-host."
        )
    each = max(1, len(gpus) // (_first(_LOCAL_SIZES, environ) or len(gpus)))
    environ[_VISIBLE] = ",".join(gpus[local * each : (local + 1) * each])


def _see_one_of_those_there(local: int | None, environ: MutableMapping[str, str]) -> None:
    """Restrict this rank to one of its host's GPUs, round robin; ranks that share one get equal parts of its memory."""
    ranks, visible = _first(_LOCAL_SIZES, environ) or 1, environ.get(_VISIBLE)
    gpus = visible.split(",") if visible is not None else _gpus()
    gpus = [gpu for gpu in gpus if gpu not in ("", "-1", "NoDevFiles")]
    if local is None or ranks == 1 or not gpus:
        return
    environ[_VISIBLE] = gpus[local % len(gpus)]
    sharing = len(range(local % len(gpus), ranks, len(gpus)))
    if sharing > 1 and not any(name in environ for name in _MEMORY):
        environ[_MEMORY[0]] = f"{0.9 / sharing:.2f}"


def _gpus() -> list[str]:
    """Return the numbers of this host's NVIDIA GPUs by their device files, because starting CUDA would take long."""
    nodes = (node.name.removeprefix("nvidia") for node in Path("/dev").glob("nvidia[0-9]*"))
    return [str(place) for place, _ in enumerate(node for node in nodes if node.isdigit())]


def _first(names: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Return the first of these environment variables that is a number, as an integer."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def run(arguments: list[str], show: Callable[[str], object]) -> int:
    """Run a script, or a module after `-m`, as Python does, and return its exit code.

    Args:
      arguments: the script or module, and its own arguments.
      show: prints the error by which it ends.
    """
    try:
        if arguments[0] == "-m":
            sys.argv[:] = arguments[1:]
            if not sys.flags.safe_path:
                sys.path.insert(0, "")
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = arguments
            if not sys.flags.safe_path:
                sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is not None:
            show(f"{end.code}\n")
        return int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next  # skip the frames above the script
        if isinstance(error, KeyboardInterrupt):
            show(f"KeyboardInterrupt{_line_in(trace, Path(sys.argv[0]))}\n")
            return 128 + signal.SIGINT
        with redirect_stderr(StringIO()) as text:  # not line by line, between the lines of other ranks
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        show(text.getvalue())
        return 1
    return 0


def _line_in(trace: TracebackType | None, script: Path) -> str:
    """Return " (train.py:15)" for the innermost line of the script's folder in a traceback, or ""."""
    folder, lines = str(script.resolve().parent), traceback.extract_tb(trace)
    own = [f for f in lines if os.path.dirname(os.path.abspath(f.filename)) == folder]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""


def execute(command: list[str]) -> NoReturn:
    """Replace this process by a command.

    Raises:
      SystemExit: the command cannot be run; its code is 127.
    """
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"adaptive run: {command[0]} cannot be run: {error.strerror}\n")
        raise SystemExit(127) from error


if __name__ == "__main__":
    see_own_gpus(os.environ)
    ending, cores = load("ending"), load("cores")
    local, ranks = _first(_LOCAL_RANKS, os.environ), _first(_LOCAL_SIZES, os.environ)
    cores.take_cores(local, ranks, os.environ, ending.SPAWNED in os.environ, cores.cpu_quota())
    command = sys.argv[1] == "--"
    load("supervisor").supervise(ending, load("activity"), load("inspection"), os.environ, command)
    if command:
        execute(sys.argv[2:])
    ending.prepare()
    code = run(sys.argv[1:], ending.show_error)
    ending.ends(code)
    sys.exit(code)
