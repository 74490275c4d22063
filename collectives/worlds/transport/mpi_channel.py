"""The channel of an `MPIWorld`: messages of one layout between MPI processes.

Everything that depends only on the layout and the group is computed once: buffers, JAX arrays that alias them, pieces.

A channel has one set of receive buffers. They are written only after the preamble has shown that all processes have
completed the previous message: until then a process may have to hand that message on after a loss (`operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from zlib import crc32

import jax
import numpy as np

from adaptive.base.channel import Arrived, Channel, PartSpec, SentMessage
from adaptive.base.reductions import Mixed
from adaptive.base.world import World
from collectives.worlds.reducing.custom_on_processes import CustomReductions
from collectives.worlds.reducing.receive_buffers import (
    Aliases,
    allocated,
    cuts_of,
    describe_layout,
)
from collectives.worlds.reducing.sharded_parts import ShardedParts

from .mpi_transport import MPITransport
from .operations import ROOM, Operation, broadcast
from .process_group import ProcessGroup


class MPIChannel(Channel):
    """A channel of an `MPIWorld`: see `Channel`.

    Args:
      world: the world.
      transport: performs the operations.
      make_local: creates a channel over this process's devices, if it has several.
      layout, status, name: see `World.channel`. MPI reduces neither half precisions nor booleans.
    """

    def __init__(
        self,
        world: World,
        transport: MPITransport,
        make_local: Callable[[Sequence[PartSpec], int, Hashable], Channel],
        layout: Sequence[PartSpec],
        status: int,
        name: Hashable,
    ):
        mesh = world.local_mesh
        self._sharded = None if mesh is None else ShardedParts(layout, mesh.whole)
        if self._sharded is not None:
            layout = self._sharded.layout
        self._world, self._transport = world, transport
        self._ops = [part.op for part in layout]
        self._named = [j for j, op in enumerate(self._ops) if isinstance(op, str)]
        self._has_custom = len(self._named) < len(layout)
        several = len(world.devices) > 1
        self._local = make_local([layout[j] for j in self._named], status, name) if several else None
        self._on_cpu = world.devices[0].platform == "cpu"
        self._reduction = reduction = ReduceByMPI(transport, layout, status)
        self._aliases = Aliases(reduction.buffers)
        self._default_device = not several and world.devices[0] == self._aliases.device

    def exchange(self, message: SentMessage) -> Arrived:
        """Reduce a message first over this process's workers, and then over all ranks: see `Channel.exchange`."""
        reduction, aliases, row = self._reduction, self._aliases, message.parts[0]
        if self._local is not None:
            row = self._reduced_here(message, self._local)
        if self._sharded is not None:
            row = self._sharded.cut(row)
        if not self._on_cpu:
            for x in row:
                x.copy_to_host_async()
        if self._has_custom:
            world, buffers = self._world, reduction.buffers
            reduction.custom = CustomReductions(buffers, message.parts, self._ops, world, message.step)
        # Without copies. Waits here, not in the collective, for parts that are still being computed.
        reduction.sent = sent = list(map(np.asarray, row))
        if reduction.in_preamble is not None:
            reduction.in_preamble[:] = sent[0]
        if reduction.status_in_preamble:
            reduction.free[:] = message.status
        else:
            reduction.own_status = message.status
        reduction.about, reduction.more = message.about, message.more
        try:
            self._transport.run(reduction)
        finally:
            reduction.sent = []
        if self._sharded is not None:
            return [self._sharded.joined(reduction.buffers)], reduction.arrived
        if self._default_device and aliases.arrays:
            for alias in aliases.arrays:
                if alias.is_deleted():  # it was donated
                    aliases.renew()
            results = [aliases.arrays[:]]
        else:
            results = aliases.on(self._world.devices)
        if reduction.custom is not None:
            results, reduction.custom = reduction.custom.insert_own(results, self._world.devices), None
        return results, reduction.arrived

    def _reduced_here(self, message: SentMessage, local: Channel) -> list[jax.Array]:
        """Reduce the named parts over this process's workers. Returns the first worker's parts of other kinds."""
        rows = [[row[j] for j in self._named] for row in message.parts]
        named = iter(local.exchange(SentMessage(rows, message.status))[0][0])
        parts = zip(message.parts[0], self._ops, strict=True)
        return [next(named) if isinstance(op, str) else x for x, op in parts]


class ReduceByMPI(Operation):
    """The operation that reduces messages of one layout; used for one message after another. Holds no JAX arrays when
    it has ended: the watchdog's thread may hold the last reference, and must not free them when the interpreter ends.

    Not repeated after a loss, because the lost worker's examples would be missing.

    Args:
      transport: performs the operations.
      layout, status: see `World.channel`.

    Attributes:
      buffers: receive the parts.
      in_preamble: the section of the preamble in which part 0 is reduced, in double precision; None if it has no room.
      free: receives the status: after part 0 in the preamble, alone in the preamble, or in part 0's buffer, whichever
        is the first to have room.
      status_in_preamble: whether the status is reduced in the preamble.
      sent: this process's parts.
      own_status: this process's status, if it has no room in the preamble.
      custom: the parts with a custom reduction; None if there are none.
      arrived: the reduced status; shape=(status,), dtype of part 0.
    """

    repeats = False

    def __init__(self, transport: MPITransport, layout: Sequence[PartSpec], status: int):
        text = describe_layout(layout, status)
        super().__init__("", "", crc32(text.encode()), text)
        self.agreed = any(isinstance(part.op, Mixed) for part in layout)  # results differ: none can be handed on
        self.buffers, self._ops, self._transport = allocated(layout), [part.op for part in layout], transport
        self._dtype = self.buffers[0].dtype
        is_float = self._dtype.kind == "f"
        self._limit = float(np.finfo(self._dtype).max) if is_float else -1.0  # largest without rounding
        first = self.buffers[0]
        self.in_preamble = self.room[: len(first)] if len(first) <= ROOM else None
        self.status_in_preamble = status <= ROOM
        where = self.in_preamble if self.in_preamble is not None else self.room if self.status_in_preamble else first
        self.free = where[len(where) - status :]
        self.own_status = self.arrived = np.zeros(0, self._dtype)
        self.sent: Sequence[np.ndarray] = ()
        self.custom: CustomReductions | None = None
        self._group: ProcessGroup | None = None  # for which `_sums` is prepared
        self._sums: list[tuple[int, Any, list[tuple[slice, np.ndarray]]]] = []  # part, MPI's reduction, pieces

    def _prepare(self) -> None:
        """Cut the parts into pieces for the present group."""
        self._sums, transport = [], self._transport
        for j in range(self.in_preamble is not None, len(self.buffers)):
            target, op = self.buffers[j].reshape(-1), self._ops[j]
            if isinstance(op, str):
                cuts = [(place, target[place]) for place in cuts_of(target, transport.piece_bytes)]
                self._sums.append((j, transport.ops[op], cuts))
        self._group = transport.group

    def carry_out(self, comm: Any) -> None:
        """Reduce all parts into the receive buffers."""
        first, sent = self.buffers[0], self.sent
        if self._group is not self._transport.group:
            self._prepare()
        if self.in_preamble is not None:
            if max(map(abs, self.in_preamble.tolist()), default=0.0) <= self._limit:
                first[:] = self.in_preamble
            else:  # out of range, or NaN
                with np.errstate(over="ignore"):
                    first[:] = self.in_preamble
        for number, op, cuts in self._sums:
            source = sent[number].reshape(-1)
            if number == 0 and not self.status_in_preamble:
                source = np.concatenate([source[: len(source) - len(self.own_status)], self.own_status])
            if op != self._transport.mpi.SUM and source.dtype.kind == "f":
                self._reduce_extreme(comm, source, op, cuts)
                continue
            for place, target in cuts:
                comm.Allreduce(source[place], target, op)
        if self.custom is not None:
            everyone = self._transport.group.everyone
            self.custom.reduce(comm, [p.worker_slots for p in everyone], [p.host for p in everyone])
        self.arrived = self.free.astype(self._dtype)

    def _reduce_extreme(self, comm: Any, source: np.ndarray, op: Any, cuts: list[tuple[slice, np.ndarray]]) -> None:
        """Reduce floats and their NaNs apart: whether MPI's extremes keep NaNs depends on the pairing of ranks."""
        mpi, missing = self._transport.mpi, np.isnan(source)
        known = np.where(missing, 0, source) + 0.0  # -0.0 becomes 0.0: MPI's result may be either
        for place, target in cuts:
            comm.Allreduce(known[place], target, op)
            of_all = missing[place].view(np.uint8)
            comm.Allreduce(mpi.IN_PLACE, of_all, mpi.MAX)
            target[of_all > 0] = np.nan

    def send_result(self, comm: Any, root: int) -> None:
        """Broadcast the reduced parts and the status from rank `root`."""
        self.arrived = comm.bcast(self.arrived, root)
        for buffer in self.buffers:
            broadcast(comm, buffer, root)
