"""The channel of an `MPIWorld`: messages of one layout between MPI processes.

Everything that depends only on the layout and the group is computed once: buffers, JAX arrays that alias them, pieces.
The common message, of one worker on a CPU without custom reductions, then takes a few function calls
(`MPIChannel._exchange_fast`). Every other message takes the general path, as a `ReduceMessage`. Both call MPI in the
same order with the same buffers, so processes need not take the same path.

A channel has one set of receive buffers. They are written only after the preamble has shown that all processes have
completed the previous message: until then a process may have to hand that message on after a loss (`operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any
from zlib import crc32

import numpy as np

from adaptive.base.channel import Arrived, Channel, Parts, PartSpec
from adaptive.base.thread_status import thread_status
from adaptive.base.world import World
from collectives.worlds.reducing.custom_on_processes import CustomReductions
from collectives.worlds.reducing.parts import FlatPart, cuts_of, pieces
from collectives.worlds.reducing.receive_buffers import ReceiveBuffers, check_dtypes, from_keys, keys, round_to

from .mpi_transport import MPITransport
from .operations import ReduceMessage, carried_out
from .process_group import ProcessGroup


class MPIChannel:
    """A channel of an `MPIWorld`: see `Channel`.

    Args:
      world: the world.
      transport: performs the operations.
      make_local: creates a channel over this process's devices, if it has several.
      layout, status, name: see `World.channel`.

    Raises:
      CollectiveError: MPI cannot reduce one of the parts.
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
        check_dtypes(layout)
        self._world, self._transport = world, transport
        self._ops = [part.op for part in layout]
        self._named = [j for j, op in enumerate(self._ops) if isinstance(op, str)]
        self._buffers = buffers = ReceiveBuffers(tuple(layout), status, transport.preamble.room)
        self._status_dtype = buffers.buffers[0].dtype
        is_float = self._status_dtype.kind == "f"
        self._limit = float(np.finfo(self._status_dtype).max) if is_float else -1.0  # largest without rounding
        several = len(world.devices) > 1
        self._local = make_local([layout[j] for j in self._named], status, name) if several else None
        self._on_cpu = world.devices[0].platform == "cpu"
        # Whether layout and devices allow the fast path.
        self._fast = not several and len(self._named) == len(layout) and buffers.status_in_preamble
        self._fast &= buffers.is_default(world.devices[0])
        # The message of the fast path. It holds no JAX arrays: see `ReduceMessage.carry_out`.
        header = buffers.name, buffers.text
        self._message = ReduceMessage("", "", *header, buffers=buffers.buffers, status=np.zeros(0), reduce=carried_out)
        self._group: ProcessGroup | None = None  # for which the fast path is prepared
        self._sums: list[tuple[int, Any, list[tuple[slice, np.ndarray]]]] = []  # part, MPI's reduction, pieces

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Reduce a message over all workers: see `Channel.exchange`."""
        if self._fast:
            # Without copies. Waits here, not in the collective, for parts that are still being computed.
            arrived = self._exchange_fast(list(map(np.asarray, parts[0])), status, about, more)
            if arrived is not None:
                return arrived
        return self._exchange_any(parts, status, about, more, step)

    # --- the fast path ------------------------------------------------------------------------------------------------

    @thread_status("in a collective", exchanges=True)
    def _exchange_fast(self, row: list[np.ndarray], status: np.ndarray, about: str, more: str) -> Arrived | None:
        """Exchange a message in as few function calls as possible. Returns None if it needs the general path.

        Inlines `Transport.collective` and `MPITransport.perform` for a `ReduceMessage`.
        """
        transport, buffers, message = self._transport, self._buffers, self._message
        preamble = transport.preamble
        if transport.lifetime.closed:  # before the lock, which another thread held at a fork
            transport.lifetime.check_open()
        transport.lock.acquire()
        try:
            if transport.torn or get_ident() not in transport.threads:
                transport.check_usable()
        except BaseException:
            transport.lock.release()
            raise
        try:
            if transport.survivors is not None:
                return None
            if self._group is not transport.group:
                self._prepare()
            if buffers.in_preamble is not None:
                buffers.in_preamble[:] = row[0]
            buffers.free[:] = status
            message.about, message.more, message.intents = about, more, None
            preamble.announce(crc32(about.encode(), message.kind))
            transport.operation = message
            transport.begun += 1
            transport.inside = True
            comm = transport.comm
            try:
                came = perf_counter()
                try:
                    comm.Allreduce(transport.mpi.IN_PLACE, preamble.numbers)
                finally:  # also if a process did not come
                    transport.waited += perf_counter() - came
                if preamble.heard() == preamble.expected:
                    arrived = buffers.free.astype(self._status_dtype)
                    if buffers.in_preamble is not None:
                        if max(map(abs, buffers.in_preamble.tolist()), default=0.0) <= self._limit:
                            buffers.buffers[0][:] = buffers.in_preamble
                        else:  # out of range, or NaN
                            round_to(buffers.in_preamble, buffers.buffers[0])
                    for number, op, cuts in self._sums:
                        source = row[number].reshape(-1)
                        if op is None:
                            self._reduce(FlatPart(source, cuts[0][1]), self._ops[number])
                            continue
                        for place, target in cuts:
                            comm.Allreduce(source[place], target, op)
                    message.arrived = arrived
                else:
                    transport.exchange_intents(message)
            except Exception as error:
                if not transport.settle(message, error):
                    transport.perform(message)  # raises MembersChanged on the survivors of a loss
            transport.completed += 1
            transport.last = message
            if message.intents is not None:
                transport.raise_disagreement(message)
            for alias in buffers.aliases:
                if alias.is_deleted():  # it was donated
                    buffers.renew()
            return [buffers.aliases[:]], message.arrived
        except BaseException as error:
            transport.translate_error(error)
            raise
        finally:
            transport.inside = False
            transport.ends.append(perf_counter())
            transport.lock.release()

    def _prepare(self) -> None:
        """Prepare the fast path for the present group."""
        transport, buffers = self._transport, self._buffers
        self._sums = []
        for j in self._named[buffers.in_preamble is not None :]:
            target, op = buffers.buffers[j].reshape(-1), self._ops[j]
            if _is_extreme_of_floats(op, target.dtype):
                self._sums.append((j, None, [(slice(None), target)]))
                continue
            cuts = [(place, target[place]) for place in cuts_of(target, transport.piece_bytes)]
            self._sums.append((j, transport.ops[str(op)], cuts))
        buffers.renew()
        self._group = transport.group

    # --- the general path ---------------------------------------------------------------------------------------------

    def _exchange_any(self, parts: Sequence[Parts], status: np.ndarray, about: str, more: str, step: int) -> Arrived:
        """Reduce first over this process's workers, if it has several, and then over all ranks."""
        world, transport, buffers, ops = self._world, self._transport, self._buffers, self._ops
        row = parts[0]
        if self._local is not None:
            results, _ = self._local.exchange([[row[j] for j in self._named] for row in parts], status)
            named = iter(results[0])
            row = [next(named) if isinstance(op, str) else x for x, op in zip(row, ops, strict=True)]
        if not self._on_cpu:
            _copy_to_host(row)
        sent = list(map(np.asarray, row))
        with transport.collective():
            if buffers.in_preamble is not None:
                buffers.in_preamble[:] = sent[0]
            if buffers.status_in_preamble:
                buffers.free[:] = status
            custom = CustomReductions(buffers.buffers, parts, ops, world.workers, step)
            message = ReduceMessage(
                *(about, more, buffers.name, buffers.text),
                buffers=buffers.buffers,
                status=status,
                reduce=partial(self._reduce_all, sent, status, custom),
                replicated=not custom.differ,
            )
            transport.perform(message)
            results = buffers.arrays(world.devices)
        return custom.insert_own(results, world.devices), message.arrived

    def _reduce_all(self, sent: Sequence[np.ndarray], status: np.ndarray, custom: CustomReductions) -> np.ndarray:
        """Reduce all parts into the receive buffers, after every process has passed the preamble.

        Returns:
          The reduced status; shape=(status,), dtype of part 0.
        """
        transport, buffers = self._transport, self._buffers
        first = buffers.buffers[0]
        named = {j: self._ops[j] for j in self._named}
        if buffers.in_preamble is not None:
            round_to(buffers.in_preamble, first)
            del named[0]
        elif not buffers.status_in_preamble:
            first[:] = sent[0]
            buffers.free[:] = status
        for j, op in named.items():
            in_place = j == 0 and not buffers.status_in_preamble
            source = None if in_place else sent[j].reshape(-1)
            self._reduce(FlatPart(source, buffers.buffers[j].reshape(-1)), op)
        if custom.numbers:
            everyone = transport.group.everyone
            slots = [process.worker_slots for process in everyone]
            custom.reduce(transport.comm, self._world.members, slots, [process.host for process in everyone])
        return buffers.free.astype(first.dtype)

    def _reduce(self, part: FlatPart, op: Any) -> None:
        """Allreduce a part piece by piece."""
        if _is_extreme_of_floats(op, part.target.dtype):
            # As integers: whether MPI's extremes of floats keep NaNs depends on the pairing of ranks.
            whole = keys(part.target if part.source is None else part.source, op)
            self._reduce(FlatPart(None, whole), op)
            part.target[:] = from_keys(whole, part.target.dtype)
            return
        transport, mpi = self._transport, self._transport.mpi
        for piece in pieces([part], transport.piece_bytes):
            own = mpi.IN_PLACE if piece.source is None else piece.source
            transport.comm.Allreduce(own, piece.target, transport.ops[op])


def _copy_to_host(row: Parts) -> None:
    """Start to copy parts from an accelerator."""
    for x in row:
        x.copy_to_host_async()


def _is_extreme_of_floats(op: Any, dtype: np.dtype) -> bool:
    return bool(op != "sum" and dtype.kind == "f")
