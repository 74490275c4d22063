"""What ranks find out about each other, in processes that this test starts or makes up; jobs: tests/mpi."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.thread_status import thread_status, thread_status_of
from collectives.worlds.transport.operations import BARRIER, Operation
from collectives.worlds.watchdog import stacks
from collectives.worlds.watchdog.findings import RankFinding, RankState, rank_names, report
from collectives.worlds.watchdog.probe import Probe
from collectives.worlds.watchdog.settings import (
    check_hang_timeout,
    introduce,
    random_number,
    start_watchdog,
    with_one_key,
)
from collectives.worlds.watchdog.udp import UDPSocket
from tests.speed import limit

COVERS = (
    "collectives/worlds/watchdog/findings.py",
    "collectives/worlds/watchdog/settings.py",
    "collectives/worlds/watchdog/udp.py",
)


@pytest.mark.parametrize("hang_timeout", [-1, -1e-9, math.nan, math.inf, "60", True, [60], 1j])
def test_bad_patience(hang_timeout):
    with pytest.raises(ad.CollectiveError, match=r"hang_timeout=.*must be the seconds") as caught:
        comm.world(hang_timeout=hang_timeout)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("hang_timeout", [0, 60, 0.5, np.float32(2), jnp.int32(3)])
def test_good_patience(hang_timeout):
    assert check_hang_timeout(hang_timeout) == float(hang_timeout)
    with comm.world(devices=jax.local_devices()[:1], hang_timeout=hang_timeout) as world:
        assert isinstance(world, comm.SoloWorld)


def test_by_default_there_is_no_timeout():
    assert check_hang_timeout(None) is None


# --- phases -----------------------------------------------------------------------------------------------------------


def test_descriptions_of_a_threads_activity():
    @thread_status("in the outer")
    def outer():
        return inner()

    @thread_status("in the inner")
    def inner():
        return thread_status_of(sys._getframe())

    found = outer()
    assert found.words == ("in the inner", "in the outer")
    assert str(found) == "in the inner, in the outer"
    assert re.fullmatch(r"test_watchdog.py:\d+", found.line)
    assert not found.compiles
    assert not found.exchanges


def test_the_script_itself_is_doing_nothing_of_ours():
    assert str(thread_status_of(sys._getframe())) == "in the script's own code, between steps"


def seen_while(work):
    """All that a thread is seen doing while it works."""
    thread = threading.Thread(target=work)
    thread.start()
    seen = set()
    while thread.is_alive():
        if frame := sys._current_frames().get(thread.ident):
            seen.add(thread_status_of(frame))
    return seen


@pytest.mark.parametrize("how", ["jax.jit", "a program"])
def test_compiling_is_seen(how):
    """What a user compiles, too."""

    def loss(s, b):
        for i in range(30):  # large enough to take a while, and new to any cache
            s = jnp.sin(s + i * salt) * jnp.cos(b["x"].sum() - s)
        return s

    def driver(state, batch):
        loss_, grad = comm.all_reduce(jax.value_and_grad(loss)(state, batch))
        return state - grad, {"loss": loss_}

    salt, data = time.time(), {"x": np.arange(8, dtype=np.float32)}
    work = {
        "jax.jit": lambda: jax.jit(loss)(1.0, data),
        "a program": lambda: ad.Program(driver, 0.0, data, global_batch=8, world=comm.SoloWorld()).step(),
    }[how]
    assert any(found.compiles and "compiling" in found.words for found in seen_while(work))


# --- other processes --------------------------------------------------------------------------------------------------

ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
ATTACH, DETACH = 16, 17

CHILD = """
import re, sys
from collectives.worlds.watchdog.stacks import this_process
print(*this_process(), sep="\\n", flush=True)
def held():
    re.match(r"(a+)+$", "a" * 200 + "b")
held()
"""


@pytest.fixture
def held():
    """A process whose Python cannot run, as others know it."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        host, pid, created, space, file = (child.stdout.readline().strip() for _ in range(5))
        yield stacks.ProcessId(host, int(pid), float(created), space, int(file))
        child.kill()


def test_a_process_that_cannot_run_python_writes_its_stack(held):
    state, stack = stacks.look_at(held)
    while state == stacks.RUNS and "in match" not in stack:  # it is not there yet
        state, stack = stacks.look_at(held)
    assert re.search(r"in match\n +File \"<string>\", line 6 in held", stack), stack
    assert stacks.look_at(held)[1] == stack  # and again, not what it wrote before


def test_a_process_that_is_stopped(held):
    os.kill(held.pid, signal.SIGSTOP)
    os.waitpid(held.pid, os.WUNTRACED)
    assert stacks.look_at(held) == (stacks.STOPPED, "")


def test_a_process_that_a_debugger_holds(held):
    assert ptrace(ATTACH, held.pid, None, None) == 0
    os.waitpid(held.pid, os.WUNTRACED)
    assert stacks.look_at(held) == (stacks.TRACED, "")
    assert ptrace(DETACH, held.pid, None, None) == 0


def test_a_process_is_killed_only_if_it_is_that_process(held):
    other = held._replace(created=held.created - 100)
    assert stacks.look_at(other) == (stacks.GONE, "")
    assert stacks.kill(other)
    assert psutil.pid_exists(held.pid)
    assert psutil.Process(held.pid).status() != psutil.STATUS_ZOMBIE
    in_a_container = held._replace(space="pid:[1]")
    assert stacks.look_at(in_a_container) == (stacks.UNKNOWN, "")
    assert not stacks.kill(in_a_container)
    assert stacks.kill(held)
    assert os.waitpid(held.pid, 0)[1] == signal.SIGKILL
    assert stacks.look_at(held) == (stacks.GONE, "")
    assert stacks.kill(held)


def test_long_stacks_lose_their_middle():
    text = "\n".join(map(str, range(10_000)))
    short = stacks.shortened(text, 100)
    assert len(short) < 120
    assert short.startswith("0\n1\n")
    assert short.endswith("\n9999")
    assert stacks.shortened("short") == "short"


# --- datagrams --------------------------------------------------------------------------------------------------------


def test_strangers_are_ignored():
    ours, theirs = UDPSocket(), UDPSocket()
    ours.join(b"k" * 32, 0)
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for garbage in (b"", b"{}", b"x" * 100, bytes(60_000)):
        stranger.sendto(garbage, ours.addresses[0])
        assert ours.receive(5.0) is None
    theirs.join(b"K" * 32, 1)
    theirs.send(0, ours.addresses[:1], kind="stop")  # of another job
    assert ours.receive(5.0) is None
    theirs.join(b"k" * 32, 1)
    theirs.send(2, ours.addresses[:1], kind="stop")  # for a rank that has this address on another network
    assert ours.receive(5.0) is None
    theirs.send(0, ours.addresses[:1], kind="hello", x="…")
    assert ours.receive(5.0) == {"kind": "hello", "x": "…", "to": 0, "from": 1}
    for end in (ours, theirs, stranger):
        end.close()


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass
class FakeWorld:
    """What a watch reads of a world."""

    operation: Operation = field(default_factory=lambda: Operation("a barrier", "", BARRIER))
    begun: int = 0
    inside: bool = False
    survives: bool = False
    ends: list[float] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)

    __hash__ = object.__hash__


@contextmanager
def two(*, groups=(0, 0), hang_timeout=60.0):
    """Two ranks of this process: what they know each other by, and their sockets."""
    introduced = [introduce(number, group, hang_timeout) for number, group in enumerate(groups)]
    peers = [peer for peer, _ in introduced]
    yield peers, [datagrams for _, datagrams in introduced]
    for _, datagrams in introduced:
        datagrams.close()


def find(asking):
    """What one rank finds out about the other, which does not answer."""
    return asking.find(0.3, lambda message: None)[1].state


def test_a_host_that_could_never_be_reached_is_not_accused():
    with two(groups=(0, 1)) as (peers, sockets):
        asking, other = Probe(peers, 0, sockets[0]), Probe(peers, 1, sockets[1])
        assert find(asking) is RankState.UNKNOWN
        other.send([0], "hello")
        asking.serve(limit(5.0), lambda message: None, lambda: 1 in asking._reached)
        assert find(asking) is RankState.CUT_OFF
        other.send([0], "bye", why="over")
        asking.serve(limit(5.0), lambda message: None, lambda: 1 in asking.left)
        assert find(asking) is RankState.ENDED


def test_ranks_are_renumbered_after_a_loss():
    with two() as (peers, sockets):
        asking = Probe(peers, 1, sockets[1])
        assert [asking.rank(0), asking.rank(1)] == [0, 1]
        asking.keep(peers[1:])
        assert asking.rank(1) == 0
        assert asking.others == []
        assert asking.find(0.1, lambda message: None) == {}


@contextmanager
def serving(asking, heard=lambda message: None):
    """A thread that answers for a rank."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: asking.serve(60.0, heard, over.is_set))
    thread.start()
    try:
        yield
    finally:
        over.set()
        asking.ring()
        thread.join()


def test_a_rank_learns_that_it_was_excluded_before_it_calls_others_lost():
    """A stopped process resumes after the others have ended, and still gets their last datagrams."""
    with two() as (peers, sockets):
        awake, other = Probe(peers, 1, sockets[1]), Probe(peers, 0, sockets[0])
        for question in range(20):
            other.send([1], "ask", question=question)
        other.send([1], "stop", because_of=[1])
        other.send([1], "bye", why="over")
        awake.keep(peers[1:])  # its own thread is faster, and has taken the other one for dead
        heard = []
        with serving(awake, heard.append):
            assert awake.catch_up(30.0)
        assert [message["kind"] for message in heard] == ["stop"]
        assert awake.left == {}


def test_an_unresponsive_thread_is_not_waited_for():
    with two() as (peers, sockets):
        assert not Probe(peers, 1, sockets[1]).catch_up(0.01)


def test_any_rank_of_a_host_is_killed_by_another_one(held, monkeypatch):
    """The first one, by whose number the host is known, like the others; and one that is alone there by itself."""
    killed = []
    monkeypatch.setattr(stacks, "kill", lambda process: killed.append(process) or True)
    with two(groups=(0, 0, 2)) as (peers, sockets):
        peers[0] = peers[0]._replace(process=held)
        asks, helps = Probe(peers, 2, sockets[2]), Probe(peers, 1, sockets[1])
        with serving(helps):
            assert asks.request(1, "kill", 0, lambda message: None) is True
        helps.send([2], "hello")
        with serving(asks):
            assert helps.request(2, "kill", 2, lambda message: None) is True
            assert helps.request(2, "kill", 0, lambda message: None) is None  # of another host
    assert killed == [held, peers[2].process]


def test_patience_must_be_the_same_on_all_ranks():
    with two() as (peers, sockets):
        others = [peers[0]._replace(hang_timeout=None), peers[1]._replace(hang_timeout=5.0)]
        with pytest.raises(ad.DisagreementError, match=r"rank 0: the default, rank 1: 5$"):
            start_watchdog(FakeWorld(), others, 0, sockets[0], lambda status: None)
        with pytest.raises(ad.DisagreementError, match=r"rank 1: 5, rank 1: 5, …$"):
            start_watchdog(FakeWorld(), [*others, *others[1:] * 7], 0, None, lambda status: None)


def test_numbers_and_keys_of_spawned_processes():
    numbers = {random_number() for _ in range(9)}
    assert len(numbers) == 9
    assert all(1 << 30 <= number < 1 << 31 for number in numbers)
    with two() as (peers, _):
        none = peers[0]._replace(key=b"")
        keyed = with_one_key({"a": none, "b": peers[1], "c": peers[0]})
        assert [peer.key for peer in keyed.values()] == [peers[1].key] * 3
        assert list(keyed) == ["a", "b", "c"]
        assert with_one_key({"a": none}) == {"a": none}
        assert (peers[0].number, peers[1].number, peers[1].hang_timeout) == (0, 1, 60.0)


def test_without_other_processes_there_is_no_thread():
    peer, datagrams = introduce(0, 0, 60.0)
    assert start_watchdog(FakeWorld(), [peer], 0, datagrams, lambda status: None) is None
    peer, datagrams = introduce(0, 0, 0.0)
    assert datagrams is None
    assert start_watchdog(FakeWorld(), [peer, peer], 0, datagrams, lambda status: None) is None


def test_a_world_that_is_let_go_of_takes_its_watch_along():
    with two() as (peers, sockets):
        world = FakeWorld()
        watching = start_watchdog(world, peers, 0, sockets[0], lambda status: None)
        other = Probe(peers, 1, sockets[1])
        del world
        other.serve(limit(5.0), lambda message: None, lambda: 0 in other.left)
        assert "has dropped its world" in other.left[0]
        watching._thread.join(limit(5.0))
        assert not watching._thread.is_alive()


def test_a_rank_must_be_found_stopped_for_as_long_as_the_limit_before_it_is_killed():
    with two(hang_timeout=None) as (peers, sockets):
        world = FakeWorld(survives=True, ends=list(np.arange(100) * 0.01))
        watching = start_watchdog(world, peers, 0, sockets[0], lambda status: None)
        stopped = RankFinding(1, peers[1].process, RankState.STOPPED)
        busy = RankFinding(1, peers[1].process, RankState.AWAY, doing="in evaluate")

        def times_of_limit(waited, finding):
            watching._waited, watching._shortest = waited, watching._limits.shortest()
            return watching._times_of_limit(1, finding)

        assert times_of_limit(1.0, stopped) == 1 / 60  # it may have been stopped just now
        assert times_of_limit(2.0, stopped) == 1.0
        assert times_of_limit(2.8, stopped) == 1.0
        assert times_of_limit(4.0, stopped) == 2.0
        assert times_of_limit(30.0, busy) == 0.5
        assert times_of_limit(30.5, stopped) == 30.5 / 60
        world.survives = False
        assert times_of_limit(40.0, stopped) == 1.0  # the job would end
        assert times_of_limit(120.0, stopped) == 2.0
        watching.close()


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_of_very_many_ranks_is_short():
    process = stacks.ProcessId("node", 1, 0.0, "", -1)
    findings = [
        RankFinding(rank, process, RankState.AWAY, "in evaluate", "a.py:1", 61.2, "x" * 6000) for rank in range(1, 1000)
    ]
    findings += [RankFinding(1000, process, RankState.HERE)]
    text = report(0, "a barrier", "b.py:2", 60.0, findings, "So.")
    assert len(text) < 50_000
    assert text.startswith(
        "rank 0 has waited for 60 s in a barrier (b.py:2):\n    rank 1 (node, pid 1) is in evaluate (a.py:1)"
    )
    assert text.endswith("\n    and 991 more ranks are not in it\nSo.")
    assert "rank 1000" not in text
    few = [replace(finding, stack="") for finding in findings[:9] + findings[-1:]]
    assert "\n    and 1 more ranks are not in it\n" in report(0, "a barrier", "", 10.0, few, "")
    assert report(0, "a barrier", "", 9.94, few, "").startswith("rank 0 has waited for 9.9 s in a barrier:")
    assert "more" not in report(0, "a barrier", "", 1.0, few[1:], "")


@pytest.mark.parametrize(("state", "fields", "says"), [
    ("AWAY", {"seconds": 3.25}, "is in evaluate (a.py:1); it has been in no collective for 3.2 s."),
    ("COMPILES", {}, "is in evaluate (a.py:1). Compiling is not limited."),
    ("CROSSED", {"seconds": 61.0}, "a collective of another world (a.py:1); it has been in no collective for 61 s."),
    ("SILENT", {}, "runs, but its Python does not answer: C code holds the GIL, or Python has ended."),
    ("SILENT", {"stack": "a\nb"}, "its Python does not answer: C code holds the GIL.\n        a\n        b"),
    ("STOPPED", {}, "is stopped (SIGSTOP or Ctrl-Z); `kill -CONT 1` there resumes it."),
    ("TRACED", {}, "is held by a debugger."),
    ("GONE", {}, "no longer exists."),
    ("ENDED", {}, "has ended: in evaluate."),
    ("CUT_OFF", {}, "does not answer, nor does any other rank of its host: the rank, the host or the network hangs."),
    ("UNKNOWN", {}, "cannot be asked: UDP does not reach node from here. It does not count as stuck."),
])  # fmt: skip
def test_what_a_report_says_of_a_rank(state, fields, says):
    process = stacks.ProcessId("node", 1, 0.0, "", -1)
    text = str(RankFinding(3, process, RankState[state], "in evaluate", "a.py:1", **fields))
    assert text.startswith("    rank 3 (node, pid 1) ")
    assert text.endswith(says)


def test_names_of_ranks():
    assert (rank_names([2]), rank_names({3, 1})) == ("rank 2", "ranks 1, 3")
