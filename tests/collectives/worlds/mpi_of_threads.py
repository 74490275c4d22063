"""A stand-in for MPI, with its failure mitigation: the processes of a job are threads of the test.

Worlds and transports run on it as on `mpi4py.MPI`. `ThreadedWorld` (tests/threaded_world.py) stands in for a whole
world instead: use that where a test only needs the protocol of `World`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from collectives.worlds.base import Lifetime
from collectives.worlds.transport.mpi_transport import MPITransport
from collectives.worlds.transport.process_group import Process, ProcessGroup
from tests.speed import limit


class MPIError(Exception):
    """An error of MPI."""

    def Get_error_string(self) -> str:
        return "a process is lost"


class MPI:
    """The used part of `mpi4py.MPI`."""

    IN_PLACE, UNDEFINED, ANY_SOURCE, COMM_NULL, ERRORS_RETURN, ERR_PROC_FAILED = "in place", -1, -2, None, "return", 75
    COMM_TYPE_SHARED = 0
    SUM, MAX, MIN = np.add, np.maximum, np.minimum
    THREAD_SERIALIZED, THREAD_MULTIPLE = 2, 3
    Exception, Status = MPIError, SimpleNamespace
    Info = SimpleNamespace(Create=lambda: SimpleNamespace(Set=lambda *_: None))
    Get_library_version = staticmethod(lambda: "An MPI, 1.0\nof the tests\0")
    Query_thread = staticmethod(lambda: MPI.THREAD_MULTIPLE)
    Is_thread_main = staticmethod(lambda: True)
    Is_initialized = staticmethod(lambda: False)


class Killed(BaseException):
    """This process is dead. No `except Exception` sees it. A script may raise it to end its process without a word."""


class Job:
    """Processes that are threads.

    Args:
      dies: for each process that dies, at which of its collectives; the others do not get its values there.
      fails: for each process that an error of MPI interrupts, in which of its collectives; the others complete it.

    Attributes:
      ends: the exceptions by which a script may end; others are errors of the test.
      hosts: the numbers of the processes' hosts.
      calls: how many collectives each process has come to.
      dead: numbers of the processes that are lost.
      results: what the scripts have returned or raised, by number.
    """

    ends: tuple[type[BaseException], ...] = (Killed,)
    hosts: Sequence[int] = (0,) * 9

    def __init__(self, size: int, dies: dict[int, int] | None = None, fails: dict[int, int] | None = None):
        self.size, self.dies, self.fails = size, dies or {}, fails or {}
        self.changed, self.broken = threading.Condition(), False
        self.calls: defaultdict[int, int] = defaultdict(int)
        self.dead: set[int] = set()
        self.results: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    def run(self, script: Callable[[Comm], Any]) -> Any:
        """Return what `script(comm)` returns on each process; None for those that die."""
        everyone = Shared(self, range(self.size))
        for number in range(self.size):
            self.start(number, partial(script, Comm(everyone, number)))
        for thread in self.threads:  # grows where processes are spawned
            thread.join(limit(20))
        for result in list(self.results.values()):  # in the order of time: later errors follow from the first one
            if isinstance(result, BaseException) and not isinstance(result, self.ends):
                raise result
        assert not any(thread.is_alive() for thread in self.threads)
        return [None if isinstance(result, Killed) else result for _, result in sorted(self.results.items())]

    def start(self, number: int, script: Callable[[], Any]) -> None:
        """Start the process of this number, the next one."""

        def body() -> None:
            try:
                self.results[number] = script()
            except BaseException as error:
                with self.changed:
                    self.results[number] = error
                    self.dead.add(number)
                    self.broken |= not isinstance(error, self.ends)
                    self.changed.notify_all()

        self.threads.append(threading.Thread(target=body, name=f"process {number}", daemon=True))
        self.threads[-1].start()

    def die(self, number: int) -> None:
        """End the process of this number, which calls this."""
        with self.changed:
            self.dead.add(number)
            self.changed.notify_all()
        raise Killed


class Group(tuple):
    """Numbers of processes, by rank."""

    @property
    def size(self) -> int:
        return len(self)

    def Free(self) -> None: ...

    def Translate_ranks(self, ranks: Iterable[int] | None, other: Group) -> list[int]:
        return [other.index(self[rank]) for rank in (range(self.size) if ranks is None else ranks)]


class Shared:
    """What the processes of a communicator share: who they are, and what they exchange."""

    def __init__(self, job: Job, members: Iterable[int]):
        self.job, self.group, self.revoked = job, Group(members), False
        self.given: Any = defaultdict(dict)  # values by number, of each collective
        self.mail: Any = defaultdict(list)  # (source, tag, value), by the receiver's rank
        self.made: dict[Any, Shared] = {}  # communicators of some of them, or of them and others
        self.came: set[int] = set()  # ranks of a pair that have come to join their communicators


class Comm:
    """A communicator, in the view of the process of this number.

    Attributes:
      calls: how many collectives of ULFM (True) and others (False) this process has come to.
    """

    __hash__ = None  # type: ignore[assignment]  # as mpi4py's

    def __init__(self, shared: Shared, number: int):
        self.shared, self.job, self.group, self.number = shared, shared.job, shared.group, number
        self.rank, self.size = self.group.index(number), self.group.size
        self.calls, self.freed = {True: 0, False: 0}, False

    def Set_errhandler(self, handler: Any) -> None:
        assert handler == MPI.ERRORS_RETURN

    def Free(self) -> None:
        self.freed = True

    def _wait_for(self, missing: Callable[[], set[int]], *, survives: bool = False) -> None:
        """Wait until no process is missing, with `changed` held; if it `survives`, none but dead ones."""
        job = self.job

        def over() -> Any:
            left = missing()
            return left <= job.dead if survives else not left or left & job.dead or self.shared.revoked

        job.changed.wait_for(lambda: job.broken or over(), limit(10))
        assert over(), f"{self.number} waits for {missing()}"
        if missing() and not survives:
            raise MPIError

    # --- collectives --------------------------------------------------------------------------------------------------

    def _met(self, value: Any, *, survives: bool = False) -> list[Any]:
        """Return the values of all, by rank. Those of ULFM survive losses, and return the values of the others."""
        job = self.job
        with job.changed:
            at, call = job.calls[self.number], self.calls[survives]
            if self.number in job.dead or (job.dies.get(self.number) == at and not survives):
                job.die(self.number)
            job.calls[self.number] += not survives
            self.calls[survives] += 1
            given = self.shared.given[survives, call]
            given[self.number] = value
            job.changed.notify_all()
            self._wait_for(lambda: set(self.group) - given.keys(), survives=survives)
            if job.fails.get(self.number) == at and not survives:
                raise MPIError
            return [given[member] for member in self.group if member in given]

    def _made(self, members: Iterable[int], *, survives: bool = False) -> Comm:
        """Return the communicator of these members that the latest collective has created."""
        group = Group(members)
        with self.job.changed:
            made = self.shared.made.setdefault((survives, self.calls[survives], group), Shared(self.job, group))
        return Comm(made, self.number)

    def Allreduce(self, source: Any, target: np.ndarray, op: Any = MPI.SUM) -> None:
        everyone = self._met(np.array(target if isinstance(source, str) else source))
        with np.errstate(all="ignore"):
            target[...] = op.reduce(everyone)

    def Allgatherv(self, own: np.ndarray, whole: Any) -> None:
        words, (counts, starts) = whole
        for values, count, start in zip(self._met(own.copy()), counts, starts, strict=True):
            words[start : start + count] = values

    def Alltoallv(self, outgoing: Any, incoming: Any) -> None:
        words, (counts, starts) = outgoing
        everyone = self._met([words[start : start + count].copy() for count, start in zip(counts, starts, strict=True)])
        words, (counts, starts) = incoming
        for pieces, count, start in zip(everyone, counts, starts, strict=True):
            words[start : start + count] = pieces[self.rank]

    def Allgather(self, own: np.ndarray, target: np.ndarray) -> None:
        target[:] = np.concatenate(self._met(own.copy()))

    def allgather(self, value: Any) -> list[Any]:
        return self._met(value)

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self._met(value)[root]

    def Bcast(self, array: np.ndarray, root: int = 0) -> None:
        array[:] = self._met(array.copy())[root]

    def Dup(self) -> Comm:
        self.calls[False] += 1  # without waiting: a world holds a lock meanwhile, which the others here need too
        return self._made(self.group)

    def Split(self, color: int, key: int) -> Comm | None:
        everyone = zip(self.group, self._met((color, key)), strict=True)
        chosen = sorted((order, self.group.index(member)) for member, (its, order) in everyone if its == color)
        return None if color == MPI.UNDEFINED else self._made(self.group[rank] for _, rank in chosen)

    def Split_type(self, kind: int) -> Comm | None:
        assert kind == MPI.COMM_TYPE_SHARED
        return self.Split(self.job.hosts[self.number], self.rank)

    def Agree(self, flag: int) -> int:
        everyone = self._met(flag, survives=True)
        if len(everyone) < self.size:
            raise MPIError
        return min(everyone)

    def Shrink(self) -> Comm:
        return self._made(self._met(self.number, survives=True), survives=True)

    def Revoke(self) -> None:
        with self.job.changed:
            self.shared.revoked = True
            self.job.changed.notify_all()

    def Ack_failed(self) -> None: ...

    def Get_failed(self) -> Group:
        return Group(number for number in self.group if number in self.job.dead)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, value: Any, target: int, tag: int) -> None:
        with self.job.changed:
            self.shared.mail[target].append((self.rank, tag, value))
            self.job.changed.notify_all()

    isend = send

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:
        assert source == MPI.ANY_SOURCE
        assert not self.job.broken, "another process has failed"
        with self.job.changed:
            status.source = next((s for s, its, _ in self.shared.mail[self.rank] if its == tag), None)
            return status.source is not None

    def recv(self, source: int, tag: int) -> Any:
        def places() -> list[int]:
            return [place for place, message in enumerate(mail) if message[:2] == (source, tag)]

        with self.job.changed:
            mail = self.shared.mail[self.rank]
            self._wait_for(lambda: set() if places() else {self.group[source]})
            return mail.pop(places()[0])[2]

    def Send(self, array: np.ndarray, target: int, tag: int) -> None:
        self.send(array.copy(), target, tag)

    def Recv(self, array: np.ndarray, source: int, tag: int) -> None:
        np.copyto(array, self.recv(source, tag))

    def Isend(self, array: np.ndarray, target: int, tag: int) -> Any:
        self.Send(array, target, tag)
        return SimpleNamespace(Wait=lambda: None)

    def Irecv(self, array: np.ndarray, source: int, tag: int) -> Any:
        return SimpleNamespace(Wait=lambda: self.Recv(array, source, tag))

    # --- spawned processes --------------------------------------------------------------------------------------------

    def Spawn(self, *_: Any) -> InterComm:
        """Spawn a process; the job says how."""
        return InterComm(self.job.spawn(self.number))

    def Create_intercomm(self, root: int, pair: Comm, remote: int, _tag: int) -> InterComm:
        """Join the spawned process at the other end of `pair`, on rank `root`, or as that process the others."""
        pair, remote = self._met((pair, remote))[root]  # the others' do not count
        assert pair.rank != remote
        made, other = pair.shared.made, pair.group[remote]
        with self.job.changed:
            if pair.rank == 0:  # of the process that spawned it
                made.setdefault("joined", Shared(self.job, (*self.group, other)))
            pair.shared.came.add(pair.rank)
            self.job.changed.notify_all()
            self._wait_for(lambda: set() if pair.shared.came == {0, 1} else {other})
        return InterComm(Comm(made["joined"], self.number))


class InterComm:
    """A communicator of two groups. `merged`: that of all their processes, of which the last one was spawned."""

    def __init__(self, merged: Comm):
        self._merged = merged

    def Set_errhandler(self, handler: Any) -> None:
        assert handler == MPI.ERRORS_RETURN

    def Merge(self, high: bool) -> Comm:
        assert high == (self._merged.rank == self._merged.size - 1)
        return self._merged


# --- transports on it -------------------------------------------------------------------------------------------------


class World:
    def __repr__(self) -> str:
        return "a world"


WORLD = World()


def processes(*hosts: int) -> tuple[Process, ...]:
    """Return one process for each host number given."""
    return tuple(Process(range(i, i + 1), f"h{host}", host, 100 + i) for i, host in enumerate(hosts))


def transport_of(comm: Comm, hosts: Sequence[int] | None = None, *, survives: bool = True) -> MPITransport:
    """Return the transport of a process, with its `losses`: numbers, and the operation at which they were noticed."""
    made: Any = MPITransport(MPI, Lifetime(WORLD), survives=survives)
    made.losses = []

    def on_lost(survivors: ProcessGroup, lost: dict[int, Process], how: tuple[str, float]) -> None:
        assert how[1] >= 0
        assert all(made.group.everyone[rank] == process for rank, process in lost.items())
        made.losses.append(([process.pid - 100 for process in lost.values()], how[0]))
        made.set_group(survivors)

    made.on_lost = on_lost
    made.set_group(ProcessGroup(comm, processes(*(hosts or [0] * comm.size))))
    return made
