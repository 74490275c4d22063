"""The world that fits how this process was started."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from adaptive.extend import launcher

from .devices import DeviceWorld
from .mpi import MPIWorld
from .patience import SECONDS, checked
from .solo import SoloWorld


def world(
    devices: Sequence[jax.Device] | None = None, *, patience: float = SECONDS
) -> MPIWorld | DeviceWorld | SoloWorld:
    """All workers there are: the same script runs as one worker, on several devices, and under `mpirun -n N`.

    * Started by mpirun, mpiexec or srun: an `MPIWorld`, one worker per rank.
    * Several devices in this process: a `DeviceWorld`, one worker per device.
    * Else a `SoloWorld`.

    Args:
      devices: those of this process to put workers on. By default all of them, but one per rank under MPI.
      patience: seconds for which one rank may keep all others waiting before it is named as stuck; after twice that the
        job ends. 0: never. The same on all ranks. Where there are no other processes, there is nobody to wait for.

    Returns:
      A context manager: `with comm.world() as world: ...`. It has `size` (workers), `rank` (this process) and
      `barrier()`. Inside its block, collectives that are called outside a program go through it.

    Raises:
      CollectiveError: `patience` is no number of seconds.
      LaunchError: started by a launcher of MPI programs, but MPI cannot be loaded, or is not the launcher's.

    Example:
      >>> import jax, collectives as comm
      >>> with comm.world(devices=jax.local_devices()[:1]) as world:
      ...     print(world)
      SoloWorld(1 worker on cpu:0)
    """
    checked(patience)
    if launcher() is not None:
        return MPIWorld(devices=devices, patience=patience)
    found = jax.local_devices() if devices is None else devices
    return SoloWorld(found[0]) if len(found) == 1 else DeviceWorld(found)
