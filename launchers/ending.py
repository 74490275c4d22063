"""How a process of a job ends: it reports to the launcher, and does not wait in MPI for processes that are gone.

`adaptive run` names itself in an environment variable. A process sends it lines of JSON: through its supervisor
(`supervisor.py`), which has the TCP connection, or through a connection of its own. They have these fields:

    token    and who the process is: the first line
    making   whether the process makes a world of all processes, and so waits for all of them
    world    in how many worlds the process is; training continues when it dies inside one
    joined   a spawned process has become a member of the job
    ends     the exit code, as soon as it is known, at the latest when Python ends
    left     the same, of a process that leaves for good while the others go on (`leave_job`)
    asks     a question, by its number: whether the process still belongs to the job (`confirm`)
    again    as `token`, of a process whose connection broke: whether the others go on without it (`if_given_up`)
    exited   the exit status, and
    killed   the signal that ended the process: both from the supervisor

The launcher may answer

    signal   which the process is to get: so it reaches processes on all hosts, and none but them
    lost     a rank that is cut off; MPI is told (`declare.py`)
    here     the number of a question
    given up the others go on without the process

A process whose launcher has not answered for so many seconds is cut off from the others: it is killed, since they go
on without it.

MPI_Finalize can wait for ever where processes were lost or have left. In a job that survives losses a process whose
exit code is known leaves it out, which mpirun does not mind: Python's exit handlers are run, files are flushed, and
the process is gone. Else (plain `python train.py`) MPI_Finalize runs in a thread, with a deadline, and mpi4py, which
would call it once more, is told to leave it to us (`collectives/worlds/mpi.py`).

The launcher's `rank.py` loads this file before anything else, so it imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

LAUNCHER = "ADAPTIVE_LAUNCHER"  # TOKEN SECONDS HOST ADDRESS:PORT ADDRESS:PORT …
RECRUIT = "ADAPTIVE_RECRUIT"  # in the environment of processes that others of the job have spawned
SURVIVES = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
FINALIZE_SECONDS = 2.0  # waited for MPI_Finalize at the end of a job that survives losses
HURRY_SECONDS = 0.2  # where others go on, or this process has failed: it only has to have begun
CONNECT_SECONDS = 3.0
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class _Ending:
    """What is known of the end of this process."""

    def __init__(self) -> None:
        self.code: int | None = None  # not known
        self.leaves = False  # while others go on
        self.heard = False  # it ends by an error that all processes have
        self.worlds = 0  # that are open
        self.line: socket.socket | None = None
        self.said = threading.Lock()
        self.prepared = False
        self.changed = threading.Condition()  # of the questions to the launcher
        self.asked = self.answered = 0
        self.listening = False
        self.supervised = False


_me = _Ending()


def attach(line: socket.socket) -> None:
    """Report by this connection, to a supervisor that has introduced this process to the launcher."""
    _me.line, _me.supervised = line, True


def prepare() -> None:
    """Connect to the launcher, if there is one of ours, and see to the end of MPI. Again, it does nothing."""
    if _me.prepared:
        return
    _me.prepared = True
    atexit.register(_end)
    if _me.line is None:
        _me.line = connect(os.environ)
        if _me.line is not None:
            _say(**introduction(os.environ, os.getpid()))
    if _me.line is not None:
        _me.listening = True
        threading.Thread(target=_listen, args=(_me.line, os.getpid()), name="adaptive-launcher", daemon=True).start()


@contextmanager
def making_world(of_all: bool) -> Iterator[None]:
    """Around the making of a world.

    Args:
      of_all: the world is of all processes of the job, so this process waits for each of them.
    """
    prepare()
    if not of_all:
        yield
        return
    _say(making=True)
    try:
        yield
    finally:
        _say(making=False)


def world_made() -> None:
    """Report that training continues from now on if this process dies."""
    _me.worlds += 1
    _say(world=_me.worlds)


def world_ended() -> None:
    """Report that the world has come to its end, on all processes."""
    _me.worlds -= 1
    _say(world=_me.worlds)


def joined() -> None:
    """Report that this process, which was spawned, is a member of the job: from now on its end counts."""
    _say(joined=True)


def all_have_heard() -> None:
    """This process is about to end by an error that all processes have. None has to abort the others."""
    _me.heard = True


def leaves() -> bool:
    """Whether this process is about to leave the job for good (`leave_job`)."""
    return _me.leaves


def ends(code: int) -> None:
    """Tell the launcher the exit code, once it is known. The process ends with it.

    A code that is not 0 is told at once, since others may wait for this process; 0 is, when Python has ended.
    """
    if not _me.leaves:
        _me.code = code
        if code:
            _say(ends=code, heard=_me.heard)


def leave_job(code: int = 0) -> NoReturn:
    """End this process for good, while the others go on. For jobs that survive losses.

    The others have taken leave of it before, or take it for one that has died: MPI is not finalized, since they would
    not notice. It raises SystemExit, so `with` blocks and `finally` clauses are gone through.

    Args:
      code: of this process. The job's own code does not depend on it under `adaptive run`. Plain mpirun
        ends with it, if it is not 0, and the others do not notice then: so they must have taken leave.
    """
    _me.leaves, _me.code = True, code
    prepare()
    _say(left=code)
    raise SystemExit(code)


def confirm() -> None:
    """Return when the launcher has confirmed that this process belongs to the job, or cannot answer.

    Called before this process takes others for lost. If it was given up while it could not answer, they are not lost:
    it is killed then.
    """
    with _me.changed:
        if not _me.listening:
            return
        _me.asked += 1
        wanted = _me.asked
        _say(asks=wanted)
        _me.changed.wait_for(lambda: _me.answered >= wanted or not _me.listening, _host_timeout(os.environ))


def connect(environ: Mapping[str, str], *, quiet: bool = False) -> socket.socket | None:
    """Return a connection to the launcher; None without a launcher of ours, or where it cannot be reached.

    Args:
      quiet: do not report that it cannot be reached.
    """
    token, seconds, host, *addresses = environ.get(LAUNCHER, "").split() or ["", "", ""]
    rank = _number(environ, _RANKS)
    if not token or rank is None:
        return None
    here = socket.gethostname() == host
    for address in sorted(addresses, key=lambda a: a.startswith("127.") != here):  # its own first, or last
        name, _, port = address.rpartition(":")
        with suppress(OSError):
            line = socket.create_connection((name, int(port)), timeout=CONNECT_SECONDS)
            line.settimeout(None)
            give_up_after(line, float(seconds))
            return line
    if not quiet:
        sys.stderr.write(f"rank {rank} cannot reach its launcher on {host}, by {', '.join(addresses)}\n")
    return None


def introduction(environ: Mapping[str, str], pid: int, supervised: bool = False) -> dict[str, Any]:
    """Return the first line of a process to the launcher: who it is.

    Args:
      supervised: it comes from the supervisor of the process `pid`.
    """
    rank = _number(environ, _RANKS) or 0
    return {
        "token": environ[LAUNCHER].split()[0],
        "rank": rank,
        "size": _number(environ, _SIZES) or rank + 1,
        "job": environ.get("PMIX_NAMESPACE", ""),
        "spawned": RECRUIT in environ,
        "host": socket.gethostname(),
        "pid": pid,
        "supervised": supervised,
    }


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def _say(**what: Any) -> None:
    with suppress(OSError), _me.said:  # the launcher may be gone, and then nobody asks
        if _me.line is not None:
            send(_me.line, **what)


def send(line: socket.socket, **what: Any) -> None:
    """Send a line to the launcher.

    Raises:
      OSError: the connection is closed.
    """
    line.sendall(json.dumps(what).encode() + b"\n")


def _listen(line: socket.socket, pid: int) -> None:
    """Obey the launcher; kill this process where it is cut off from the launcher."""
    try:
        with line.makefile("r") as lines:
            for words in lines:
                match words.split():
                    case ["signal", number]:
                        os.kill(pid, int(number))
                    case ["lost", rank]:
                        _lost(int(rank))
                    case ["here", number]:
                        with _me.changed:
                            _me.answered = int(number)
                            _me.changed.notify_all()
    except OSError as error:
        if_cut_off(error, pid)
    if not _me.supervised:
        if_given_up(os.environ, pid)
    with _me.changed:
        _me.listening = False
        _me.changed.notify_all()


def if_cut_off(error: OSError, pid: int) -> None:
    """Kill a process if its launcher does not answer any more."""
    if not isinstance(error, ConnectionError):
        sys.stderr.write(f"pid {pid} on {socket.gethostname()} is cut off from its launcher ({error})\n")
        os.kill(pid, signal.SIGKILL)


def if_given_up(environ: Mapping[str, str], pid: int) -> None:
    """Kill a process whose connection to the launcher broke, if the others go on without it.

    The connection breaks when the launcher dies, too. Then nobody answers, and the process goes on.
    """
    line = connect(environ, quiet=True)
    if line is None:
        return
    line.settimeout(CONNECT_SECONDS)
    with line, suppress(OSError):
        send(line, **introduction(environ, pid), again=True)
        if line.makefile("r").readline().strip() == "given up":
            sys.stderr.write(
                f"pid {pid} on {socket.gethostname()} was given up: its host did not answer the launcher for "
                f"{_host_timeout(environ):g} s (--host-timeout), and the others continue without it. Was the host "
                "stopped, or its network down? The process is killed, and writes no checkpoint.\n"
            )
            os.kill(pid, signal.SIGKILL)


def _host_timeout(environ: Mapping[str, str]) -> float:
    """Seconds after which a process that does not answer the launcher is lost."""
    return float(environ[LAUNCHER].split()[1])


def _lost(rank: int) -> None:
    """A rank of this job cannot be reached any more."""
    from .declare import declare_lost

    own = _number(os.environ, _RANKS)
    if "mpi4py.MPI" in sys.modules and own is not None:
        declare_lost(rank, own)


def give_up_after(line: socket.socket, seconds: float) -> None:
    """Let the kernel close a connection whose other side has not answered for so long. Idle ones are probed."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": seconds / 2, "TCP_KEEPINTVL": seconds / 6, "TCP_KEEPCNT": 3}
    for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * seconds}.items():
        if hasattr(socket, name):  # Linux has all
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, round(value)))


def _end() -> None:
    """Called when Python ends; started by our launcher, behind all other exit handlers."""
    survives = os.environ.get(SURVIVES, "").lower() in ("1", "true", "yes")
    by_error = getattr(sys, "last_value", None) is not None  # the interpreter sets it when it prints an error
    if not _me.code and not _me.leaves and not by_error:
        _say(ends=0)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if survives and _me.code is not None:
        _flush()
        os._exit(_me.code & 0xFF)
    if _me.code or (survives and _me.heard):
        _finalize(mpi, HURRY_SECONDS)  # nobody may come, and nobody is to be aborted
    elif survives and not by_error:
        _finalize(mpi, FINALIZE_SECONDS)
    # else mpi4py does as it always does: it finalizes MPI, or aborts


def _flush() -> None:
    """Write what is buffered, in files that nobody has closed too."""
    for thing in gc.get_objects():
        if isinstance(thing, io.IOBase):
            with suppress(Exception):
                thing.flush()


def _finalize(mpi: Any, seconds: float) -> None:
    """Finalize MPI, and wait for that no longer than `seconds`; the process ends all the same.

    `MPI.Finalize` of mpi4py holds the interpreter's lock, so no Python thread could count the seconds. The same
    function of C, called by ctypes, does not.
    """
    thread = threading.Thread(target=_finalize_of(mpi), name="adaptive-finalize", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() and sys.platform == "linux":  # not under the feet of C's own handlers
        c = ctypes.CDLL(None)
        if hasattr(c, "on_exit"):
            c.on_exit(c._exit, None)
            c.__cxa_atexit(c.fflush, None, None)


def _finalize_of(mpi: Any) -> Callable[[], object]:
    """Return MPI_Finalize of the library that mpi4py has loaded, as a function that lets other Python threads run."""
    try:
        return ctypes.CDLL(mpi.__file__).MPI_Finalize
    except (OSError, AttributeError):  # mpi4py was linked in another way
        return mpi.Finalize
