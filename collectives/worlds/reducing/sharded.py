"""Reductions over devices: the workers' parts become sharded arrays, which one XLA program reduces.

The devices may be those of one process (`DeviceWorld`) or of all processes of `jax.distributed` (`JaxWorld`). The
program is the same, and XLA communicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive.base.channel import Parts
from adaptive.base.process.thread_status import thread_status
from adaptive.base.reductions import Mixed, Reduction, Sliced
from adaptive.base.worker_mesh import WorkerMesh

from .custom_on_devices import by_slices, mixed, table

# Programs over several devices that are started by two threads could run in different orders on different devices, and
# deadlock.
ONE_AT_A_TIME = RLock()  # held from the start to the end of an exchange; one thread may have several under way


# Over gloo every collective has a fixed cost: 0.4 ms, and 4 ms for one of 300 kB or of 3 MB if a process has one core
# (docs/results.md). Parts up to this size are therefore concatenated; copying larger ones
# would cost more. On GPUs XLA combines collectives itself.
PACKED_BYTES = 8 << 20


class Joined(NamedTuple):
    """Parts of all workers, as arrays over all devices, and how they are reduced."""

    arrays: list[Any]  # or their shapes
    ops: tuple[Reduction, ...]
    scalar: tuple[bool, ...]  # whether a part was a scalar, which was given an axis
    by_step: Any  # arguments of custom reductions that change in each step


class Sharded(WorkerMesh):
    """A mesh of the workers' devices, and the programs that reduce messages over it.

    Args:
      devices: the devices of all workers, in the order of workers.
      own: the devices of this process, in the order of its workers.
    """

    def __init__(self, devices: Sequence[jax.Device], own: Sequence[jax.Device]):
        super().__init__(devices)
        self._size, self._own = len(devices), own
        self._sharding = NamedSharding(self.mesh, P("worker"))
        packed = devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1
        self._packed_bytes = PACKED_BYTES if packed else 0
        reduce = partial(_reduce, self.mesh, self._packed_bytes)
        self._reduce = jax.jit(reduce, static_argnames=("ops", "scalar"))

    def join(
        self, rows: Sequence[Parts], ops: Sequence[Reduction], step: int = 0, members: Sequence[int] = ()
    ) -> Joined:
        """Join the parts of this process's workers, without a copy, into arrays over all devices."""
        columns, by_step = list(zip(*rows, strict=True)), None
        if not all(isinstance(op, str) for op in ops):
            tables = [table(op, step, members, self._size) if isinstance(op, Mixed) else None for op in ops]
            by_step = np.int32(step), tables
        scalar = tuple(column[0].ndim == 0 for column in columns)
        return Joined([self._join(column) for column in columns], tuple(ops), scalar, by_step)

    @thread_status("compiling", compiles=True)
    def compile(self, joined: Joined) -> None:
        """Compile the program that reduces these arrays, before any process runs it."""
        self._reduce.lower(joined.arrays, joined.by_step, ops=joined.ops, scalar=joined.scalar).compile()

    def reduce(self, joined: Joined) -> list[jax.Array]:
        """Start to reduce these arrays. Called by all processes."""
        return self._reduce(joined.arrays, joined.by_step, ops=joined.ops, scalar=joined.scalar)

    def prepare(self, parts: Sequence[jax.ShapeDtypeStruct], ops: Sequence[Reduction]) -> None:
        """Compile the program for messages of these shapes: see `WorkerMesh`."""
        of_all = [((self._size * (x.shape[0] if x.shape else 1), *x.shape[1:]), x.dtype) for x in parts]
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding) for shape, dtype in of_all]
        by_step = None if all(isinstance(op, str) for op in ops) else (np.int32(0), [None for _ in ops])
        scalar = tuple(not x.shape for x in parts)
        self.compile(Joined(arrays, tuple(ops), scalar, by_step))

    def reduce_within(self, parts: Sequence[jax.Array], ops: Sequence[Reduction], step: jax.Array) -> list[jax.Array]:
        """Reduce one worker's parts, within a program over the mesh: see `WorkerMesh`."""
        return _reduce_own(list(parts), ops, (step, None), self._packed_bytes)

    def copies(self, reduced: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """Return the reduced arrays on the device of each worker of this process."""
        return [list(row) for row in zip(*map(self._copies, reduced), strict=True)]

    def _join(self, column: tuple[jax.Array, ...]) -> jax.Array:
        """Return one array of `size * len` rows, whose shards are the workers' arrays, without a copy."""
        if column[0].ndim == 0:
            column = tuple(x.reshape(1) for x in column)
        shape = (self._size * column[0].shape[0], *column[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, list(column))

    def _copies(self, replicated: jax.Array) -> list[jax.Array]:
        """Return this process's shards in the order of its devices, which may differ from JAX's order."""
        on = {shard.device: shard.data for shard in replicated.addressable_shards}
        return [on[device] for device in self._own]


def _reduce(
    mesh: Mesh,
    packed_bytes: int,
    joined: list[jax.Array],
    by_step: Any,
    *,
    ops: tuple[Reduction, ...],
    scalar: tuple[bool, ...],
) -> list[jax.Array]:
    """Reduce sharded arrays. The results are replicated, or sharded if each worker has its own result. Parts with the
    same reduction and at most `packed_bytes` are concatenated.
    """

    def on_each(parts: list[jax.Array], by_step: Any) -> list[jax.Array]:
        own = [x.reshape(()) if s else x for x, s in zip(parts, scalar, strict=True)]
        return _reduce_own(own, ops, by_step, packed_bytes)

    specs = [P("worker") if isinstance(op, Mixed) else P() for op in ops]
    named = all(isinstance(op, str) for op in ops)  # JAX does not infer that results of all_gather are replicated
    over_workers = jax.shard_map(on_each, mesh=mesh, in_specs=(P("worker"), P()), out_specs=specs, check_vma=named)
    return over_workers(joined, by_step)


def _reduce_own(own: list[jax.Array], ops: Sequence[Reduction], by_step: Any, packed_bytes: int) -> list[jax.Array]:
    """Return one worker's parts, reduced over all workers."""
    groups: dict[Hashable, list[int]] = {}
    for i, (op, x) in enumerate(zip(ops, own, strict=True)):
        alike = op in _BY_ELEMENT and x.nbytes <= packed_bytes
        groups.setdefault((op, x.dtype) if alike else i, []).append(i)
    results: dict[int, jax.Array] = {}
    for group in groups.values():
        reduce = partial(_reduced, ops[group[0]], by_step, group[0])
        results.update(zip(group, _reduce_as_one(reduce, [own[i] for i in group]), strict=True))
    return [results[i] for i in range(len(own))]


def _reduced(op: Reduction, by_step: Any, part: int, x: jax.Array) -> jax.Array:
    if x.size == 0 and not isinstance(op, Mixed):
        # XLA's compiler of JAX 0.11.2 crashes if a program has an all-reduce of no elements and another all-reduce.
        return jnp.zeros(x.shape, x.dtype)
    if isinstance(op, Mixed):
        return mixed(x, by_step[1][part], "worker")
    return by_slices(op, x, by_step[0], "worker") if isinstance(op, Sliced) else _REDUCE[op](x)


def _reduce_as_one(reduce: Callable[[jax.Array], jax.Array], parts: list[jax.Array]) -> list[jax.Array]:
    """Apply `reduce` to the concatenation of the parts, and split the result."""
    if len(parts) == 1:
        return [reduce(parts[0])]
    ends = list(itertools.accumulate(x.size for x in parts))
    pieces = jnp.split(reduce(jnp.concatenate([x.ravel() for x in parts])), ends[:-1])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)]


def _extreme(collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Reduce by a maximum or minimum that keeps NaNs, as in other worlds: XLA's collectives drop them on CPU."""
    extreme = collective(x, "worker")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme
    seen = jax.lax.pmax(jnp.isnan(x).astype(jnp.int32), "worker")
    return jnp.where(seen > 0, jnp.asarray(jnp.nan, x.dtype), extreme)


# The reduction of a part over all devices, by name, with the same bits on all of them. Add new reductions here.
_REDUCE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": lambda x: jax.lax.psum(x, "worker"),
    "max": partial(_extreme, jax.lax.pmax),
    "min": partial(_extreme, jax.lax.pmin),
}
_BY_ELEMENT = frozenset(_REDUCE)  # reductions for which parts can be concatenated
