"""A job of processes that are threads and have an `ElasticWorld`, on stand-ins for MPI and the transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from adaptive import Preempted, ReserveReleased, WorkerError
from collectives.worlds.elastic.elastic_world import ElasticWorld, slots_at_start
from collectives.worlds.elastic.spawning import receive_spawn_request
from collectives.worlds.transport.process_group import Process, ProcessGroup
from launchers.ending import SPAWNED
from tests.collectives.worlds.mpi_of_threads import MPI, Comm, InterComm, Job, Killed, MPIError, Shared


class ElasticJob(Job):
    """A job of `processes`. The other arguments are those of `MPIWorld`. Errors that end a script are results, too.

    Spawned processes have the numbers after those of the others.

    Args:
      devices: number of workers of each process.
      spawned_program: digests of what the spawned processes have built; those of the others are {"driver": "a"}.
    """

    ends = Killed, Preempted, ReserveReleased, WorkerError, SystemExit  # which tests look at

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
        super().__init__(processes)
        self._devices, self._arguments = devices, (workers, min_workers, max_workers)
        self.survives, self._respawn, self._spawned_program = survives, respawn, spawned_program or {"driver": "a"}

    def run(self, script: Callable[[int, World], Any]) -> dict[int, Any]:
        """Run `script(number, its processes)` in all processes, also in those that are spawned; return the results."""
        self._script = script
        super().run(lambda comm: script(comm.number, self._started(comm)))
        return dict(sorted(self.results.items()))

    def world(self, digests: Mapping[str, str]) -> World:
        """Return a world without processes."""
        made = World(None, respawn=self._respawn, spawns=self._arguments[2] is not None)
        made.build_digests = digests
        return made

    def _started(self, comm: Comm) -> World:
        k = self._devices
        names = [Process(range(k * n, k * n + k), "a", 0, n) for n in range(self.size)]
        transport = Transport(self, MPIOfProcess(self, comm.number))
        everyone = ProcessGroup(comm, tuple(names))
        slots = slots_at_start(k * self.size, *self._arguments)
        world = self.world({"driver": "a"})
        world.set_processes(transport, everyone, slots, self._arguments[0])
        return world

    def spawn(self, spawner: int) -> Comm:
        """Start a spawned process. Returns the spawner's communicator with it."""

        def script() -> Any:
            mpi = MPIOfProcess(self, number, Comm(pair, number))
            both, request = receive_spawn_request(mpi, {SPAWNED: "1"})
            world = self.world(self._spawned_program)
            world.set_processes(Transport(self, mpi), request.group(mpi.COMM_SELF.Dup()), request.worker_slots)
            world.await_admission(both, request.world_number)
            return self._script(number, world)

        with self.changed:  # several threads may spawn
            number = len(self.threads)
            pair = Shared(self, (spawner, number))
            self.start(number, script)
        return Comm(pair, spawner)


class MPIOfProcess(MPI):
    """The module, in the view of one process; `pair`: of a spawned one, its communicator with the spawner."""

    def __init__(self, job: ElasticJob, number: int, pair: Comm | None = None):
        self.COMM_SELF = Comm(Shared(job, (number,)), number)
        self.Comm = SimpleNamespace(Get_parent=lambda: pair and InterComm(pair))


class World(ElasticWorld):
    """The world of one process. Nothing is sent when it fails or is abandoned."""

    def _abandon(self, why: str) -> None: ...


class Transport:
    """What an `ElasticWorld` uses of an `MPITransport`: carries out operations, also after losses."""

    def __init__(self, job: ElasticJob, mpi: MPIOfProcess):
        self.mpi, self.survives = mpi, job.survives
        self.world_number = 0
        self.completed = 0
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
            except MPIError:
                comm.Revoke()
            survivors = self.group.subgroup(comm.Shrink())
            self.on_lost(survivors, self.group.lost_in(survivors), ("a step", 0.25))

    def collective(self, _operation: Any) -> Any:
        return nullcontext()

    def watch_over(self, group: ProcessGroup) -> None:
        self.watched.append(group)

    def report_failure(self, _why: str) -> None: ...
