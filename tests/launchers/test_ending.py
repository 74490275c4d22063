"""What a process and its launcher say to each other when their connection breaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchers import ending
from launchers.job import Job
from launchers.mpirun import RANK
from launchers.verdict import ProcessState
from tests.mpirun import ROOT
from tests.speed import limit

SCRIPT = """
from launchers import ending
ending.prepare()
ending.confirm()
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
    "supervised": True,
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


@pytest.fixture(params=["supervised", "alone"])
def talk(request, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """How a process ends whose launcher does `first` with its connection, and answers the next with `then`; `None`:
    there is no launcher any more.
    """
    return partial(_talk, tmp_path / "train.py", request.param == "supervised")


def _talk(script: Path, supervised: bool, first: Callable, then: bytes | None) -> tuple[int, str, str]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        started(script, server.getsockname()[1], supervised) as process,
    ):
        server.settimeout(limit(60))
        line, _ = server.accept()
        with line, line.makefile("r") as said:
            assert json.loads(said.readline())["rank"] == 1
            assert json.loads(said.readline()) == {"asks": 1}
            if then is None:
                server.close()
            first(line)
            if then:
                again, _ = server.accept()
                with again, again.makefile("r") as said_again:
                    hello = json.loads(said_again.readline())
                    assert (hello["again"], hello["rank"]) == (True, 1)
                    again.sendall(then)
            out, err = process.communicate(timeout=limit(60))
        return process.returncode, out, err


def reset(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(line.detach())


def test_a_rank_that_asks_gets_an_answer(talk):
    code, out, err = talk(lambda line: line.sendall(b"here 1\n"), b"")
    assert (code, out, err) == (0, "goes on\n", "")


def test_an_excluded_rank_ends(talk):
    code, out, err = talk(reset, b"given up\n")
    assert (code, out) == (-signal.SIGKILL, "")
    assert "was given up" in err
    assert "for 30 s (--host-timeout)" in err


@pytest.mark.parametrize("then", [b"unknown\n", None])
def test_a_rank_that_was_not_excluded_continues(talk, then):
    code, out, _ = talk(reset, then)
    assert (code, out) == (0, "goes on\n")


def test_the_launcher_knows_the_excluded_ranks(capsys):
    async def answers() -> list[bytes]:
        job = Job([], {}, 1.0, 30.0, [])
        job._token = "secret"
        server = await asyncio.start_server(job._hear, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def answer(**said: object) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"".join(json.dumps(line).encode() + b"\n" for line in ({**HELLO, **said}, {"asks": 3})))
            line = await reader.readline()
            writer.close()
            return line

        found = [await answer(), await answer(again=True)]
        job._lose(ProcessState("a", 1, 2, "h", 7, False))
        found += [await answer(again=True), await answer(again=True, host="i"), await answer(again=True, token="other")]
        server.close()
        return found

    assert asyncio.run(answers()) == [b"here 3\n", b"unknown\n", b"given up\n", b"unknown\n", b""]


def test_mpi_is_finalized_also_where_its_c_function_is_not_found(tmp_path):
    called = threading.Event()
    ending._finalize(SimpleNamespace(__file__=str(tmp_path / "MPI.so"), Finalize=called.set), limit(20))
    assert called.is_set()


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
