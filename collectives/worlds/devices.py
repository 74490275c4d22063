"""The devices of one process, one worker on each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import RLock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive.extend import Arrived, Arriving, LocalBoards, LookAtPiece, Parts, Seats, Starting, WhenWaitedFor

from .scope import Scope, describe

# Two programs that join devices, started in two threads, could be started on two devices in two orders, and wait for
# each other.
_one_at_a_time = RLock()  # from the start to the end of an exchange; one thread may have several under way


class DeviceWorld(Starting, LocalBoards, Seats, Scope):
    """One process, one worker per device; batches may differ in size from device to device.

    Each worker's kernels are dispatched to its own device, so they run side by side. An exchange joins the workers'
    parts, without copying, to arrays sharded over the devices, and reduces all of them in one XLA program, compiled
    once per layout.

    Between two steps a device's worker may `leave`, and another one `join` on its seat. Programs in this world notice
    at their next step: they split the batch over those who are there, and compile nothing. A program changes their
    number itself when it is asked to: `rescale(workers=…)`.

    Args:
      devices: one per worker; all local ones by default.
      workers: how many of the devices have a worker at first; the others are in reserve. By default all.
      min_workers: fewer cannot be asked for.
      respawn: whether workers that leave by themselves are replaced, from the reserve.

    Raises:
      MembersError: `workers` is no number from `min_workers` to that of the devices.
    """

    rank = 0
    processes = 1

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        workers: int | None = None,
        min_workers: int = 1,
        respawn: bool = False,
    ):
        Scope.__init__(self)
        self.devices: Sequence[jax.Device] = tuple(jax.local_devices() if devices is None else devices)
        check_devices(self.devices)
        self.size = len(self.devices)
        Seats.__init__(self, self.size, workers, min_workers)
        self.respawn = respawn
        self.workers = range(self.size)
        mesh = Mesh(np.array(self.devices), ("worker",))
        self._sharding = NamedSharding(mesh, P("worker"))
        self._reduce = jax.jit(partial(_reduce, mesh), static_argnames=("ops", "scalar"))

    def start(
        self,
        parts: Sequence[Parts],
        ops: Sequence[str],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
    ) -> Arriving:
        """Begin to reduce, in one sharded XLA program: the protocol of `World`. The status is the only process's."""
        self._check_open()
        columns = list(zip(*parts, strict=True))
        joined = [self._join(column) for column in columns]
        _one_at_a_time.acquire()
        try:
            reduced = self._reduce(joined, ops=tuple(ops), scalar=tuple(column[0].ndim == 0 for column in columns))
        except BaseException:
            _one_at_a_time.release()
            raise
        return WhenWaitedFor(partial(self._wait_for, reduced, status))

    def _wait_for(self, reduced: list[jax.Array], status: np.ndarray) -> Arrived:
        try:
            jax.block_until_ready(reduced)
        finally:
            _one_at_a_time.release()
        return [list(row) for row in zip(*map(self._copies, reduced), strict=True)], status

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """The only process's value."""
        self._check_open()
        return [value]

    def barrier(self) -> None:
        """There is one process: nobody to wait for."""
        self._check_open()

    def _join(self, column: tuple[jax.Array, ...]) -> jax.Array:
        """One array of `size * len` rows, whose shards are the workers' arrays themselves."""
        if column[0].ndim == 0:
            column = tuple(x.reshape(1) for x in column)
        shape = (self.size * column[0].shape[0], *column[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, list(column))

    def _copies(self, replicated: jax.Array) -> list[jax.Array]:
        """Each worker's copy, by its device: in what order JAX lists shards is its own business."""
        on = {shard.device: shard.data for shard in replicated.addressable_shards}
        return [on[device] for device in self.devices]

    def __repr__(self) -> str:
        there, size = len(self.members), self.size
        reserve = f", {size - there} seat{'s' * (size - there > 1)} empty" if there < size else ""
        return f"DeviceWorld({there} worker{'s' * (there > 1)} on {describe(self.devices)}{reserve})"


def check_devices(devices: Sequence[jax.Device]) -> None:
    """Raise unless `devices` can carry one worker each."""
    if not devices or len(set(devices)) < len(devices):
        what = "name a device twice" if devices else "are empty"
        raise ValueError(
            f"devices= {what}: {[str(d) for d in devices]}. Each worker needs a device of its own, such as those of "
            "jax.local_devices(); jax.config.update('jax_num_cpu_devices', 4) makes four of one CPU."
        )


def _reduce(mesh: Mesh, joined: list[jax.Array], *, ops: tuple[str, ...], scalar: tuple[bool, ...]) -> list[jax.Array]:
    def on_each(parts: list[jax.Array]) -> list[jax.Array]:
        own = [x.reshape(()) if s else x for x, s in zip(parts, scalar, strict=True)]
        return [_REDUCE[op](x) for op, x in zip(ops, own, strict=True)]

    return jax.shard_map(on_each, mesh=mesh, in_specs=P("worker"), out_specs=P())(joined)


def _extreme(collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """XLA's extremes over devices pass over NaNs on CPU; those of arrays, and of the other worlds, keep them."""
    extreme = collective(x, "worker")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme
    seen = jax.lax.pmax(jnp.isnan(x).astype(jnp.int32), "worker")
    return jnp.where(seen > 0, jnp.asarray(jnp.nan, x.dtype), extreme)


_REDUCE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": lambda x: jax.lax.psum(x, "worker"),
    "max": partial(_extreme, jax.lax.pmax),
    "min": partial(_extreme, jax.lax.pmin),
}
