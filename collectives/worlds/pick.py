"""The world that fits how this process was started."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from adaptive import MembersError
from adaptive.extend import launcher, number_of_workers

from .devices import DeviceWorld
from .mpi import MPIWorld
from .solo import SoloWorld


def world(
    devices: Sequence[jax.Device] | None = None, *, workers: int | None = None
) -> MPIWorld | DeviceWorld | SoloWorld:
    """All workers there are: the same script runs as one worker, on several devices, and under `mpirun -n N`.

    * Started by mpirun, mpiexec or srun: an `MPIWorld`, one worker per rank.
    * Several devices in this process: a `DeviceWorld`, one worker per device.
    * Else a `SoloWorld`.

    Args:
      devices: those of this process to put workers on. By default all of them, but one per rank under MPI.
      workers: how many workers there are at first; the others are in reserve, until a program asks for them by
        `rescale(workers=…)`. By default all there are.

    Returns:
      A context manager: `with comm.world() as world: ...`. It has `size` (workers), `rank` (this process) and
      `barrier()`. Inside its block, collectives that are called outside a program go through it.

    Raises:
      MembersError: there cannot be so many workers.
      LaunchError: started by a launcher of MPI programs, but MPI cannot be loaded, or is not the launcher's.

    Example:
      >>> import jax, collectives as comm
      >>> with comm.world(devices=jax.local_devices()[:1]) as world:
      ...     print(world)
      SoloWorld(1 worker on cpu:0)
    """
    if launcher() is not None:
        everyone = MPIWorld(devices=devices)
        if workers is not None and number_of_workers(workers, everyone.size) < everyone.size:
            raise MembersError(
                f"workers={workers}: all {everyone.size} workers of an MPIWorld are there from the start."
            )
        return everyone
    found = jax.local_devices() if devices is None else devices
    if len(found) != 1:
        return DeviceWorld(found, workers=workers)
    if workers is not None:
        number_of_workers(workers, 1)
    return SoloWorld(found[0])
