"""A job whose processes are threads of the test, with stand-ins for MPI and the transport."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from adaptive import Preempted, ReserveReleased, WorkerError
from collectives.worlds.elastic.elastic_processes import ElasticProcesses
from collectives.worlds.elastic.processes_of_job import spawned_process, started_processes
from collectives.worlds.elastic.spawning import receive_spawn_request
from collectives.worlds.transport.process_group import Process, ProcessGroup
from launchers.ending import SPAWNED
from tests.speed import limit


class Dies(Exception):
    """A script raises this to end its process without a word."""


_ENDS = Dies, Preempted, ReserveReleased, WorkerError, SystemExit  # of scripts, which tests look at


class Job:
    """A job of `processes`. The other arguments are those of `MPIWorld`.

    Args:
      devices: number of workers of each process.
      spawned_program: digests of what the spawned processes have built; those of the others are {"driver": "a"}.

    Attributes:
      dead: numbers of the processes that are lost.
      results: what the processes' scripts have returned or raised, by number. Spawned ones have the next numbers.
    """

    def __init__(
        self,
        processes: int,
        workers: int | None = None,
        min_workers: int = 2,
        max_workers: int | None = None,
        *,
        devices: int = 2,
        survives: bool = True,
        respawn: bool = False,
        spawned_program: Mapping[str, str] | None = None,
    ):
        self._processes, self._devices, self._arguments = processes, devices, (workers, min_workers, max_workers)
        self.survives, self._respawn, self._spawned_program = survives, respawn, spawned_program or {"driver": "a"}
        self.changed, self.broken = threading.Condition(), False
        self.dead: set[int] = set()
        self.results: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def run(self, script: Callable[[int, ElasticProcesses], Any]) -> dict[int, Any]:
        """Run `script(number, its processes)` in all processes, also in those that are spawned; return the results."""
        self._script, everyone = script, Shared(self, tuple(range(self._processes)))
        for number in range(self._processes):
            self._start(number, lambda number=number: self._started(number, Comm(everyone, number)))
        for thread in self._threads:  # grows where processes are spawned
            thread.join(limit(5))
        for result in self.results.values():
            if isinstance(result, BaseException) and not isinstance(result, _ENDS):
                raise result
        assert not any(thread.is_alive() for thread in self._threads)
        return dict(sorted(self.results.items()))

    def _start(self, number: int, make: Callable[[], ElasticProcesses]) -> None:
        def body() -> None:
            try:
                self.results[number] = self._script(number, make())
            except (Exception, SystemExit) as error:
                self.results[number] = error
                with self.changed:
                    self.dead.add(number)
                    self.broken |= not isinstance(error, _ENDS)
                    self.changed.notify_all()

        self._threads.append(threading.Thread(target=body, name=f"process {number}", daemon=True))
        self._threads[-1].start()

    def _options(self) -> dict[str, Any]:
        return {
            "respawn": self._respawn,
            "abandon": lambda: None,
            "create_mailbox": lambda group, nbytes: (group.comm.size, nbytes),
        }

    def _started(self, number: int, comm: Comm) -> ElasticProcesses:
        k = self._devices
        names = [Process(range(k * n, k * n + k), "a", 0, n) for n in range(self._processes)]
        transport = Transport(self, self._mpi(number))
        everyone = ProcessGroup(comm, tuple(names))
        return started_processes(
            *(transport, everyone, *self._arguments), build_digests=lambda: {"driver": "a"}, **self._options()
        )

    def _spawn(self, spawner: int) -> Comm:
        """Start a spawned process. Returns the spawner's communicator with it."""

        def make() -> ElasticProcesses:
            mpi = self._mpi(number, Comm(pair, number))
            both, request = receive_spawn_request(mpi, {SPAWNED: "1"})
            options = {"build_digests": lambda: self._spawned_program, "spawns": True, **self._options()}
            own = Comm(Shared(self, (number,)), number)
            return spawned_process(Transport(self, mpi), own, both, request, self._arguments[1], **options)

        with self.changed:  # several threads may spawn
            number = len(self._threads)
            pair = Shared(self, (spawner, number))
            self._start(number, make)
        return Comm(pair, spawner)

    def _mpi(self, number: int, pair: Comm | None = None) -> Any:
        """The module, in the view of one process; `pair`: of a spawned one."""
        parent = pair and SimpleNamespace(Set_errhandler=lambda _: None, Merge=lambda high: pair)
        return SimpleNamespace(
            COMM_SELF=CommSelf(Shared(self, (number,)), number),
            Comm=SimpleNamespace(Get_parent=lambda: parent),
            Info=SimpleNamespace(Create=lambda: SimpleNamespace(Set=lambda *_: None)),
            Status=SimpleNamespace,
            Exception=OSError,
            ERRORS_RETURN=None,
            ERR_PROC_FAILED=1,
            UNDEFINED=-1,
            COMM_NULL=None,
            ANY_SOURCE=-1,
        )

    def wait_for(self, fact: Callable[[], object]) -> None:
        """Wait for a fact, with `changed` held."""
        assert self.changed.wait_for(lambda: self.broken or fact(), limit(3)), "some process did not come"
        assert not self.broken, "another process has failed"


class Shared:
    """What the processes of a communicator share: their numbers in the job, and what they exchange."""

    def __init__(self, job: Job, members: tuple[int, ...]):
        self.job, self.members, self.revoked = job, members, False
        self.calls: Any = defaultdict(dict)  # values by rank, of each collective
        self.mail: Any = defaultdict(list)  # (source, tag, message), by the receiver's rank
        self.made: dict[Any, Shared] = {}  # communicators of some of them

    @property
    def size(self) -> int:
        return len(self.members)

    def Translate_ranks(self, ranks: list[int] | None, other: Shared) -> list[int]:
        return [other.members.index(self.members[rank]) for rank in (range(self.size) if ranks is None else ranks)]


class Comm:
    """A communicator, in the view of one process."""

    def __init__(self, shared: Shared, number: int):
        self.group, self._job, self._number = shared, shared.job, number
        self.rank, self.size = shared.members.index(number), shared.size
        self._counts: Counter[str] = Counter()

    def Set_errhandler(self, _handler: Any) -> None: ...

    def Ack_failed(self) -> None: ...

    # --- collectives --------------------------------------------------------------------------------------------------

    def _all(self, value: Any, kind: str = "") -> tuple[Any, list[Any]]:
        """Return a key of this collective, and the values by rank; `None` of the dead."""
        key = kind, self._counts[kind]
        self._counts[kind] += 1
        with self._job.changed:
            values = self.group.calls[key]
            values[self.rank] = value
            self._job.changed.notify_all()
            self._job.wait_for(lambda: self._alive() <= values.keys() or (self.group.revoked and not kind))
        if len(values) < self.size and not kind:
            raise OSError("a process is lost")
        return key, [values.get(rank) for rank in range(self.size)]

    def _alive(self) -> set[int]:
        return {rank for rank, number in enumerate(self.group.members) if number not in self._job.dead}

    def _made(self, key: Any, members: tuple[int, ...]) -> Comm:
        with self._job.changed:
            return Comm(self.group.made.setdefault((key, members), Shared(self._job, members)), self._number)

    def allgather(self, value: Any) -> list[Any]:
        return self._all(value)[1]

    def bcast(self, value: Any, root: int) -> Any:
        return self._all(value)[1][root]

    def Dup(self) -> Comm:
        return self._made(self._all(None)[0], self.group.members)

    def Split(self, color: int, order: int) -> Comm | None:
        key, values = self._all((color, order))
        chosen = sorted((o, rank) for rank, (c, o) in enumerate(values) if c == color)
        return None if color == -1 else self._made(key, tuple(self.group.members[rank] for _, rank in chosen))

    def Agree(self, flag: int) -> int:
        flags = self._all(flag, "agree")[1]
        if None in flags:
            raise OSError("a process is lost")
        return min(flags)

    def Shrink(self) -> Comm:
        key, here = self._all(True, "shrink")
        return self._made(key, tuple(n for n, there in zip(self.group.members, here, strict=True) if there))

    def Revoke(self) -> None:
        with self._job.changed:
            self.group.revoked = True
            self._job.changed.notify_all()

    def Create_intercomm(self, root: int, pair: Comm, remote: int, _tag: int) -> Any:
        """Join the process at the other end of `pair`, on rank `root`, whose communicator only has that process."""
        pair, remote = self._all((pair, remote))[1][root]  # the others' do not count
        assert pair.rank != remote
        with self._job.changed:
            if self.size > 1 or pair.rank == 0:
                members = (*self.group.members, pair.group.members[remote])
                pair.group.made.setdefault("joined", Shared(self._job, members))
                self._job.changed.notify_all()
            self._job.wait_for(lambda: "joined" in pair.group.made)
        joined = Comm(pair.group.made["joined"], self._number)

        def merge(high: bool) -> Comm:
            assert high == (joined.rank == joined.size - 1)
            return joined

        return SimpleNamespace(Merge=merge)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: Any, rank: int, tag: int) -> None:
        with self._job.changed:
            self.group.mail[rank].append((self.rank, tag, message))
            self._job.changed.notify_all()

    isend = send

    def Iprobe(self, _source: int, tag: int, status: Any) -> bool:
        assert not self._job.broken
        with self._job.changed:
            status.source = next((s for s, its, _ in self.group.mail[self.rank] if its == tag), None)
            return status.source is not None

    def recv(self, source: int, tag: int) -> Any:
        mail = self.group.mail[self.rank]
        with self._job.changed:
            self._job.wait_for(lambda: any(m[:2] == (source, tag) for m in mail))
            return mail.pop(next(n for n, m in enumerate(mail) if m[:2] == (source, tag)))[2]

    def Get_failed(self) -> Shared:
        return Shared(self._job, tuple(n for n in self.group.members if n in self._job.dead))


class CommSelf(Comm):
    """The communicator of one process, which can spawn others."""

    def Spawn(self, *_: Any) -> Any:
        pair = self._job._spawn(self._number)
        return SimpleNamespace(Merge=lambda high: pair)


class Transport:
    """What `ElasticProcesses` uses of an `MPITransport`: carries out operations, also after losses."""

    def __init__(self, job: Job, mpi: Any):
        self._job, self.mpi, self.survives = job, mpi, job.survives
        self.lifetime = SimpleNamespace(closed=False, terminated=False)
        self.peers: dict[Process, Any] = {}
        self.confirmed = self.completed = 0
        self.watched: list[ProcessGroup] = []
        self.on_lost: Callable[..., None]

    def set_group(self, group: ProcessGroup) -> None:
        self.group, self.rank = group, group.comm.rank
        assert group.comm.size == len(group.everyone)

    def run(self, operation: Any) -> None:
        while True:
            comm = self.group.comm
            try:
                assert len(set(comm.allgather(operation.about))) == 1
                return operation.carry_out(comm)
            except OSError:
                comm.Revoke()
            survivors = self.group.subgroup(comm.Shrink())
            self.on_lost(survivors, self.group.lost_in(survivors), ("a step", 0.25))

    def collective(self) -> Any:
        return nullcontext()

    def watch_over(self, group: ProcessGroup) -> None:
        self.watched.append(group)

    def mark_begun(self, _operation: Any) -> None: ...

    def confirm_alive(self) -> None:
        self.confirmed += 1

    def on_peers(self, peers: Mapping[Process, Any]) -> None:
        self.peers = dict(peers)
