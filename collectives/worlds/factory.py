"""`comm.world()`: selects the world by how this process was started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from warnings import warn

import jax
from jax.sharding import Mesh

from adaptive import CollectiveError, WorkerCountError
from adaptive.base.process.launcher import launcher, tasks_not_started
from adaptive.base.worker_slots import number_of_workers

from .launch import LaunchWarning, works_alone
from .watchdog import check_hang_timeout

if TYPE_CHECKING:
    from .devices import DeviceWorld
    from .jax_world import JaxWorld
    from .mpi import MPIWorld
    from .solo import SoloWorld


def world(
    devices: Sequence[jax.Device] | None = None,
    *,
    mesh: Mesh | None = None,
    batch_axes: str | Sequence[str] | None = None,
    workers: int | None = None,
    min_workers: int = 1,
    max_workers: int | None = None,
    respawn: bool = False,
    lost: Literal["continue", "stop"] | None = None,
    hang_timeout: float | None = None,
) -> MPIWorld | JaxWorld | DeviceWorld | SoloWorld:
    """Return the world of all workers, selected by how the process was started. One script then runs everywhere:

    * After `jax.distributed.initialize()` with several processes: a `JaxWorld`, one worker per device; also under
      mpirun or srun, unless only some of the started processes were initialized.
    * Started by mpirun, mpiexec or srun: an `MPIWorld`, one worker per rank.
    * Several devices in this process: a `DeviceWorld`, one worker per device.
    * Otherwise a `SoloWorld`.

    The last two warn (`LaunchWarning`) in a Slurm job of several tasks that was not started by `srun`. In a `JaxWorld`
    processes neither join nor leave, so options that need this are errors there.

    Args:
      devices: the devices of this process, with one worker each. By default all of them; under MPI, one per rank.
      mesh: this process's devices as a mesh, with axes of type `Auto`. They are then one worker, whose state may be
        sharded over them; gradients are reduced between workers shard by shard. All workers have meshes of one shape.
      batch_axes: the axes of `mesh` over which a worker's examples are split; by default the first one. Sizes of
        batches are multiples of the number of parts. `()`: each device gets all of them, for tensor parallelism alone.
      workers: number of workers at the start; the others are in reserve until a hook requests them by
        `rescale(workers=…)`. By default all.
      min_workers: the least number of workers: hooks cannot request fewer, and with fewer left all processes stop.
      max_workers: the largest number of workers under MPI. If a hook requests more than were started, processes are
        spawned. By default the number that was started. In one process it is the number of devices.
      respawn: whether workers that are lost or receive a termination signal are replaced from the reserve, or, with
        `max_workers`, by spawned ones.
      lost: whether the other processes "continue" or "stop" when processes are lost. By default they continue if the
        job was started by Open MPI's `mpirun --with-ft ulfm`, as `adaptive run` does.
      hang_timeout: seconds for which one rank may keep all others waiting before it is reported as stuck. After twice
        that time it is killed, if the others can continue; else the job ends. 0: no limit. By default, 60, but for a
        rank that is stopped, or idle in a step, ten times the 99th percentile of the time between messages, and at
        least 2. The same on all ranks. Has no effect in one process.

    Returns:
      A context manager: `with comm.world() as world: ...`. It has `size` (workers now), `rank` (this process) and
      `barrier()`. Inside its block, collectives that are called outside a program use it.

    Raises:
      CollectiveError: `hang_timeout` is not a number of seconds; or `mesh` cannot be a worker's: it has devices of
        other processes, or axes of other types, or is given beside `devices` or under `jax.distributed`.
      LaunchError: the process was started by a launcher of MPI programs, but MPI cannot be loaded or belongs to another
        launcher; or `lost` is "continue", and this MPI does not support it.
      WorkerCountError: a number of workers is not possible, or this world's workers neither join nor leave.

    Example:
      >>> import jax, collectives as comm
      >>> with comm.world(devices=jax.local_devices()[:1]) as world:
      ...     print(world)
      SoloWorld(1 worker on cpu:0)
    """
    check_hang_timeout(hang_timeout)
    _check_mesh(mesh, batch_axes, devices)
    if _joined_by_jax():
        _check_fixed_processes(max_workers=max_workers, respawn=respawn, lost=lost)
        from .jax_world import JaxWorld

        joined = JaxWorld(devices, hang_timeout=hang_timeout)
        try:
            _check_fixed(joined.capacity, workers, min_workers)
        except WorkerCountError:
            joined.close()  # on all processes: they have the same arguments
            raise
        return joined
    if launcher() is not None:
        from .mpi import MPIWorld

        return MPIWorld(
            devices=devices,
            mesh=mesh,
            batch_axes=batch_axes,
            workers=workers,
            min_workers=min_workers,
            max_workers=max_workers,
            respawn=respawn,
            lost=lost,
            hang_timeout=hang_timeout,
        )
    if tasks := tasks_not_started():
        warn(works_alone(tasks), LaunchWarning, stacklevel=2)
    found = jax.local_devices() if devices is None else devices
    if len(found) != 1 and mesh is None:
        from .devices import DeviceWorld

        return DeviceWorld(found, workers=workers, min_workers=min_workers, respawn=respawn)
    from .solo import SoloWorld

    _check_fixed(1, workers, min_workers)
    return SoloWorld(mesh=mesh, batch_axes=batch_axes) if mesh is not None else SoloWorld(found[0])


def _check_mesh(
    mesh: Mesh | None, batch_axes: str | Sequence[str] | None, devices: Sequence[jax.Device] | None
) -> None:
    """Raise if the arguments contradict each other, or processes are joined by `jax.distributed`."""
    if mesh is None:
        if batch_axes is not None:
            raise CollectiveError(f"batch_axes={batch_axes!r} without mesh=: they are axes of a worker's mesh.")
        return
    if devices is not None:
        raise CollectiveError("devices= and mesh= exclude each other: a mesh names the devices of its worker.")
    if _joined_by_jax():
        raise CollectiveError(
            "mesh= is not available under jax.distributed, where each device is a worker. Start the job under MPI "
            "(`adaptive run`, mpirun) without jax.distributed.initialize(): then each process is a worker."
        )


def _joined_by_jax() -> bool:
    """Return whether `jax.distributed` has initialized several processes, and all that a launcher has started."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    started = launcher()
    return started is None or started.processes in (None, jax.process_count())


def _check_fixed_processes(*, max_workers: int | None, respawn: bool, lost: str | None) -> None:
    """Raise if an option needs processes to join, or to continue without a lost one."""
    asked = {"max_workers": max_workers, "respawn": respawn or None, "lost": None if lost == "stop" else lost}
    for name, value in asked.items():
        if value is not None:
            raise WorkerCountError(
                f"{name}={value!r}: under jax.distributed, no process can join, and if one is lost all end. Omit the "
                "option; or start the job under MPI (`adaptive run`, mpirun), without jax.distributed.initialize()."
            )


def _check_fixed(capacity: int, workers: int | None, min_workers: int) -> None:
    """Raise if the arguments request another number of workers than `capacity`."""
    if workers is not None:
        number_of_workers(workers, capacity, least=capacity)
    number_of_workers(min_workers, capacity, name="min_workers")
