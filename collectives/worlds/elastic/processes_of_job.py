"""The `ElasticProcesses` of a process that was started with the job, and of one that others have spawned."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

from adaptive import WorkerCountError
from adaptive.base.worker_slots import WorkerSlots, number_of_workers
from collectives.worlds.transport.mpi_transport import MPITransport
from collectives.worlds.transport.process_group import ProcessGroup

from .elastic_processes import ElasticProcesses
from .spawning import SpawnRequest, as_process

MOST_WORKERS = 1 << 20


def started_processes(
    transport: MPITransport,
    everyone: ProcessGroup,
    workers: int | None,
    min_workers: int,
    max_workers: int | None,
    *,
    respawn: bool,
    abandon: Callable[[], None],
    build_digests: Callable[[], Mapping[str, str]],
) -> ElasticProcesses:
    """Return the processes with which the job was started. For the arguments see `MPIWorld`.

    Raises:
      WorkerCountError: a number of workers is not possible.
    """
    there = everyone.everyone[-1].worker_slots.stop
    first = there if workers is None else number_of_workers(workers, there)
    most = there
    if max_workers is not None:
        most = number_of_workers(max_workers, MOST_WORKERS, least=there, name="max_workers")
    spawns = max_workers is not None
    worker_slots = WorkerSlots(most, first, min_workers)
    processes = ElasticProcesses(
        *(transport, everyone, worker_slots),
        respawn=respawn,
        spawns=spawns,
        abandon=abandon,
        build_digests=build_digests,
    )
    if workers is not None and processes.nearest(workers) != workers:
        raise WorkerCountError(
            f"workers={workers} is not possible: all workers of a process work, or none. The nearest possible number "
            f"is {processes.nearest(workers)}."
        )
    return processes


def spawned_process(
    transport: MPITransport,
    comm: Any,
    pair: Any,
    request: SpawnRequest,
    min_workers: int,
    *,
    respawn: bool,
    spawns: bool,
    abandon: Callable[[], None],
    build_digests: Callable[[], Mapping[str, str]],
) -> ElasticProcesses:
    """Return a spawned process's view of the job: it is on standby, known only to the process that spawned it.

    Args:
      comm: the communicator of this process alone.
      pair: the communicator of this process and the one that spawned it.
    """
    alone = ProcessGroup(comm, (as_process(request, platform.node()),))
    worker_slots = WorkerSlots(request.capacity, None, min_workers)
    for slot in range(request.capacity):
        if slot not in request.members:
            worker_slots.leave(slot)
    processes = ElasticProcesses(
        *(transport, alone, worker_slots),
        respawn=respawn,
        spawns=spawns,
        abandon=abandon,
        build_digests=build_digests,
    )
    processes.await_admission(pair, request.members)
    return processes
