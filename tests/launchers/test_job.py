"""How a job ends if one of its ranks does: exit code, and the rank that is named. Without MPI."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace

import psutil
import pytest

from launchers import job as jobs
from launchers.ending import LAUNCHER
from launchers.job import Job
from launchers.restarts import JobEnd
from launchers.verdict import ProcessState
from tests.mpirun import ROOT
from tests.speed import limit

NEEDED = "before its first world, and the others cannot continue without it."


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("", 127, "no-such-command cannot be run: No such file"),
        ("test $OMPI_COMM_WORLD_RANK = 0 || sleep 1000; kill -9 $$", 137, "rank 0 .* was killed by SIGKILL before"),
    ],
)
def test_how_a_command_ends(command, code, said, fake_mpirun):
    program = ["sh", "-c", command] if command else ["no-such-command"]
    done = subprocess.run(
        [sys.executable, "-m", "launchers.run", "--mpirun", fake_mpirun, "-n", "2", "--begin", "--", *program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=limit(100),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert re.search(said, done.stderr), done.stderr


# --- ranks and mpirun as coroutines -----------------------------------------------------------------------------------


LONG = 10_000.0


class Mpirun:
    """Stands in for mpirun: its ranks are a coroutine, and it ends with the status that the coroutine returns."""

    pid = 7

    def __init__(self, ranks: Awaitable[int]):
        self.ranks, self.returncode = ranks, None
        self.signals: list[int] = []
        self.terminated, self.killed = asyncio.Event(), asyncio.Event()

    async def wait(self) -> int:
        self.returncode = await self.ranks
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def terminate(self) -> None:
        assert not self.terminated.is_set()
        self.terminated.set()

    def kill(self) -> None:
        self.killed.set()


_MARKS = itertools.count()


def take_down_and_answer(job: Job, process: ProcessState, said: Mapping[str, int]) -> None:
    """Take a report down, and send a mark back, so that a rank knows that all reports before it were taken down."""
    take_down(job, process, said)
    if "mark" in said:
        job._writers[process].write(f"mark {said['mark']}\n".encode())


take_down = Job._take_down


class Ranks:
    """The ranks' connections to the launcher."""

    def __init__(self, environ: Mapping[str, str]):
        self.token, _, _, self.address, *_ = environ[LAUNCHER].split()
        self.mpirun: Mpirun
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address.split(":"))
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        """Close all connections, and wait until the launcher has done so."""
        for writer in self._writers:
            writer.close()
        async with asyncio.timeout(limit(20)):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        for _ in range(3):
            await asyncio.sleep(0)

    async def connect(self, rank: int = 0, size: int = 1, **said: object) -> Callable[..., Awaitable[list[str]]]:
        """Connect a rank. Returns its function to report something, which returns the launcher's words since then."""
        reader, writer = await self.open()
        place = {"rank": rank, "size": size, "job": "job", "host": "h", "pid": rank + 10, "spawned": False}
        first = {"token": self.token, **place, "is_command": False, **said}
        writer.write(json.dumps(first).encode() + b"\n")

        async def says(*reports: dict, ends: bool = False) -> list[str]:
            mark = next(_MARKS)
            writer.write(b"".join(json.dumps(line).encode() + b"\n" for line in (*reports, {"mark": mark})))
            words = []
            while (word := (await reader.readline()).decode().strip()) not in (f"mark {mark}", ""):
                words += [] if word.startswith("mark ") else [word]
            if ends:
                writer.close()
                await reader.read()
            return words

        says.heard = await says()
        return says


@pytest.fixture
def play(monkeypatch, capsys):
    """Run a job of coroutines; return how it ended, and what it printed. It waits for nothing by default."""

    def run(
        scene: Callable[[Ranks], Awaitable[int]],
        after: float = 0.0,
        grace: float = LONG,
        words: float = 0.0,
        starting: Callable[[], object] = lambda: None,
    ) -> tuple[JobEnd, str]:
        async def begin(*command: str, env: Mapping[str, str], **_: object) -> Mpirun:
            starting()
            for _ in range(9):
                await asyncio.sleep(0)
            ranks = Ranks(env)
            begun.append(ranks)
            ranks.mpirun = Mpirun(scene(ranks))
            return ranks.mpirun

        async def whole() -> tuple[JobEnd, str]:
            job = Job(["mpirun"], {}, grace, 30.0)
            try:
                return await asyncio.wait_for(job.run(), limit(20)), capsys.readouterr().err
            finally:
                for ranks in begun:
                    await ranks.close()

        begun: list[Ranks] = []
        monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
        monkeypatch.setattr(Job, "_take_down", take_down_and_answer)
        monkeypatch.setattr(jobs, "AFTER_SECONDS", after)
        monkeypatch.setattr(jobs, "LAST_WORDS_SECONDS", words)
        return asyncio.run(whole())

    return run


KILLED, SPAWNED = {"killed": 9}, {"job": "b", "spawned": True, "size": 1}


@pytest.mark.parametrize(
    ("second", "said", "own", "code", "printed"),
    [
        ({}, [{"ends": 0}], 5, 0, ""),
        ({}, [], -11, 139, "mpirun ended with 139 while rank 1 .pid 11 on h. was running"),
        (SPAWNED, [], 5, 0, ""),
        (SPAWNED, [{"joined": True}, {"making": True}], 5, 5, "mpirun ended with 5 while rank 1"),
        (SPAWNED, [{"ends": 3}], 0, 0, "ended with exit code 3 before it joined"),
        ({}, [{"worlds": 1}, {"joined": True}, KILLED], 0, 0, ""),  # other reports do not end the world
        ({}, [{"worlds": 1}, {"worlds": 0}, KILLED], 0, 137, "SIGKILL after its last world; the others continue, and"),
        ({}, [{"ends": 3}, {"ends": 0}], 0, 3, "ended with exit code 3"),
        ({}, [{"ends": 0}, {"exited": 4}], 0, 0, ""),  # its first report is the program's
        ({}, [{"left": 3}, {"exited": 3}], 0, 0, ""),
        ({}, [{"ends": 1, "heard": True}, KILLED], 0, 1, ""),
    ],
)
def test_how_a_job_of_two_ends_whose_first_rank_ended_well(second, said, own, code, printed, play):
    async def scene(ranks: Ranks) -> int:
        first = await ranks.connect(0, 1 if "spawned" in second else 2)
        other = await ranks.connect(1, **{"size": 2, **second})
        await first({"ends": 0}, {"exited": 0}, ends=True)
        await other(*said)
        return own

    ended, text = play(scene, after=LONG)
    assert ended == (code, None, None)
    assert re.search(printed, text) if printed else not text
    assert text.count("\n") <= 1  # nothing is said twice


def test_errors_are_printed_in_one_piece_and_the_same_one_once(play):
    long = "".join(f"  line {n} \u00e4\n" for n in range(9000))

    async def scene(ranks: Ranks) -> int:
        says = [await ranks.connect(rank, 3) for rank in range(3)]
        await asyncio.gather(*(each({"error": text}) for each, text in zip(says, (long, "other\n", long), strict=True)))
        await asyncio.gather(*(each({"ends": 1, "heard": True}, {"exited": 1}, ends=True) for each in says))
        return 1

    ended, text = play(scene)
    assert ended.code == 1
    first, last = (0, 2) if f"rank 0 (pid 10 on h):\n{long}" in text else (2, 0)
    assert f"rank {first} (pid 1{first} on h):\n{long}" in text
    assert f"rank {last} (pid 1{last} on h) ended by the same error as rank {first}.\n" in text
    assert "rank 1 (pid 11 on h):\nother\n" in text


def test_the_code_of_a_job_whose_members_are_lost_is_theirs_and_not_that_of_its_reserve(play):
    async def scene(ranks: Ranks) -> int:
        member, reserve = [await ranks.connect(rank, 2) for rank in range(2)]
        await member({"worlds": 1}, KILLED, ends=True)
        await reserve({"worlds": 1}, {"left": True}, {"ends": 1, "heard": True}, {"exited": 1}, ends=True)
        return 1

    ended, text = play(scene)
    assert text == "adaptive run: no rank is left: rank 0 (pid 10 on h) was killed by SIGKILL in a world.\n"
    assert ended.code == 137


@pytest.mark.parametrize(("own", "code"), [(0, 0), (-11, 139)])
def test_a_job_whose_ranks_never_connect_ends_as_mpirun_does(own, code, play):
    async def scene(ranks: Ranks) -> int:
        return own

    assert play(scene)[0] == (code, None, None)


def test_the_newest_checkpoint_is_known(play):
    async def scene(ranks: Ranks) -> int:
        rank = await ranks.connect()
        await rank({"saved": 5}, {"saved": 9}, {"saved": 3}, {"ends": 1})
        await ranks.mpirun.terminated.wait()
        await rank({"saved": 12})  # by a rank that is being ended: it may not be complete
        return -15

    assert play(scene)[0] == (1, None, 12)


def test_a_command_may_go_on_after_a_program_in_it(play):
    """The last exit code is the command's."""

    async def scene(ranks: Ranks) -> int:
        shell = await ranks.connect(is_command=True)
        await shell({"pid": 90}, {"worlds": 1}, {"ends": 3})
        assert not ranks.mpirun.terminated.is_set()
        await shell({"exited": 0}, ends=True)
        return 0

    assert play(scene)[0] == (0, None, None)


def test_strangers_are_ignored(play):
    async def scene(ranks: Ranks) -> int:
        for line in (b"hello\n", b"[]\n", b'{"token": "other"}\n', f'{{"token": "{ranks.token}"}}\n'.encode(), b""):
            reader, writer = await ranks.open()
            writer.write(line)
            writer.write_eof()
            assert await reader.read() == b""
        await (await ranks.connect())({"ends": 0})
        return 0

    assert play(scene) == ((0, None, None), "")


# --- the end before that of mpirun ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ([{"ends": 3}], 3, r"rank 1 \(pid 11 on h\) ended with exit code 3."),
        ([KILLED], 137, f"rank 1 .* was killed by SIGKILL {NEEDED}"),
        ([{"exited": 0}], 1, "rank 1 .* ended with exit code 0 before its first world, and rank 0 .* waits for it"),
    ],
)
def test_a_job_that_cannot_go_on_is_ended(said, code, why, play):
    async def scene(ranks: Ranks) -> int:
        waits = await ranks.connect(0, 2)
        await waits({"making": True}, {"joined": True})  # other reports do not end the wait
        await (await ranks.connect(1, 2))(*said, ends=True)
        await ranks.mpirun.terminated.wait()
        await waits({"ends": 143})  # because mpirun ends it
        return -15

    ended, printed = play(scene)
    assert ended == (code, None, None)
    first, second = printed.splitlines()
    assert re.fullmatch(f"adaptive run: {why}.*", first)
    assert second == "adaptive run: ending the job and all ranks that are still running."


def test_a_job_goes_on_if_the_reason_to_end_it_has_gone(play):
    async def scene(ranks: Ranks) -> int:
        first, second = await ranks.connect(0, 2), await ranks.connect(1, 2)
        await second({"exited": 0}, ends=True)
        await first({"making": True}, {"making": False})
        await first()
        assert not ranks.mpirun.terminated.is_set()
        await first({"ends": 0}, {"exited": 0}, ends=True)
        return 0

    assert play(scene) == ((0, None, None), "")


def test_the_reason_that_still_holds_is_named(play):
    async def scene(ranks: Ranks) -> int:
        first, second = await ranks.connect(0, 2), await ranks.connect(1, 2)
        await second({"exited": 0}, ends=True)
        await first({"making": True}, {"ends": 3})
        await ranks.mpirun.terminated.wait()
        return -15

    cause = "rank 1 (pid 11 on h) ended with exit code 0 before its first world."
    said = f"adaptive run: rank 0 (pid 10 on h) ended with exit code 3. Before that, {cause}\n"
    assert play(scene) == ((3, None, None), said)


def test_an_mpirun_that_does_not_end_is_killed_with_its_descendants(play, monkeypatch):
    class Child:
        def __init__(self, error: Exception | None = None):
            self.error = error

        def kill(self) -> None:
            killed.append(self)
            if self.error is not None:
                raise self.error

    async def scene(ranks: Ranks) -> int:
        process[7].kill = ranks.mpirun.kill
        await (await ranks.connect())({"ends": 0}, {"exited": 0}, ends=True)
        await ranks.mpirun.killed.wait()
        assert ranks.mpirun.terminated.is_set()
        return -9

    killed: list[Child] = []
    children = [Child(psutil.NoSuchProcess(8)), Child()]  # one has ended in the meantime
    process = {7: SimpleNamespace(children=lambda recursive: children if recursive else [])}
    monkeypatch.setattr(psutil, "Process", process.__getitem__)
    monkeypatch.setattr(jobs, "CLEANING_SECONDS", 0.0)
    assert play(scene)[0] == (0, None, None)
    assert killed == children


# --- signals and lost hosts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ([{"ends": 0}, {"exited": 0}], 0),  # it has saved a checkpoint and ended well
        ([{"ends": 3}, {"exited": 3}], 3),
        ([{"killed": 15}], 143),
        ([{"worlds": 1}], 143),
    ],
)
def test_a_signal_that_ends_a_job_reaches_all_its_ranks(says, code, play):
    async def scene(ranks: Ranks) -> int:
        first = await ranks.connect(0, 2)
        signal.raise_signal(signal.SIGTERM)
        while not (heard := await first()):
            pass
        second = await ranks.connect(1, 2)  # it was still starting
        assert heard == second.heard == ["signal 15"]
        await first(*says)
        await second(*says)
        assert not ranks.mpirun.terminated.is_set()
        return 0

    assert play(scene, after=LONG)[0] == (code, signal.SIGTERM, None)


def test_a_second_ending_signal_does_not_wait_for_the_ranks(play):
    async def scene(ranks: Ranks) -> int:
        rank = await ranks.connect()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            while not (heard := await rank()):
                pass
            assert heard == [f"signal {number:d}"]
        await ranks.mpirun.terminated.wait()
        return -15

    assert play(scene)[0] == (143, signal.SIGTERM, None)


def test_the_end_of_the_terminal_does_not_end_a_job_under_nohup(play):
    """SIGHUP, which the ranks ignore, too."""

    async def scene(ranks: Ranks) -> int:
        rank = await ranks.connect()
        signal.raise_signal(signal.SIGHUP)
        await rank({"ends": 0}, {"exited": 0}, ends=True)
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert play(scene, after=LONG) == ((0, None, None), "")
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("grace", [0.0, LONG])
def test_ranks_that_do_not_end_after_a_signal_are_ended(grace, play):
    """At once, if there is no rank to wait for."""

    async def scene(ranks: Ranks) -> int:
        if not grace:
            rank = await ranks.connect()
        signal.raise_signal(signal.SIGINT)
        await ranks.mpirun.terminated.wait()
        if not grace:
            assert await rank() == ["signal 2"]
        return -15

    assert play(scene, grace=grace)[0] == (130, signal.SIGINT, None)


def test_other_signals_go_to_the_ranks_or_to_mpirun_if_there_are_none(play):
    async def scene(ranks: Ranks) -> int:
        signal.raise_signal(signal.SIGUSR1)
        while not ranks.mpirun.signals:
            await asyncio.sleep(0)
        rank, gone = await ranks.connect(0, 2), await ranks.connect(1, 2)
        await gone({"ends": 0}, {"exited": 0})
        signal.raise_signal(signal.SIGUSR2)
        while not (heard := await rank()):
            pass
        assert (heard, await gone()) == (["signal 12"], [])
        await rank({"exited": 0})
        assert ranks.mpirun.signals == [10]
        assert not ranks.mpirun.terminated.is_set()
        return 0

    assert play(scene, after=LONG)[0] == (0, None, None)


def test_a_signal_before_the_start_prevents_it(monkeypatch):
    async def run() -> JobEnd:
        job = Job(["/no/mpirun"], {}, LONG, 30.0)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)

        async def after_the_signal(*_: object, **__: object) -> asyncio.Server:
            while job._ended_by is None:
                await asyncio.sleep(0)
            return server

        monkeypatch.setattr(asyncio, "start_server", after_the_signal)
        async with server:
            return await job.run(lambda: signal.raise_signal(signal.SIGINT))

    assert asyncio.run(run()) == (130, signal.SIGINT, None)


def test_a_signal_while_mpirun_is_started_ends_it(play, caplog):
    async def scene(ranks: Ranks) -> int:
        await ranks.mpirun.terminated.wait()
        return -15

    assert play(scene, starting=lambda: signal.raise_signal(signal.SIGINT)) == ((130, signal.SIGINT, None), "")
    assert not caplog.records  # of an error in a callback


@pytest.mark.parametrize(
    ("over", "error"), [(True, TimeoutError()), (False, OSError(errno.EHOSTUNREACH, "No route to host"))]
)
def test_a_rank_that_is_cut_off_ends_the_job(play, monkeypatch, over, error):
    real = asyncio.StreamReader.readline

    async def readline(reader: asyncio.StreamReader) -> bytes:
        """Fail as the kernel does on a connection whose other side does not answer."""
        if b"cut off" in (line := await real(reader)):
            raise error
        return line

    async def scene(ranks: Ranks) -> int:
        other, lost = await ranks.connect(0, 3), await ranks.connect(2, 3)
        await other({"worlds": 1})
        await lost({"worlds": 1}, *([{"ends": 0}, {"exited": 0}] if over else []), {"cut off": True})
        if not over:
            await ranks.mpirun.terminated.wait()
        await other({"ends": 0})
        return 0

    monkeypatch.setattr(asyncio.StreamReader, "readline", readline)
    ended, printed = play(scene, after=LONG)
    assert ended.code == (0 if over else 128 + signal.SIGKILL)
    text = "adaptive run: rank 2 (pid 12 on h) is cut off: its host has not answered for "
    assert (text in printed) is not over


def test_reports_that_arrive_after_the_end_of_mpirun_count(play):
    async def scene(ranks: Ranks) -> int:
        rank = await ranks.connect()
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(rank({"ends": 3}, ends=True)))
        return 0

    assert play(scene, words=limit(20))[0] == (3, None, None)
