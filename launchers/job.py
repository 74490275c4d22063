"""A running job: the MPI's launcher, and the processes that say how they end."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from .ending import LAUNCHER, give_up_after
from .verdict import Process, verdict

AFTER_SECONDS = 2.0  # from the end of the program to that of its launcher; from one rank's error to the others' end
CLEANING_SECONDS = 1.5  # what the MPI's launcher gets to end its ranks and to remove its files
LAST_WORDS_SECONDS = 0.5  # of the ranks, that are still on their way when the launcher has ended
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """One job.

    Args:
      command: the MPI's launcher, with everything.
      environ: its environment.
      grace: seconds between a signal that ends a job, and the end of what is still there.
      detect: seconds after which a host that does not answer is lost.
      addresses: under which ranks, on this host and on others, can reach it.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], grace: float, detect: float, addresses: Sequence[str]
    ):
        self._command, self._environ, self._grace, self._detect = list(command), dict(environ), grace, detect
        self._addresses = addresses
        self._token = secrets.token_hex(16)
        self._processes: dict[asyncio.StreamWriter, Process] = {}
        self._talks: set[asyncio.Task] = set()
        self._ended: list[Process] = []  # in this order
        self._told: signal.Signals | None = None  # the signal that ends it
        self._launcher: asyncio.subprocess.Process
        self._deadline: asyncio.TimerHandle | None = None
        self._forced = False  # the launcher did not end by itself

    async def run(self) -> int:
        """Start it and wait for its end; returns its exit code."""
        server = await asyncio.start_server(self._hear, "", 0, family=socket.AF_INET)
        port = server.sockets[0].getsockname()[1]
        names = [f"{address}:{port}" for address in self._addresses]
        self._environ[LAUNCHER] = " ".join([self._token, str(self._detect), socket.gethostname(), *names])
        self._launcher = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environ,
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            process_group=0,  # Ctrl-C is for us alone, who pass it on
            preexec_fn=_end_with_parent,
        )
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:
            loop.add_signal_handler(number, self._pass_on, number)
        own = await self._launcher.wait()
        if self._talks:
            await asyncio.wait(self._talks, timeout=LAST_WORDS_SECONDS)
        server.close()
        return self._verdict(own)

    def _verdict(self, own: int) -> int:
        own = own if own >= 0 else 128 - own
        quiet = [process for process in self._processes.values() if process not in self._ended]
        for process in quiet:
            process.connected = False
        code = verdict([*self._ended, *quiet], None if self._forced else own)
        nobody_said = not any(process.ended is not None for process in self._ended)
        return 128 + self._told if self._told is not None and nobody_said else code

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What one process says, from its first word on."""
        process, talk = None, asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)
        give_up_after(writer.get_extra_info("socket"), self._detect)
        with suppress(ConnectionError, ValueError, KeyError, TypeError, asyncio.CancelledError):
            said = json.loads(await reader.readline())
            if not secrets.compare_digest(str(said["token"]), self._token):
                writer.close()
                return
            process = Process(said["job"], said["rank"], said["size"], said["host"], said["pid"])
            self._processes[writer] = process
            try:
                while words := await reader.readline():
                    self._take_down(process, json.loads(words))
            except TimeoutError:
                self._lose(process)
        writer.close()
        if process is not None:
            process.connected = False
            self._end_of(process)

    def _take_down(self, process: Process, said: Mapping[str, int]) -> None:
        process.worlds = said.get("world", process.worlds)
        if "left" in said:
            process.left = True
        if "ends" in said and process.ended is None:
            process.ended, process.heard = int(said["ends"]), bool(said.get("heard"))
            self._end_of(process)

    def _end_of(self, process: Process) -> None:
        if process not in self._ended:
            self._ended.append(process)
        if process.ended and not process.left:
            self._end_in(AFTER_SECONDS, f"{process} ended with {process.ended}, and others go on")
        elif not any(p.connected and p.ended is None for p in self._processes.values()) and self._all_were_there():
            self._end_in(AFTER_SECONDS, "")

    def _lose(self, process: Process) -> None:
        """A process that does not answer has ended by itself by now, or will; the others are told to go on."""
        sys.stderr.write(f"adaptive run: {process} is cut off; the others go on without it.\n")
        for writer, other in self._processes.items():
            if other.connected and other is not process and other.job == process.job:
                with suppress(OSError):
                    writer.write(f"lost {process.rank}\n".encode())

    def _all_were_there(self) -> bool:
        """Whether those who have said something were all; else others may be on their way, or never say anything."""
        ranks = {(process.job, process.rank) for process in self._processes.values()}
        return all((p.job, rank) in ranks for p in self._processes.values() for rank in range(p.size))

    def _pass_on(self, number: signal.Signals) -> None:
        """A signal to this process: to all ranks, and with an end to the job if it is one that ends."""
        again = self._told is not None
        reached = False
        for writer, process in self._processes.items():
            if process.connected:
                with suppress(OSError):
                    writer.write(f"signal {int(number)}\n".encode())
                    reached = True
        if number in ENDING:
            self._told = self._told or number
            self._end_in(self._grace if reached and not again else 0.0, "")
        elif not reached:
            with suppress(ProcessLookupError):
                self._launcher.send_signal(number)

    def _end_in(self, seconds: float, why: str) -> None:
        """End the launcher, and with it all ranks, unless it has ended by then. What is to be sooner counts."""
        loop = asyncio.get_running_loop()
        if self._deadline is not None:
            if self._deadline.when() <= loop.time() + seconds:
                return
            self._deadline.cancel()
        self._deadline = loop.call_later(seconds, self._terminate, why)

    def _terminate(self, why: str) -> None:
        if self._launcher.returncode is not None:
            return
        self._forced = True
        if why:
            sys.stderr.write(f"adaptive run: {why}; the job is ended.\n")
        with suppress(ProcessLookupError):
            self._launcher.terminate()
        asyncio.get_running_loop().call_later(CLEANING_SECONDS, self._kill)

    def _kill(self) -> None:
        """The launcher, and what there is of it on this host: Open MPI's ranks are in process groups of their own."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._launcher.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        with suppress(ProcessLookupError):
            self._launcher.kill()


def addresses() -> list[str]:
    """This host's IPv4 addresses; the one that other hosts cannot use comes first."""
    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    return sorted(found, key=lambda address: not address.startswith("127."))


def _end_with_parent() -> None:
    """Should this process be killed, the MPI's launcher is told to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            os._exit(1)
