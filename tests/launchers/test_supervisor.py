"""The parent of a rank's process: what it reports, passes on, and how it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys

import psutil
import pytest

from launchers import ending, supervisor
from launchers.mpirun import RANK
from tests.mpirun import ROOT
from tests.speed import limit


class Rank:
    """A rank without MPI, and its launcher's end of the connection."""

    def __init__(self, folder, code: str, *command: str):
        script = folder / "train.py"
        script.write_text(code)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(limit(100))
            address = f"127.0.0.1:{server.getsockname()[1]}"
            environ = {"ADAPTIVE_LAUNCHER": f"secret 30 {socket.gethostname()} {address}"}
            place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "job"}
            self.process = subprocess.Popen(
                [sys.executable, str(RANK), *(["--", *command] if command else [str(script)])],
                env={**os.environ, **environ, **place, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self.line = server.accept()[0]
        self.line.settimeout(limit(100))
        self._lines = self.line.makefile("r")
        self.who = self.heard()

    def heard(self) -> dict:
        """Return the next report that says more than what the supervisor has seen."""
        return next(line for line in map(json.loads, self._lines) if "look" not in line and set(line) != {"pid"})

    def said(self) -> str:
        """Return the rank's next line; "" if none comes in time."""
        line = b""
        while not line.endswith(b"\n") and select.select([self.process.stdout], [], [], limit(100))[0]:
            byte = os.read(self.process.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
        return line.decode().rstrip()

    def end(self) -> tuple[list[dict], int]:
        """Return the remaining output, and the exit status."""
        rest = [line for line in map(json.loads, self._lines) if "look" not in line and set(line) != {"pid"}]
        return rest, self.process.wait(limit(100))


@pytest.fixture
def start(tmp_path):
    """Starts a rank; nothing of it survives the test."""
    ranks: list[Rank] = []

    def begin(code: str, *command: str) -> Rank:
        ranks.append(Rank(tmp_path, code, *command))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.line.close()
        rank.process.kill()
        rank.process.communicate()


WAITS = "print('there', flush=True)\nimport signal\nsignal.pause()"
HOLDS_THE_LOCK = "print('there', flush=True)\nimport ctypes\nctypes.PyDLL(None).pause()"


@pytest.mark.parametrize(
    ("code", "reports", "status"),
    [
        ("raise SystemExit(3)", [{"ends": 3, "heard": False}, {"exited": 3}], 3),
        ("import ctypes; ctypes.CDLL(None).exit(4)", [{"exited": 4}], 4),  # C code, which says nothing to Python
        ("import os, signal; signal.signal(11, signal.SIG_DFL); os.kill(os.getpid(), 11)", [{"killed": 11}], -11),
        ("import os, launchers.ending as e; e.world_made(); os._exit(0)", [{"worlds": 1}, {"exited": 0}], 0),
    ],
)  # fmt: skip
def test_it_reports_how_the_rank_has_ended_and_ends_alike(code, reports, status, start):
    assert start(code).end() == (reports, status)


def test_signals_of_the_launcher_reach_a_busy_rank(start):
    rank = start(HOLDS_THE_LOCK)
    assert rank.said() == "there"
    rank.line.sendall(b"signal 15\n")
    assert rank.end() == ([{"killed": 15}], -15)


def test_its_own_signals_are_the_ranks(start):
    # The handler ends the rank: it may be called before the rank begins to wait, which would then never end.
    hears = "import os, signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b'heard\\n'), sys.exit()))\n"
    rank = start(hears + WAITS)
    assert rank.said() == "there"
    rank.process.send_signal(signal.SIGUSR1)
    assert rank.said() == "heard"
    assert rank.end() == ([{"ends": 0}, {"exited": 0}], 0)


def test_a_signal_to_a_command_reaches_the_processes_that_it_has_started(start):
    """The shell waits for another process, and ends as it does."""
    rank = start("", "sh", "-c", "trap : TERM; sh -c 'echo there; exec sleep 1000' & wait $!; wait $!; exit $?")
    assert rank.said() == "there"
    rank.line.sendall(b"signal 15\n")
    assert rank.end() == ([{"killed": 15}], -15)


@pytest.mark.parametrize(("code", "report", "status"), [(137, {"killed": 9}, -9), (255, {"exited": 255}, 255)])
def test_a_shell_whose_program_was_killed_counts_as_killed(code, report, status, start):
    assert start("", "sh", "-c", f"exit {code}").end() == ([report], status)


def test_lines_that_arrive_in_pieces_are_put_together(start):
    """It reports nothing in the middle of a line of the rank."""
    rank = start(
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "socket = int(os.environ['ADAPTIVE_SUPERVISOR'].split()[0])\n"
        "os.write(socket, b'{\"sav')\nprint('half', flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\nos.write(socket, b'ed\": 7}\\n')"
    )
    assert rank.said() == "half"
    rank.line.sendall(b"look 5 0\nsign")
    lines = (json.loads(line) for line in rank._lines)
    assert next(line for line in lines if set(line) != {"pid"})["look"] == 5  # so the first piece has been read
    rank.line.sendall(b"al 10\n")
    assert rank.heard() == {"saved": 7}


SHOWS = """
import os, time
from launchers.activity import ActivityRecord
record = ActivityRecord.inherited()
record.pid, record.stacks = os.getpid(), -1
world = record.new_activity()
world.watch(7, survives=True, hang_timeout=None)
world.begin("message 1", time.perf_counter())
print("there", flush=True)
"""


def test_it_says_that_the_rank_waits_and_what_it_sees(start):
    """Also in a stopped rank, which it can kill."""
    rank = start(SHOWS + "import signal; signal.pause()")
    assert rank.said() == "there"
    assert rank.heard() == {"waits": True}
    os.kill(rank.who["pid"], signal.SIGSTOP)
    seen = {"state": "runs"}
    while seen["state"] != "stopped":
        rank.line.sendall(b"look 5 1\n")
        seen = next(line for line in map(json.loads, rank._lines) if "look" in line)
    assert (seen["look"], seen["pid"], seen["asked"]) == (5, rank.who["pid"], False)
    ((group, _, _, phase, begun, _, about, *_),) = seen["worlds"]
    assert (group, phase, begun, about) == (7, 1, 1, "message 1")
    rank.line.sendall(f"kill {rank.who['pid']}\n".encode())
    *_, last, killed = (json.loads(line) for line in rank._lines)
    assert (last["look"], [world[0] for world in last["worlds"]]) == (0, [7])  # in which worlds it was
    assert (killed, rank.process.wait(limit(100))) == ({"killed": 9}, -9)


def test_it_announces_its_rank_which_does_not_outlive_it(start):
    rank = start("import os; print(os.getpid(), flush=True)\n" + WAITS)
    assert int(rank.said()) == rank.who["pid"] != rank.process.pid
    assert (rank.who["rank"], rank.who["size"], rank.who["job"], rank.who["token"]) == (1, 3, "job", "secret")
    child = psutil.Process(rank.who["pid"])
    rank.process.kill()
    assert child.wait(limit(100)) is None  # it is not our child: only that it is gone is known
    assert rank.end() == ([], -9)


def test_a_program_in_a_command_reports_through_it(start):
    """Also in pieces of any size."""
    code = "from launchers import ending; ending.prepare(); ending.show_error('e' * 100_000); ending.ends(3)"
    rank = start("", "sh", "-c", f'{sys.executable} -c "{code}"; exit 4')
    (error, *rest), status = rank.end()
    assert error == {"error": "e" * 100_000}
    assert rest == [{"ends": 3, "heard": False}, {"exited": 4}]
    assert status == 4


@pytest.mark.parametrize("breaks", ["closed", "reset"])
def test_a_rank_whose_launcher_has_gone_is_killed(breaks, start):
    rank = start(WAITS)
    assert rank.said() == "there"
    rank._lines.close()
    if breaks == "reset":
        rank.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rank.line.close()
    assert rank.process.wait(limit(100)) == -signal.SIGKILL


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
    if host == socket.gethostname():  # a signal has ended it while this rank was being started
        with pytest.raises(SystemExit, match="rank 4: its launcher has ended"):
            supervisor.connect(environ)
    else:
        assert supervisor.connect(environ) is None
        said = f"rank 4 cannot reach its launcher on {host} at 10.0.0.2:70, 127.0.0.1:70\n"
        assert capsys.readouterr().err == said
    assert asked == [(name, 70) for name in order]  # the loopback address of another host is another host's


@pytest.mark.parametrize("environ", [{}, {ending.LAUNCHER: "secret 30 h 127.0.0.1:70"}, {"PMI_RANK": "0"}])
def test_a_process_without_a_launcher_or_a_rank_has_no_supervisor(environ):
    supervisor.supervise(environ)


def test_children_of_a_rank_may_continue(start):
    """The end of the rank is reported, although others have its connection open."""
    rank = start("import os, signal\nif os.fork():\n    os._exit(3)\nsignal.pause()")
    assert rank.heard() == {"exited": 3}
    assert rank.process.wait(limit(100)) == 3
    os.killpg(rank.process.pid, signal.SIGKILL)
