"""The world that fits how this process was started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from warnings import warn

import jax

from adaptive import WorkerCountError
from adaptive.extend import launcher, number_of_workers, tasks_not_started

from .launch import LaunchWarning, works_alone
from .watchdog.settings import SECONDS, checked

if TYPE_CHECKING:
    from .devices import DeviceWorld
    from .jax_world import JaxWorld
    from .mpi import MPIWorld
    from .solo import SoloWorld


def world(
    devices: Sequence[jax.Device] | None = None,
    *,
    workers: int | None = None,
    min_workers: int = 1,
    max_workers: int | None = None,
    respawn: bool = False,
    lost: Literal["continue", "stop"] | None = None,
    hang_timeout: float = SECONDS,
) -> MPIWorld | JaxWorld | DeviceWorld | SoloWorld:
    """All workers there are: the same script runs as one worker, on several devices, and under `mpirun -n N`.

    * After `jax.distributed.initialize()`, of several processes: a `JaxWorld`, one worker per device of each. A script
      that has joined its processes so, under mpirun or srun too, means that; but not where it has joined only some of
      those that were started.
    * Started by mpirun, mpiexec or srun: an `MPIWorld`, one worker per rank.
    * Several devices in this process: a `DeviceWorld`, one worker per device.
    * Else a `SoloWorld`.

    In a Slurm job of several tasks that nobody has started (`srun` is missing), the last two come with a
    `LaunchWarning`.

    In a `JaxWorld` nobody comes and nobody leaves, so what asks for that is refused there.

    Args:
      devices: those of this process to put workers on. By default all of them, but one per rank under MPI.
      workers: how many workers there are at first; the others are in reserve, until a program asks for them by
        `rescale(workers=…)`. By default all there are.
      min_workers: with fewer workers left, all stop; and no program can ask for fewer.
      max_workers: how many workers there may be under MPI: others than were started are spawned when asked for.
        By default as many as were started. In one process there are as many as there are devices.
      respawn: whether workers that are lost, or told to go, are replaced: from the reserve, or, with `max_workers`, by
        spawning.
      lost: what the others do when processes are lost: "continue" or "stop". By default they go on where MPI was
        started so that they can: by Open MPI's `mpirun --with-ft ulfm`.
      hang_timeout: seconds for which one rank may keep all others waiting before it is named as stuck; after twice that
        it is killed, where losses are survived, or else the job ends. 0: never. The same on all ranks. Where there are
        no other processes, there is nobody to wait for.

    Returns:
      A context manager: `with comm.world() as world: ...`. It has `size` (workers now), `rank` (this process)
      and `barrier()`. Inside its block, collectives that are called outside a program go through it.

    Raises:
      CollectiveError: `hang_timeout` is no number of seconds.
      LaunchError: started by a launcher of MPI programs, but MPI cannot be loaded, or is not the launcher's; or losses
        are to be survived, and cannot be.
      WorkerCountError: there cannot be so many workers, or so few; or they are to come and go where they cannot.

    Example:
      >>> import jax, collectives as comm
      >>> with comm.world(devices=jax.local_devices()[:1]) as world:
      ...     print(world)
      SoloWorld(1 worker on cpu:0)
    """
    checked(hang_timeout)
    if _joined_by_jax():
        _check_nobody_comes(max_workers=max_workers, respawn=respawn, lost=lost)
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
    if len(found) != 1:
        from .devices import DeviceWorld

        return DeviceWorld(found, workers=workers, min_workers=min_workers, respawn=respawn)
    from .solo import SoloWorld

    _check_fixed(1, workers, min_workers)
    return SoloWorld(found[0])


def _joined_by_jax() -> bool:
    """Whether `jax.distributed` joins several processes, and all that a launcher has started, if one has."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    started = launcher()
    return started is None or started.processes in (None, jax.process_count())


def _check_nobody_comes(*, max_workers: int | None, respawn: bool, lost: str | None) -> None:
    """Raise where processes are to join, or to go on without one that is lost."""
    asked = {"max_workers": max_workers, "respawn": respawn or None, "lost": None if lost == "stop" else lost}
    for name, value in asked.items():
        if value is not None:
            raise WorkerCountError(
                f"{name}={value!r}: the processes of jax.distributed are those that it was initialised with. None "
                "joins, and where one is lost all end. Leave it out; or start the job under MPI (`adaptive run`, "
                "mpirun), without jax.distributed.initialize()."
            )


def _check_fixed(capacity: int, workers: int | None, min_workers: int) -> None:
    """Raise where there are to be other workers than there are."""
    if workers is not None:
        number_of_workers(workers, capacity, least=capacity)
    number_of_workers(min_workers, capacity, name="min_workers")
