"""The devices of one process, with one worker on each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import numpy as np

from adaptive.base.channel import Arrived, Channel, PartSpec, SentMessage
from adaptive.base.reductions import Reduction
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.base.worker_slots import WorkerSlots

from .base import WorldBase, describe
from .reducing.sharded import ONE_AT_A_TIME, Sharded

T = TypeVar("T")


class DeviceWorld(WorkerSlots, WorldBase):
    """One process, one worker per device; batches may differ in size from device to device.

    Each worker's kernels are dispatched to its own device, so they run in parallel. An exchange combines the workers'
    arrays, without a copy, to arrays sharded over the devices, and reduces them in one XLA program, compiled once per
    layout.

    Between two steps a device's worker may `leave`, and another one `join` on its slot. At their next step, programs
    in this world split the batch over the present members; they compile nothing. A hook can also request a number of
    workers: `rescale(workers=…)`.

    Args:
      devices: one per worker; all local ones by default.
      workers: how many of the devices have a worker at the start; the others are in reserve. By default all.
      min_workers: the least number of workers that can be requested.
      respawn: whether workers that leave by `leave` are replaced from the reserve.

    Raises:
      WorkerCountError: `workers` is not between `min_workers` and the number of devices.
      ValueError: `devices` is empty or contains a device twice.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        workers: int | None = None,
        min_workers: int = 1,
        respawn: bool = False,
    ):
        WorldBase.__init__(self)
        self.devices: Sequence[jax.Device] = tuple(jax.local_devices() if devices is None else devices)
        check_devices(self.devices)
        WorkerSlots.__init__(self, len(self.devices), workers, min_workers)
        self.respawn = respawn
        self.workers = range(self.capacity)
        self._sharded = Sharded(self.devices, self.devices)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> DeviceChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return DeviceChannel(self, [part.op for part in parts])

    def worker_mesh(self) -> WorkerMesh | None:
        """Return a mesh of the workers' devices: see `World`."""
        return self._sharded

    def run_on_mesh(self, program: Callable[[np.ndarray], T], status: np.ndarray, about: str = "", more: str = "") -> T:
        """Call `program` with the status of the only process: see `World`."""
        self.lifetime.check_open()
        with ONE_AT_A_TIME:
            return program(status)

    def __repr__(self) -> str:
        there, empty = self.size, self.capacity - self.size
        reserve = f", {empty} slot{'s' * (empty > 1)} empty" if empty else ""
        return f"DeviceWorld({there} worker{'s' * (there > 1)} on {describe(self.devices)}{reserve})"


class DeviceChannel(Channel):
    """A channel of a `DeviceWorld`: see `Channel`. Its results are new arrays in each exchange."""

    def __init__(self, world: DeviceWorld, ops: Sequence[Reduction]):
        self._world, self._ops = world, ops

    def exchange(self, message: SentMessage) -> Arrived:
        """Reduce a message in one sharded XLA program: see `Channel.exchange`. The status needs no reduction."""
        world, sharded = self._world, self._world._sharded
        world.lifetime.check_open()
        joined = sharded.join(message.parts, self._ops, message.step, world.members)
        with ONE_AT_A_TIME:
            reduced = jax.block_until_ready(sharded.reduce(joined))
        return sharded.copies(reduced), message.status


def check_devices(devices: Sequence[jax.Device]) -> None:
    """Check that each of `devices` can have a worker.

    Raises:
      ValueError: `devices` is empty or contains a device twice.
    """
    if not devices or len(set(devices)) < len(devices):
        what = "name a device twice" if devices else "are empty"
        raise ValueError(
            f"devices= {what}: {[str(d) for d in devices]}. Pass one device per worker, for example "
            "jax.local_devices(); jax.config.update('jax_num_cpu_devices', 4) makes four devices of one CPU."
        )
