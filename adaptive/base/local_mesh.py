"""The mesh of devices on which one worker computes, and the parts of arrays on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .errors import CollectiveError


class LocalMesh:
    """The mesh of one worker: devices of one process, over which its state and its batch are sharded.

    Args:
      mesh: a mesh of this process's devices, with axes of type `Auto`.
      batch_axes: the axes over which the examples of a batch are split; by default the first one. With `()` each device
        gets all examples.

    Attributes:
      granule: the number of which sizes of batches must be multiples: the number of parts of a split batch.
      whole: the sharding of values of which each device holds a copy.

    Raises:
      CollectiveError: the mesh cannot be a worker's.
    """

    def __init__(self, mesh: Mesh, batch_axes: str | Sequence[str] | None = None):
        _check(mesh)
        self.mesh = mesh
        self.batch_axes = _axes_of(mesh, batch_axes)
        self.granule = math.prod(mesh.shape[axis] for axis in self.batch_axes)
        self.whole = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(self.batch_axes))
        self._devices = frozenset(mesh.devices.flat)

    @property
    def device(self) -> jax.Device:
        """The first device."""
        return self.mesh.devices.flat[0]

    def of_batch(self, examples: int) -> NamedSharding:
        """Return the sharding of a batch's leaves: split, or a copy on each device if it cannot be split evenly."""
        return self.whole if examples % self.granule else self._split

    def of_leaf(self, leaf: Any) -> NamedSharding | None:
        """Return the sharding of a leaf of the initial state; `None` if it is not on this mesh. Raises a
        CollectiveError if it is sharded over another one.
        """
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return sharding
        if sharding is None or sharding.is_fully_replicated:
            return None
        devices = frozenset(sharding.device_set)
        other = "devices of another process" if not leaf.is_fully_addressable else "another mesh of its devices"
        if not devices <= self._devices and leaf.is_fully_addressable:
            other = "devices that are not in its mesh"
        spec = getattr(sharding, "spec", type(sharding).__name__)
        raise CollectiveError(
            f"is sharded over {other} ({spec}), but its worker computes on {self}. Shard it over the mesh that "
            "comm.world(mesh=mesh) was given:  jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))"
        )

    def cut(self, sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
        """Return a sharding in smaller parts, so that as few devices as possible hold the same part.

        Each axis over which an array is replicated splits a dimension, if there is one whose parts it divides.
        """
        spec: list[tuple[str, ...]] = [_names(part) for part in sharding.spec]
        spec += [()] * (len(shape) - len(spec))
        used = {name for names in spec for name in names}
        for axis, size in self.mesh.shape.items():
            for dimension, length in enumerate(shape):
                parts = math.prod(self.mesh.shape[name] for name in spec[dimension])
                if axis not in used and size > 1 and length and length % (parts * size) == 0:
                    spec[dimension] += (axis,)
                    used.add(axis)
        return NamedSharding(self.mesh, PartitionSpec(*(names or None for names in spec)))

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        over = f"batches over {', '.join(self.batch_axes)}" if self.batch_axes else "whole batches on each"
        batches = "" if self.batch_axes == self.mesh.axis_names[:1] else f", {over}"
        return f"a mesh of {self.mesh.size} devices ({axes}{batches})"


def _check(mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise CollectiveError(
            f"mesh= must be a jax.sharding.Mesh; got {type(mesh).__name__}. For example  jax.make_mesh((2, 2), "
            '("fsdp", "tp"), devices=jax.local_devices(), axis_types=(jax.sharding.AxisType.Auto,) * 2)'
        )
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise CollectiveError(
            "mesh= has devices of other processes. A worker is one process, and its mesh consists of that process's "
            "devices:  jax.make_mesh(shape, names, devices=jax.local_devices())"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise CollectiveError(
            f"mesh= has axes of the types {', '.join(map(str, mesh.axis_types))}; a worker's mesh needs the type Auto, "
            f"where XLA completes the shardings:  jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(mesh.axis_names)})"
        )


def _axes_of(mesh: Mesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    chosen = mesh.axis_names[:1] if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [axis for axis in chosen if axis not in mesh.axis_names]
    if unknown:
        raise CollectiveError(
            f"batch_axes={axes!r}: the mesh has the axes {', '.join(map(repr, mesh.axis_names))}. Name those over "
            "which a batch is split, such as  batch_axes='fsdp'"
        )
    return tuple(chosen)


def _names(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


class DeviceParts:
    """The different parts of arrays of one shape and sharding: each element is in one part.

    Attributes:
      shapes: of the parts.
      devices: the devices of the sharding; several may hold the same part.
    """

    def __init__(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding):
        self._shape, self._sharding = shape, sharding
        indices = sharding.devices_indices_map(shape)
        keys = {device: tuple(part.start or 0 for part in index) for device, index in indices.items()}
        numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}  # the same on all workers
        self.devices, self._numbers = list(keys), [numbers[key] for key in keys.values()]
        self._first = [self.devices[self._numbers.index(number)] for number in range(len(numbers))]
        self.shapes = [sharding.shard_shape(shape)] * len(numbers)

    def of(self, array: jax.Array) -> list[jax.Array]:
        """Return the parts of an array, each on a device that has it."""
        on = {shard.device: shard.data for shard in array.addressable_shards}
        return list(map(on.__getitem__, self._first))

    def by_device(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the part of each device, in the order of `devices`."""
        return [parts[number] for number in self._numbers]

    def joined(self, placed: Sequence[jax.Array]) -> jax.Array:
        """Return the array that consists of the parts of `by_device`, which are on their devices."""
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, placed)
