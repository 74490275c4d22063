"""The end of a job's process: reports the exit code to the launcher, and does not wait in MPI for lost processes.

A process sends lines of JSON to its supervisor (`supervisor.py`), by a socket that it inherits. The supervisor passes
them on to `adaptive run`, whose address is in an environment variable. Lines have these fields:

    token    first line: the job's secret, with the identity of the process; from the supervisor
    pid      the process that reports from now on, if it is another one, which a command has started
    making   whether the process is making a world of all processes, and so waits for all of them
    worlds   number of worlds that the process is in; training continues if it dies inside one
    joined   a spawned process has become a member of the job
    saved    step of a checkpoint that is on the disk
    ends     exit code, sent as soon as it is known, at the latest when Python ends
    heard    with `ends`: whether all processes raise the error by which it ends
    error    the traceback or text by which it ends, to be printed in one piece
    left     the process leaves for good while the others continue (`leave_job`), or ends because all others are lost
    exited   exit status, from the supervisor
    killed   signal that ended the process, from the supervisor
    waits    the process waits for others, from the supervisor (`watch.py`)
    look     number of a request to look at the process, and what was seen, from the supervisor

MPI_Finalize can wait forever for processes that were lost or have left. In a job that survives losses, a process whose
exit code is known skips it, which mpirun accepts: Python's exit handlers run, files are flushed, and the process exits.
Otherwise (plain `python train.py`) MPI_Finalize runs in a thread with a deadline, and mpi4py's own call of it at exit
is turned off (`collectives/worlds/mpi.py`).

The launcher's `rank.py` loads this file before anything else, so it imports only the standard library.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

LAUNCHER = "ADAPTIVE_LAUNCHER"  # TOKEN SECONDS HOST ADDRESS:PORT ADDRESS:PORT …
SUPERVISOR = "ADAPTIVE_SUPERVISOR"  # descriptor of the socket to the supervisor, and the socket's inode
SPAWNED = "ADAPTIVE_SPAWNED"  # in the environment of processes that others of the job have spawned
SURVIVES = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
FINALIZE_SECONDS = 2.0  # wait for MPI_Finalize at the end of a job that survives losses
HURRY_SECONDS = 0.2  # the same if others continue or this process has failed: MPI_Finalize only has to begin
LONGEST_LINE = 1 << 20  # bytes, from a process to the launcher
_LONGEST_ERROR = 100_000  # characters, each at most 6 bytes in JSON


@dataclass
class _Ending:
    """The state of this process's end."""

    code: int | None = None  # its exit code; None: unknown
    leaves: bool = False  # it leaves for good while others continue
    heard: bool = False  # it ends by an error that all processes raise
    worlds: int = 0  # number of open worlds
    line: socket.socket | None = None  # to the supervisor
    prepared: bool = False
    said: threading.Lock = field(default_factory=threading.Lock)
    pid: int = field(default_factory=os.getpid)  # of the process of the job; its forked children report nothing


_me = _Ending()


def prepare() -> None:
    """Find the supervisor if there is one, and register the exit handler. Idempotent."""
    if _me.prepared:
        return
    _me.prepared, _me.pid = True, os.getpid()
    atexit.register(_end)
    file, _, inode = os.environ.get(SUPERVISOR, "").partition(" ")
    with suppress(OSError, ValueError):  # a process between has closed it, and another file may have its number
        if os.fstat(int(file)).st_ino == int(inode):
            _me.line = socket.socket(fileno=int(file))
            report(pid=os.getpid())


@contextmanager
def making_world(of_all: bool) -> Iterator[None]:
    """Report to the launcher, as a context manager, that this process is making a world, for which it waits for all
    others if the world is `of_all` processes of the job.
    """
    prepare()
    if of_all:
        report(making=True)
    try:
        yield
    finally:
        if of_all:
            report(making=False)


def world_made() -> None:
    """Report that training continues from now on if this process dies."""
    _me.worlds += 1
    report(worlds=_me.worlds)


def world_ended() -> None:
    """Report that a world has ended on all processes."""
    _me.worlds -= 1
    report(worlds=_me.worlds)


def all_have_heard() -> None:
    """Record that this process is about to end by an error that all processes raise, so that it aborts none of them."""
    _me.heard = True


def leaves() -> bool:
    """Return whether this process is leaving the job for good (`leave_job`)."""
    return _me.leaves


def ends(code: int) -> None:
    """Record the exit code with which this process is about to end; report it now, since others may wait for this
    process, unless it is 0, which is reported when Python ends.
    """
    if not _me.leaves:
        _me.code = code
        if code:
            report(ends=code, heard=_me.heard)


def show_error(text: str) -> None:
    """Print the error by which this process ends, in one piece: the launcher does, if there is one."""
    sys.stdout.flush()
    if not report(error=text[-_LONGEST_ERROR:]):
        sys.stderr.write(text)
        sys.stderr.flush()


def leave_job() -> NoReturn:
    """End this process for good, with exit code 0, while the others continue. For jobs that survive losses.

    The others have removed this process before, or treat it as lost. MPI is not finalized, because they would not
    notice the end of a process that finalizes.

    Raises:
      SystemExit: always, so that `with` blocks and `finally` clauses run.
    """
    _me.leaves, _me.code = True, 0
    prepare()
    report(left=True)
    raise SystemExit(0)


def report(**what: Any) -> bool:
    """Send a report with these fields to the launcher. Returns whether it was sent: it may be gone, or not ours."""
    if os.getpid() == _me.pid:
        with suppress(OSError), _me.said:
            if _me.line is not None:
                _me.line.sendall(json.dumps(what).encode() + b"\n")
                return True
    return False


def addresses() -> list[str]:
    """Return this host's IPv4 addresses; the loopback address last, because it leads elsewhere on other hosts."""
    import psutil  # not in every rank

    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def give_up_after(line: socket.socket, seconds: float) -> None:
    """Let the kernel close a connection whose other side has not answered for `seconds`. Idle ones are probed."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": seconds / 2, "TCP_KEEPINTVL": seconds / 6, "TCP_KEEPCNT": 3}
    for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * seconds}.items():
        if hasattr(socket, name):  # Linux has all of them
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, round(value)))


def _end() -> None:
    """Report the exit code and finalize MPI when Python exits; under `adaptive run` this handler runs last."""
    if os.getpid() != _me.pid:
        if _me.code is not None:  # a forked child, in which JAX's and MPI's exit handlers hang or crash
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_me.code & 0xFF)
        return
    survives = os.environ.get(SURVIVES, "").lower() in ("1", "true", "yes")
    by_error = getattr(sys, "last_value", None) is not None  # the interpreter sets it when it prints an error
    if not _me.code and not _me.leaves and not by_error:
        report(ends=0)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if survives and _me.code is not None:
        for thing in gc.get_objects():  # os._exit flushes no files
            if issubclass(type(thing), io.IOBase):  # isinstance asks a proxy, whose object may have gone
                with suppress(Exception):
                    thing.flush()
        os._exit(_me.code & 0xFF)
    if _me.code or (survives and _me.heard):
        _finalize(mpi, HURRY_SECONDS)  # the others may not finalize, and must not be aborted
    elif survives and not by_error:
        _finalize(mpi, FINALIZE_SECONDS)
    # otherwise mpi4py's own exit handler finalizes MPI, or aborts


def _finalize(mpi: Any, seconds: float) -> None:
    """Finalize MPI, but wait at most `seconds` for it, and let the process exit in any case.

    `MPI.Finalize` of mpi4py holds the GIL, so no other Python thread could measure the time. The C function, called by
    ctypes, does not.
    """
    try:
        finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    except (OSError, AttributeError):  # mpi4py was linked in another way
        finalize = mpi.Finalize
    thread = threading.Thread(target=finalize, name="adaptive-finalize", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() and sys.platform == "linux":  # skip C's exit handlers, which would race with the thread
        c = ctypes.CDLL(None)
        if hasattr(c, "on_exit"):
            c.on_exit(c._exit, None)
            c.__cxa_atexit(c.fflush, None, None)
