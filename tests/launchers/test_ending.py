"""What a process and its launcher say to each other when their connection breaks."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers import ending
from launchers.mpirun import RANK
from tests.mpirun import ROOT
from tests.speed import limit

SCRIPT = """
from launchers import ending
ending.prepare()
import time
time.sleep(60)
print("goes on", flush=True)
"""
HELLO = {
    "token": "secret",
    "rank": 1,
    "size": 2,
    "job": "a",
    "pid": 7,
    "host": "h",
    "spawned": False,
    "supervisor": 6,
}


def started(script: Path, port: int, supervised: bool) -> subprocess.Popen[str]:
    """A process whose launcher listens on a port of this process."""
    script.write_text(SCRIPT)
    command = [sys.executable, *([str(RANK)] if supervised else []), str(script)]
    environ = {**os.environ, "ADAPTIVE_LAUNCHER": f"secret 30 {socket.gethostname()} 127.0.0.1:{port}"}
    environ["OMPI_COMM_WORLD_RANK"] = "1"
    pipe = subprocess.PIPE
    environ["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)


def closed(line: socket.socket) -> None:
    line.close()


def reset(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(line.detach())


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("breaks", [closed, reset])
def test_a_rank_whose_launcher_has_gone_is_killed(breaks, supervised, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        started(tmp_path / "train.py", server.getsockname()[1], supervised) as process,
    ):
        server.settimeout(limit(60))
        line, _ = server.accept()
        with line.makefile("r") as said:
            assert json.loads(said.readline())["rank"] == 1
        breaks(line)
        out, err = process.communicate(timeout=limit(60))
    assert (process.returncode, out, err) == (-signal.SIGKILL, "", "")


@pytest.fixture
def launcher(monkeypatch):
    """The launcher's end of the connection of this process, which has just started."""
    theirs, ours = socket.socketpair()
    monkeypatch.setattr(ending, "_me", ending._Ending())
    monkeypatch.setattr(ending.atexit, "register", lambda handler: None)
    monkeypatch.setenv(ending.LAUNCHER, "secret 30 h")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    ending.attach(ours)
    theirs.settimeout(limit(20))
    yield theirs
    theirs.close()
    for thread in threading.enumerate():
        if thread.name == "adaptive-launcher":
            thread.join(limit(20))
    ours.close()


def reports(launcher: socket.socket) -> list[dict]:
    """Return all that this process has reported; its end of the connection is closed for reports."""
    assert ending._me.line is not None
    ending._me.line.shutdown(socket.SHUT_WR)
    with launcher.makefile("r") as lines:
        return [json.loads(line) for line in lines]


def test_a_process_reports_what_others_depend_on(launcher):
    with ending.making_world(of_all=True):
        ending.world_made()
    with ending.making_world(of_all=False):  # nobody waits for others
        ending.world_made()
    with pytest.raises(KeyError), ending.making_world(of_all=True):
        raise KeyError
    ending.world_ended()
    ending.joined()
    ending.checkpoint_saved(7)
    ending.ends(0)  # Python has still to end
    ending.ends(3)
    ending.all_have_heard()
    ending.ends(4)
    assert not ending.leaves()
    with pytest.raises(SystemExit) as end:
        ending.leave_job(5)
    assert ending.leaves()
    ending.ends(6)  # it has left before
    assert end.value.code == 5
    making = [{"making": True}, {"making": False}]
    failed = [{"ends": 3, "heard": False}, {"ends": 4, "heard": True}]
    worlds = [making[0], {"world": 1}, making[1], {"world": 2}, *making, {"world": 1}]
    assert reports(launcher) == [*worlds, {"joined": True}, {"saved": 7}, *failed, {"left": 5}]


def test_reports_are_lost_without_a_launcher(launcher):
    launcher.close()
    ending.checkpoint_saved(7)
    ending._me.line = None
    ending.checkpoint_saved(8)


def test_the_launchers_signals_are_delivered_until_the_connection_breaks(launcher, monkeypatch):
    killed: list[tuple[int, int]] = []
    over = threading.Event()

    def kill(pid, number):
        killed.append((pid, number))
        if number == signal.SIGKILL:
            over.set()

    monkeypatch.setattr(os, "kill", kill)
    ending._me.supervised = False
    ending.prepare()
    ending.prepare()
    assert [thread.name for thread in threading.enumerate()].count("adaptive-launcher") == 1
    launcher.sendall(b"signal 10\nunknown\nsignal 15\n")
    launcher.shutdown(socket.SHUT_WR)
    assert over.wait(limit(10))
    assert killed == [(os.getpid(), 10), (os.getpid(), 15), (os.getpid(), signal.SIGKILL)]


# --- the connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "order"), [(socket.gethostname(), ["127.0.0.1", "10.0.0.2"]), ("another", ["10.0.0.2", "127.0.0.1"])]
)
def test_a_launcher_that_cannot_be_reached_is_named(host, order, monkeypatch, capsys):
    def refuse(address, timeout):
        asked.append(address)
        raise ConnectionRefusedError

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "create_connection", refuse)
    environ = {ending.LAUNCHER: f"secret 30 {host} 10.0.0.2:70 127.0.0.1:70", "PMI_RANK": "4"}
    assert ending.connect(environ) is None
    assert capsys.readouterr().err == f"rank 4 cannot reach its launcher on {host} at 10.0.0.2:70, 127.0.0.1:70\n"
    assert asked == [(name, 70) for name in order]  # the loopback address of another host is another host's


@pytest.mark.parametrize("environ", [{}, {ending.LAUNCHER: "secret 30 h 127.0.0.1:70"}, {"PMI_RANK": "0"}])
def test_a_process_without_a_launcher_or_a_rank_connects_to_none(environ, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it connects"))
    assert ending.connect(environ) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels lack some of these options")
@pytest.mark.parametrize(("seconds", "idle", "interval", "unanswered"), [(30, 15, 5, 30_000), (0.4, 1, 1, 400)])
def test_the_kernel_closes_a_connection_without_answers(seconds, idle, interval, unanswered):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = ending.connect({ending.LAUNCHER: f"secret {seconds} h {address}", "PMIX_RANK": "0"})
        assert line is not None
        with line:
            assert line.gettimeout() is None
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = [line.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert found == [idle, interval, 3, unanswered]  # idle + 3 intervals: the whole timeout


@pytest.mark.parametrize(
    ("environ", "rank", "size", "job", "spawned"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "a"}, 3, 8, "a", False),
        ({"PMI_RANK": "3", ending.SPAWNED: "1"}, 3, 4, "", True),  # the size is unknown
        ({}, 0, 1, "", False),
    ],
)
def test_a_process_introduces_itself(environ, rank, size, job, spawned):
    found = ending.introduction({ending.LAUNCHER: "secret 30 h", **environ}, 7)
    names = {"rank": rank, "size": size, "job": job, "spawned": spawned, "pid": 7, "supervisor": 0}
    assert found == {**names, "token": "secret", "host": socket.gethostname()}


@pytest.mark.parametrize(
    ("error", "says"), [(TimeoutError("timed out"), True), (ConnectionResetError(), False), (None, False)]
)
def test_a_launcher_that_does_not_answer_is_named(error, says, monkeypatch, capsys):
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    ending.end_without_launcher(error, 7)
    assert found == [(7, signal.SIGKILL)]
    assert ("pid 7" in capsys.readouterr().err) is says


# --- the end of Python ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_mpi_is_finalized_also_where_its_c_function_is_not_found(there, tmp_path, monkeypatch):
    called = threading.Event()
    mpi = SimpleNamespace(__file__=str(tmp_path / "MPI.so"), Finalize=called.set)
    if there:  # it releases the GIL, so it is preferred
        mpi.Finalize = lambda: None
        monkeypatch.setattr(ending.ctypes, "CDLL", lambda path: SimpleNamespace(MPI_Finalize=called.set))
    ending._finalize(mpi, limit(20))
    assert called.is_set()


class Exited(Exception):
    """`os._exit` was called."""


def do_nothing() -> None:
    pass


def leave() -> None:
    with pytest.raises(SystemExit):
        ending.leave_job(5)


def fail() -> None:
    ending.ends(259)


def succeed() -> None:
    ending.ends(0)


NOT, INITIALIZED, FINALIZED = (False, False), (True, False), (True, True)


@pytest.mark.parametrize(
    ("survives", "does", "by_error", "state", "said", "ended"),
    [
        ("1", do_nothing, False, INITIALIZED, {"ends": 0}, "finalized"),
        ("TRUE", succeed, False, INITIALIZED, {"ends": 0}, 0),
        ("yes", fail, False, INITIALIZED, {"ends": 259, "heard": False}, 3),
        ("yes", leave, False, INITIALIZED, {"left": 5}, 5),
        ("1", do_nothing, True, INITIALIZED, None, None),
        ("1", ending.all_have_heard, True, INITIALIZED, None, "finalized"),
        ("0", ending.all_have_heard, True, INITIALIZED, None, None),
        ("0", fail, False, INITIALIZED, {"ends": 259, "heard": False}, "finalized"),
        ("", succeed, False, INITIALIZED, {"ends": 0}, None),
        ("1", fail, False, NOT, {"ends": 259, "heard": False}, None),
        ("1", fail, False, FINALIZED, {"ends": 259, "heard": False}, None),
        ("1", do_nothing, False, FINALIZED, {"ends": 0}, None),
        ("1", fail, False, None, {"ends": 259, "heard": False}, None),
    ],
)  # fmt: skip
def test_what_is_reported_and_finalized_when_python_ends(
    survives, does, by_error, state, said, ended, launcher, monkeypatch, tmp_path
):
    """MPI is not loaded if its state is None."""

    def leave_python(code: int):
        found.append(code)
        raise Exited

    found: list[object] = []
    handlers: list[Callable[[], object]] = []
    monkeypatch.setattr(ending.atexit, "register", handlers.append)
    monkeypatch.setattr(os, "_exit", leave_python)
    monkeypatch.setattr(sys, "last_value", ValueError() if by_error else None, raising=False)
    monkeypatch.setenv(ending.SURVIVES, survives)
    mpi = (
        None if state is None else SimpleNamespace(__file__="/none/MPI.so", Finalize=lambda: found.append("finalized"))
    )
    if mpi is not None:
        mpi.Is_initialized, mpi.Is_finalized = lambda: state[0], lambda: state[1]
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    ending.prepare()
    does()
    with (tmp_path / "log").open("w") as log:
        log.write("the last step")
        try:
            handlers[0]()
        except Exited:
            assert (tmp_path / "log").read_text() == "the last step"
    assert found == ([] if ended is None else [ended])
    assert reports(launcher) == ([] if said is None else [said])


USES_MPI = """
import sys, types
from launchers import ending
mpi = types.ModuleType("mpi4py.MPI")  # a stand-in, to which no C library belongs
mpi.__file__ = "/none/MPI.so"
mpi.Is_initialized, mpi.Is_finalized = lambda: True, lambda: False
mpi.Finalize = lambda: print("finalized")
sys.modules["mpi4py.MPI"] = mpi
ending.prepare()
"""


@pytest.mark.parametrize(
    ("survives", "script", "code", "output"),
    [
        ("1", "", 0, "finalized"),
        ("1", "ending.ends(3); raise SystemExit(3)", 3, ""),  # finalizing would wait for the others
        ("1", "ending.leave_job()", 0, ""),
        ("1", "ending.all_have_heard(); 1 / 0", 1, "finalized"),
        ("0", "ending.ends(3); raise SystemExit(3)", 3, "finalized"),
        ("0", "", 0, ""),  # mpi4py does
        ("1", "1 / 0", 1, ""),  # mpi4py aborts
    ],
)
def test_a_process_finalizes_mpi_at_its_end_unless_the_others_continue(survives, script, code, output):
    environ = {**os.environ, ending.SURVIVES: survives, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", USES_MPI + script], env=environ, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (code, output), ran.stderr
