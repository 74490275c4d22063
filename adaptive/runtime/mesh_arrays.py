"""Arrays over a mesh of workers: joined from those of single workers, or read from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive.base.worker_mesh import WorkerMesh


class MeshArrays:
    """Converts arrays of single workers to arrays over a mesh, and back, without copies on devices.

    Args:
      mesh: the mesh of all processes' workers.
      devices: the devices of this process's workers, in order.

    Attributes:
      mesh: as given.
      everywhere: the sharding of arrays with a copy, or its own worker's value, on each device.
      split: the sharding of arrays with a row per worker.
    """

    def __init__(self, mesh: WorkerMesh, devices: Sequence[jax.Device]):
        self.mesh = mesh
        self.everywhere, self.split = NamedSharding(mesh.mesh, P()), NamedSharding(mesh.mesh, P(mesh.axis))
        self._devices, self._workers = list(devices), mesh.mesh.size
        self._is_alone = self._workers == len(self._devices)  # no other process has devices of the mesh
        order = [shard.device for shard in self.repeated(np.zeros(())).addressable_shards]
        self._places = [order.index(device) for device in self._devices]  # the shard of each worker

    def joined(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return one "replicated" array of the workers' arrays, each on its device. They need not be equal."""
        return jax.make_array_from_single_device_arrays(leaves[0].shape, self.everywhere, list(leaves))

    def repeated(self, value: Any) -> jax.Array:
        """Return an array with a copy of a value on each device."""
        return self.joined(jax.device_put([value] * len(self._devices), self._devices))

    def rows(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Return arrays with a row per worker. `columns`: for each array, the rows of this process's workers."""
        if self._is_alone:
            values = [np.concatenate(column) if len(column) > 1 else column[0] for column in columns]
            return jax.device_put(values, self.split)
        flat = jax.device_put([x for column in columns for x in column], self._devices * len(columns))
        joined, n = [], len(self._devices)
        for start in range(0, len(flat), n):
            rows = flat[start : start + n]
            shape = (self._workers * rows[0].shape[0], *rows[0].shape[1:])
            joined.append(jax.make_array_from_single_device_arrays(shape, self.split, rows))
        return joined

    def apart(self, array: jax.Array) -> list[jax.Array]:
        """Return each worker's array from one that `joined` returned."""
        shards = array.addressable_shards
        return [shards[place].data for place in self._places]

    def of_first(self, array: jax.Array) -> jax.Array:
        """Return the first worker's array from one that `joined` returned."""
        return array.addressable_data(self._places[0])
