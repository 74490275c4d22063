"""A running job: starts mpirun, collects its processes' reports, passes signals on, and determines the exit code."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from .ending import LAUNCHER, LONGEST_LINE, addresses, give_up_after
from .restarts import JobEnd
from .supervisor import end_with
from .verdict import ProcessState, reason_to_end, remark, say, verdict
from .watch import Watch

AFTER_SECONDS = 2.0  # from the end of the program to that of its launcher; from one rank's error to the others' end
CLEANING_SECONDS = 1.5  # time that mpirun gets to end its ranks and to remove its files
LAST_WORDS_SECONDS = 0.5  # wait for ranks' last reports after mpirun has ended
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """A job of several ranks, run once.

    Args:
      command, environ: the whole command line of mpirun, and its environment.
      grace: seconds between a signal that ends the job and the forced end of the remaining ranks.
      host_timeout: seconds after which the job is ended if a host does not answer.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], grace: float, host_timeout: float):
        self._command, self._environ = list(command), dict(environ)
        self._grace, self._host_timeout = grace, host_timeout
        self._token = secrets.token_hex(16)
        self._processes: list[ProcessState] = []
        self._writers: dict[ProcessState, asyncio.StreamWriter] = {}  # to the supervisors of those that are connected
        self._talks: set[asyncio.Task] = set()
        self._errors: dict[str, ProcessState] = {}  # the first process that ended by each error
        self._ended: list[ProcessState] = []  # in the order in which they ended
        self._ended_by: signal.Signals | None = None  # the signal that ends the job
        self._launcher: asyncio.subprocess.Process | None = None
        self._check: asyncio.TimerHandle | None = None  # the pending second look at a reason to end the job
        self._forced: int | None = None  # this process has ended mpirun; the job's exit code if no rank has failed
        self._saved: int | None = None  # the step of the newest checkpoint on the disk
        self._watch = Watch(self._processes, self._send, lambda: self._terminate(1))

    async def run(self, announce: Callable[[], object] = lambda: None) -> JobEnd:
        """Run the job, and return how it has ended. `announce` is called after the signal handlers are installed."""
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:  # before the job starts, so that no signal is missed
            # nohup has SIGHUP ignored. Shells ignore SIGINT for background processes, too, but `kill -INT` is meant.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._pass_on, number)
        announce()
        server = await asyncio.start_server(self._hear, "", 0, family=socket.AF_INET, limit=LONGEST_LINE)
        port = server.sockets[0].getsockname()[1]
        names = [f"{address}:{port}" for address in addresses()]
        self._environ[LAUNCHER] = " ".join([self._token, str(self._host_timeout), socket.gethostname(), *names])
        if self._ended_by is not None:
            server.close()
            return JobEnd(128 + self._ended_by, self._ended_by, None)
        own_pid = os.getpid()
        self._launcher = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environ,
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            process_group=0,  # Ctrl-C reaches this process only, which passes it on
            preexec_fn=lambda: end_with(own_pid, signal.SIGTERM),
        )
        if self._ended_by is not None:  # a signal arrived while mpirun was being started
            self._terminate()
        own = await self._launcher.wait()
        self._watch.stop()
        if self._talks:
            await asyncio.wait(self._talks, timeout=LAST_WORDS_SECONDS)
        server.close()
        return JobEnd(self._code(own if own >= 0 else 128 - own), self._ended_by, self._saved)

    def _code(self, own: int) -> int:
        """Return the exit code of the job, given that of mpirun."""
        self._say_why()
        quiet = [process for process in self._processes if process not in self._ended]
        for process in quiet:
            process.cut_short |= process.connected
            process.connected = False
        cut_short = [process for process in quiet if process.cut_short and process.counts]
        if cut_short and self._forced is None:
            say(f"mpirun ended with {own} while {cut_short[0]} was running.")
        code = verdict(self._in_order(), own if self._forced is None else self._forced) or self._forced or 0
        nobody_said = not any(process.ended is not None for process in self._ended)
        failed = any(process.ended for process in self._ended)
        if self._ended_by is not None and (nobody_said or (cut_short and not failed)):
            return 128 + self._ended_by
        return code

    # --- what processes report ----------------------------------------------------------------------------------------

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Record the reports of one connection, from its first line to its end."""
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)
        give_up_after(writer.get_extra_info("socket"), self._host_timeout)
        process = None
        try:
            said = json.loads(await reader.readline())
            if secrets.compare_digest(str(said.pop("token")), self._token):
                process = ProcessState(**said)
                self._processes.append(process)
                self._writers[process] = writer
                if self._ended_by is not None:  # the process connected after the signal was passed on
                    self._send(process, f"signal {int(self._ended_by)}")
                while words := await reader.readline():
                    self._take_down(process, json.loads(words))
        except (ConnectionError, ValueError, KeyError, TypeError, asyncio.CancelledError):
            pass  # it was killed, or is not one of ours
        except OSError:
            if process is not None and not process.over and self._forced is None:
                say(f"{process} is cut off: its host has not answered for {self._host_timeout:g} s.")
                self._terminate(128 + signal.SIGKILL)  # its supervisor kills it there
        writer.close()
        if process is not None:
            self._writers.pop(process)
            process.connected = False
            self._look_at(process)

    def _send(self, process: ProcessState, line: str) -> None:
        """Send a line to the supervisor of a process."""
        with suppress(OSError, KeyError):  # it may be gone
            self._writers[process].write(f"{line}\n".encode())

    def _print_error(self, process: ProcessState, text: str) -> None:
        """Print the error by which a rank ends, in one piece; the same error of several ranks once."""
        first = self._errors.setdefault(text, process)
        told = f":\n{text.rstrip()}" if first is process else f" ended by the same error as rank {first.rank}."
        say(f"{process}{told}", by="")

    def _take_down(self, process: ProcessState, said: Mapping[str, Any]) -> None:
        if "waits" in said:
            self._watch.note_wait()
        elif "look" in said:
            self._watch.note_look(process, said)
        elif "error" in said:
            self._print_error(process, str(said["error"]))
        elif not process.cut_short:  # else its reports are consequences of our ending the job
            if "saved" in said:
                self._saved = max(said["saved"], self._saved or 0)
            process.update(said)
            self._look_at(process)

    def _look_at(self, process: ProcessState) -> None:
        """Record a process's end if it is known now, and check whether the job has to be ended."""
        if process.over and process not in self._ended:
            self._ended.append(process)
            if (text := remark(process)) and self._forced is None:
                say(text)
        self._look_again()

    def _in_order(self) -> list[ProcessState]:
        """Return the ended processes in the order of their ends, and then the others."""
        return [*self._ended, *(process for process in self._processes if process not in self._ended)]

    def _look_again(self) -> None:
        if self._check is None and (why := reason_to_end(self._in_order())) is not None:
            self._check = asyncio.get_running_loop().call_later(AFTER_SECONDS, self._end_because, why)

    def _end_because(self, why: str) -> None:
        """End the job if the reason still holds after reports that have arrived in the meantime."""
        self._check = None
        if reason_to_end(self._in_order()) == why:
            self._say_why()
            self._terminate()
        else:
            self._look_again()

    def _say_why(self) -> None:
        if self._forced is None and self._ended_by is None and (why := reason_to_end(self._in_order())):
            say(why)

    # --- signals and the end ------------------------------------------------------------------------------------------

    def _pass_on(self, number: signal.Signals) -> None:
        """Pass a signal on to all ranks; for an ending signal, also schedule the forced end of the job."""
        again = self._ended_by is not None
        reached = [process for process in self._writers if process.connected]
        for process in reached:
            self._send(process, f"signal {int(number)}")
        if number in ENDING:
            self._ended_by = self._ended_by or number
            asyncio.get_running_loop().call_later(self._grace if reached and not again else 0.0, self._terminate)
        elif not reached and self._launcher is not None:
            with suppress(ProcessLookupError):
                self._launcher.send_signal(number)

    def _terminate(self, code: int = 0) -> None:
        """End mpirun, and with it all ranks. `code`: the job's exit code if no rank has failed."""
        if self._launcher is None or self._launcher.returncode is not None or self._forced is not None:
            return
        self._forced = code
        self._watch.stop()
        unfinished = [process for process in self._processes if not process.over]
        for process in unfinished:
            process.cut_short = True
        if any(process.counts for process in unfinished):
            say("ending the job and all ranks that are still running.")
        with suppress(ProcessLookupError):
            self._launcher.terminate()
        asyncio.get_running_loop().call_later(CLEANING_SECONDS, self._kill)

    def _kill(self) -> None:
        """Kill mpirun and its descendants on this host; Open MPI's ranks have process groups of their own."""
        assert self._launcher is not None
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher.pid)  # `Popen.kill` might take its exit code from asyncio
            for process in (*launcher.children(recursive=True), launcher):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
