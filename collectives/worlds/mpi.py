"""A world of MPI processes. The only module that imports mpi4py; other modules receive `mpi4py.MPI` as an argument."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from adaptive import WorkerError
from adaptive.base.channel import PartSpec
from adaptive.base.local_mesh import LocalMesh
from adaptive.base.process.cores import allowed_cpus, chosen_threads
from adaptive.extend import share_compilations
from launchers import ending

from .base import describe
from .devices import DeviceWorld, checked_devices
from .elastic.elastic_world import ElasticWorld, slots_at_start
from .elastic.spawning import receive_spawn_request
from .launch import check_agreement, no_mpi, warn_about_cores
from .transport.mpi_channel import MPIChannel
from .transport.mpi_transport import MPITransport
from .transport.process_group import ProcessGroup, all_processes
from .transport.repair import all_agree, enabled, prepare_environment, survives
from .watchdog import Watchdog, be_seen, check_same

if TYPE_CHECKING:
    from mpi4py import MPI

_WORLD_BITS = 62
_making = Lock()  # duplicating a communicator is collective, which two threads must not do at once


class MPIWorld(ElasticWorld):
    """One worker per MPI rank, or one per device of each rank. A rank with several devices first sums over them.

    Each operation begins with a preamble (`transport/transport.py`), which detects ranks in different collectives.
    Threads may share a world; their collectives then take turns. Programs that run in threads of their own need a world
    each, because the order in which they run differs between ranks.

    Args:
      comm: an mpi4py communicator, which is duplicated; COMM_WORLD by default.
      devices: the devices of this process, one worker on each; ranks may have different numbers. By default one: JAX's
        first CPU, or, on a host with several accelerators, the one with this rank's number on its host.
      max_workers: see `world`. Programs are compiled for this many worker slots.
      mesh, batch_axes, workers, min_workers, respawn, lost, hang_timeout: see `world`.

    Attributes:
      rank, processes: rank of this process and number of processes in the present group. Ranks of a host are
        consecutive, also where MPI's own ranks alternate between hosts. When processes are lost, the others are
        renumbered in their old order.
      waited: seconds spent in preambles so far, that is, waiting for the last rank. Local.
      library: MPI's version string.
      transport: performs the operations of the processes.
      watchdog: has stuck ranks detected; None if hang_timeout is 0 or this process is the only one.

    Raises:
      LaunchError: MPI cannot be loaded, or belongs to another launcher; or `lost` is "continue", and this MPI does not
        support it.
      WorkerCountError: a number of workers is not possible.
      CollectiveError: `hang_timeout` is not a number of seconds.
      DisagreementError: `hang_timeout` differs between ranks. On every rank.
      WorkerError: a process was lost while the world was created.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        devices: Sequence[jax.Device] | None = None,
        *,
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
        workers: int | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        respawn: bool = False,
        lost: str | None = None,
        hang_timeout: float | None = None,
    ):
        super().__init__(hang_timeout, respawn=respawn, spawns=max_workers is not None)
        with ending.making_world(of_all=comm is None), _as_worker_error(mpi := _load()):
            self._mpi = mpi
            self.library: str = mpi.Get_library_version().strip("\0\n ").splitlines()[0]
            if comm is None:
                check_agreement(mpi.COMM_WORLD.size, self.library)
            continues = survives(lost)
            spawned = receive_spawn_request(mpi) if comm is None else None
            whole, host = _ordered_by_host(mpi, comm)
            if whole.size > 1:
                share_compilations()  # already here, for compilations before a program is built
            self.local_mesh = None if mesh is None else LocalMesh(mesh, batch_axes)
            if self.local_mesh is not None:
                devices = [self.local_mesh.device]
            self.devices = checked_devices([_default_device(host.rank)] if devices is None else devices)
            self._local = DeviceWorld(self.devices)
            everyone = ProcessGroup(whole, all_processes(whole, host, len(self.devices)))
            transport = MPITransport(mpi, self.lifetime, survives=continues)
            if spawned is None:
                there = everyone.everyone[-1].worker_slots.stop
                slots = slots_at_start(there, workers, min_workers, max_workers)
                self.set_processes(transport, everyone, slots, workers)
            else:
                pair, request = spawned
                everyone = request.group(whole)
                self.set_processes(transport, everyone, request.worker_slots)
                self.await_admission(pair, request.world_number)
            host.Free()
            cpus = whole.allgather(None if chosen_threads() else allowed_cpus())
            if self.devices[0].platform == "cpu" and self.rank == 0:
                warn_about_cores(everyone.everyone, cpus)
            self._start_watchdog(everyone, spawned=spawned is not None)
            ending.world_made()
            if continues and not all_agree(mpi, whole, True):
                ending.world_ended()
                raise WorkerError("A process was lost during comm.world(). Losses are survived only after it.")

    # --- messages -----------------------------------------------------------------------------------------------------

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> MPIChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return MPIChannel(self, self.transport, self._local.channel, parts, status, name)

    def checkpoint_saved(self, step: int) -> None:
        """Report a checkpoint to the launcher: see `World`."""
        ending.report(saved=step)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _close_together(self) -> None:
        self.dismiss_reserve()
        super()._close_together()
        with suppress(self._mpi.Exception):  # a process lost after the end does not matter
            self.transport.comm.Free()
        ending.world_ended()

    def _start_watchdog(self, group: ProcessGroup, *, spawned: bool) -> None:
        """Start the watchdog, unless this process is alone and stays so. Communicates."""
        transport = self.transport
        be_seen(self._hang_timeout)
        everyone = group.comm.allgather((self._hang_timeout, secrets.randbits(_WORLD_BITS)))
        check_same([hang_timeout for hang_timeout, _ in everyone])
        if not spawned:  # a spawned process learns the number when it joins
            transport.world_number = everyone[0][1]
        if self._hang_timeout != 0 and (len(everyone) > 1 or self.spawns):
            transport.watchdog = Watchdog(transport, self._hang_timeout, partial(_abort, self._mpi))
            transport.watch_over(transport.group)

    def __repr__(self) -> str:
        there = len(self.members)
        s, slots = "s" * (there > 1), f" on {self.capacity} slots" if there < self.capacity else ""
        which = "on standby" if self.in_reserve else f"rank {self.rank} of {self.processes}"
        own = f"{self.workers_in_words} on {self.local_mesh or describe(self.devices)}"
        return f"MPIWorld({there} worker{s}{slots}; {which}: {own})"


def _ordered_by_host(mpi: Any, comm: MPI.Comm | None) -> tuple[Any, Any]:
    """Return a copy of a communicator in which the ranks of a host are consecutive, and the one of this host's ranks.

    An Allreduce of n bytes then sends n from each host, and otherwise up to n for each of its ranks
    (benchmarks/results/sum_between_hosts.md).
    """
    with _making:
        unordered = (mpi.COMM_WORLD if comm is None else comm).Dup()
    host = unordered.Split_type(mpi.COMM_TYPE_SHARED)
    whole = unordered.Split(0, host.bcast(unordered.rank))
    unordered.Free()
    whole.Set_errhandler(mpi.ERRORS_RETURN)  # raise exceptions, whatever the setting of the user's communicator
    return whole, host


def _load() -> ModuleType | Any:
    """Load and return the module `mpi4py.MPI`, with the settings that this library needs."""
    if "mpi4py.MPI" not in sys.modules:
        prepare_environment()
    try:
        if enabled():
            import mpi4py

            mpi4py.rc.finalize = False  # MPI_Finalize would wait forever for lost processes; see `launchers.ending`
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise no_mpi(error) from error
    return MPI


@contextmanager
def _as_worker_error(mpi: Any) -> Iterator[None]:
    """Raise WorkerError in place of MPI's errors while a world is created."""
    try:
        yield
    except mpi.Exception as error:
        raise WorkerError(
            f"comm.world() failed: MPI error ({mpi.Exception.Get_error_string(error)}). Most likely another rank "
            "ended before or during its own comm.world()."
        ) from error


def _abort(mpi: Any, status: int) -> None:
    """Call MPI_Abort to end the other processes, unless fault tolerance is enabled."""
    if not enabled():  # with fault tolerance, Open MPI's Abort ends no others, and mpirun sometimes hangs after it
        mpi.COMM_WORLD.Abort(status)


def _default_device(rank_on_host: int) -> jax.Device:
    devices = jax.local_devices()
    return devices[0] if devices[0].platform == "cpu" else devices[rank_on_host % len(devices)]
