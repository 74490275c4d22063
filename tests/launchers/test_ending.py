"""What a process and its launcher say to each other when their connection breaks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from launchers import ending
from tests.speed import limit


@pytest.fixture
def launcher(monkeypatch):
    """The supervisor's end of the connection of this process, which has just started."""
    theirs, ours = socket.socketpair()
    monkeypatch.setattr(ending, "_me", ending._Ending())
    monkeypatch.setattr(ending.atexit, "register", lambda handler: None)
    monkeypatch.setenv(ending.SUPERVISOR, f"{ours.fileno()} {os.fstat(ours.fileno()).st_ino}")
    theirs.settimeout(limit(20))
    ours.detach()
    ending.prepare()
    with theirs, ending._me.line:
        yield theirs


def reports(launcher: socket.socket) -> list[dict]:
    """Return all that this process has reported; its end of the connection is closed for reports."""
    assert ending._me.line is not None
    ending._me.line.shutdown(socket.SHUT_WR)
    with launcher.makefile("r") as lines:
        pid, *rest = [json.loads(line) for line in lines]
    assert pid == {"pid": os.getpid()}
    return rest


def test_a_process_reports_what_others_depend_on(launcher):
    with ending.making_world(of_all=True):
        ending.world_made()
    with ending.making_world(of_all=False):  # nobody waits for others
        ending.world_made()
    with pytest.raises(KeyError), ending.making_world(of_all=True):
        raise KeyError
    ending.world_ended()
    assert ending.report(joined=True, saved=7)
    ending.ends(0)  # Python has still to end
    ending.ends(3)
    ending.all_have_heard()
    ending.ends(4)
    assert not ending.leaves()
    with pytest.raises(SystemExit) as end:
        ending.leave_job()
    assert ending.leaves()
    ending.ends(6)  # it has left before
    assert end.value.code == 0
    making = [{"making": True}, {"making": False}]
    failed = [{"ends": 3, "heard": False}, {"ends": 4, "heard": True}]
    worlds = [making[0], {"worlds": 1}, making[1], {"worlds": 2}, *making, {"worlds": 1}]
    assert reports(launcher) == [*worlds, {"joined": True, "saved": 7}, *failed, {"left": True}]


def test_reports_are_lost_without_a_launcher(launcher):
    launcher.close()
    assert not ending.report(saved=7)


@pytest.mark.parametrize("there", [False, True])
def test_another_socket_with_the_number_is_not_written_to(there, monkeypatch):
    """A process between has closed the supervisor's."""
    monkeypatch.setattr(ending, "_me", ending._Ending())
    monkeypatch.setattr(ending.atexit, "register", lambda handler: None)
    one, other = socket.socketpair()
    with one, other:
        monkeypatch.setenv(ending.SUPERVISOR, f"{one.fileno() if there else 1 << 20} 1")
        ending.prepare()
        assert not ending.report(saved=7)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels lack some of these options")
@pytest.mark.parametrize(("seconds", "idle", "interval", "unanswered"), [(30, 15, 5, 30_000), (0.4, 1, 1, 400)])
def test_the_kernel_closes_a_connection_without_answers(seconds, idle, interval, unanswered):
    with socket.socket() as line:
        ending.give_up_after(line, seconds)
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        found = [line.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert found == [idle, interval, 3, unanswered]  # idle + 3 intervals: the whole timeout


def test_a_hosts_loopback_address_comes_last(monkeypatch):
    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(address=text, family=family)

    found = {"lo": [address("127.0.0.1")], "eth0": [address("10.0.0.2"), address("::1", socket.AF_INET6)]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert ending.addresses() == ["10.0.0.2", "127.0.0.1"]


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
        ending.leave_job()


fail, succeed = partial(ending.ends, 259), partial(ending.ends, 0)
NOT, INITIALIZED, FINALIZED = (False, False), (True, False), (True, True)


@pytest.mark.parametrize(
    ("survives", "does", "by_error", "state", "said", "ended"),
    [
        ("1", do_nothing, False, INITIALIZED, {"ends": 0}, "finalized"),
        ("TRUE", succeed, False, INITIALIZED, {"ends": 0}, 0),
        ("yes", fail, False, INITIALIZED, {"ends": 259, "heard": False}, 3),
        ("yes", leave, False, INITIALIZED, {"left": True}, 0),
        ("1", do_nothing, True, INITIALIZED, None, None),
        ("1", ending.all_have_heard, True, INITIALIZED, None, "finalized"),
        ("0", fail, False, INITIALIZED, {"ends": 259, "heard": False}, "finalized"),
        ("", succeed, False, INITIALIZED, {"ends": 0}, None),
        ("1", fail, False, NOT, {"ends": 259, "heard": False}, None),
        ("1", fail, False, FINALIZED, {"ends": 259, "heard": False}, None),
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
    monkeypatch.setattr(os, "_exit", leave_python)
    monkeypatch.setattr(sys, "last_value", ValueError() if by_error else None, raising=False)
    monkeypatch.setenv(ending.SURVIVES, survives)
    mpi = (
        None if state is None else SimpleNamespace(__file__="/none/MPI.so", Finalize=lambda: found.append("finalized"))
    )
    if mpi is not None:
        mpi.Is_initialized, mpi.Is_finalized = lambda: state[0], lambda: state[1]
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    does()
    gone = weakref.proxy(lambda: None)  # is an object of Python's, too
    with (tmp_path / "log").open("w") as log:
        log.write("the last step")
        try:
            ending._end()
        except Exited:
            assert (tmp_path / "log").read_text() == "the last step"
    del gone
    assert found == ([] if ended is None else [ended])
    assert reports(launcher) == ([] if said is None else [said])
