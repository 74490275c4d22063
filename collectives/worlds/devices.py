"""The devices of one process, with one worker on each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import numpy as np

from adaptive.base.channel import Arrived, Channel, PartSpec, SentMessage
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import World

from .base import WorldBase, describe
from .reducing.receive_buffers import describe_layout
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
      ValueError: `devices` is empty, or contains a device twice or of another process.
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
        self.devices = checked_devices(jax.local_devices() if devices is None else devices)
        WorkerSlots.__init__(self, len(self.devices), workers, min_workers)
        self.respawn = respawn
        self.workers = range(self.capacity)
        self._sharded = Sharded(self.devices, self.devices)

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> MeshChannel:
        """Return a channel for messages of one layout: see `World.channel`."""
        return MeshChannel(self, self._sharded, parts, status)

    def worker_mesh(self) -> WorkerMesh | None:
        """Return a mesh of the workers' devices: see `World`."""
        return self._sharded

    def run_on_mesh(
        self, program: Callable[[np.ndarray], T], status: np.ndarray, about: str = "", more: str = "", layout: str = ""
    ) -> T:
        """Call `program` with the status of the only process: see `World`."""
        self.lifetime.check_open()
        with ONE_AT_A_TIME:
            return program(status)

    def __repr__(self) -> str:
        there, empty = self.size, self.capacity - self.size
        reserve = f", {empty} slot{'s' * (empty > 1)} empty" if empty else ""
        return f"DeviceWorld({there} worker{'s' * (there > 1)} on {describe(self.devices)}{reserve})"


class MeshChannel(Channel):
    """A channel of a world whose workers' devices are a mesh: see `Channel`. One XLA program reduces a message, by NCCL
    or gloo between processes. Its results are new arrays in each exchange.

    Args:
      world: the world.
      sharded: the mesh, and the programs over it.
      layout, status: see `World.channel`.
    """

    def __init__(self, world: World, sharded: Sharded, layout: Sequence[PartSpec], status: int):
        self._world, self._sharded, self._ops = world, sharded, [part.op for part in layout]
        self._text, self._compiled = describe_layout(layout, status), False

    def exchange(self, message: SentMessage) -> Arrived:
        """Reduce a message over all workers: see `Channel.exchange`."""
        world, sharded = self._world, self._sharded
        joined = sharded.join(message.parts, self._ops, message.step, world.members)
        if not self._compiled:  # before processes meet: the others would wait for the compilation
            sharded.compile(joined)
            self._compiled = True

        def run(status: np.ndarray) -> Arrived:
            return sharded.copies(jax.block_until_ready(sharded.reduce(joined))), status

        return world.run_on_mesh(run, message.status, message.about, message.more, self._text)


def checked_devices(devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
    """Return the devices, each of which can have a worker of this process.

    Raises:
      ValueError: `devices` is empty, or contains a device twice or of another process.
    """
    elsewhere = {device.process_index for device in devices} - {jax.process_index()}
    if devices and len(set(devices)) == len(devices) and not elsewhere:
        return tuple(devices)
    what = "are empty" if not devices else f"are of process {min(elsewhere)}" if elsewhere else "name a device twice"
    raise ValueError(
        f"devices= {what}: {[str(d) for d in devices]}. Pass one device of process {jax.process_index()} per worker, "
        "for example jax.local_devices(); jax.config.update('jax_num_cpu_devices', 4) makes four devices of one CPU."
    )
