"""The world that fits how this process was started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax

from adaptive.extend import launcher

from .devices import DeviceWorld
from .mpi import MPIWorld
from .solo import SoloWorld


def world(
    devices: Sequence[jax.Device] | None = None,
    *,
    lost: Literal["continue", "stop"] | None = None,
    min_workers: int = 1,
) -> MPIWorld | DeviceWorld | SoloWorld:
    """All workers there are: the same script runs as one worker, on several devices, and under `mpirun -n N`.

    * Started by mpirun, mpiexec or srun: an `MPIWorld`, one worker per rank.
    * Several devices in this process: a `DeviceWorld`, one worker per device.
    * Else a `SoloWorld`.

    Args:
      devices: those of this process to put workers on. By default all of them, but one per rank under MPI.
      lost: what the others do when processes are lost: "continue" or "stop". By default they go on where MPI was
        started so that they can: by Open MPI's `mpirun --with-ft ulfm`.
      min_workers: with fewer workers left, all stop.

    Returns:
      A context manager: `with comm.world() as world: ...`. It has `size` (workers), `rank` (this process) and
      `barrier()`. Inside its block, collectives that are called outside a program go through it.

    Raises:
      LaunchError: started by a launcher of MPI programs, but MPI cannot be loaded, or is not the launcher's; or losses
        are to be survived, and cannot be.

    Example:
      >>> import jax, collectives as comm
      >>> with comm.world(devices=jax.local_devices()[:1]) as world:
      ...     print(world)
      SoloWorld(1 worker on cpu:0)
    """
    if launcher() is not None:
        return MPIWorld(devices=devices, lost=lost, min_workers=min_workers)
    found = jax.local_devices() if devices is None else devices
    return SoloWorld(found[0]) if len(found) == 1 else DeviceWorld(found)
