"""Messages of one layout between MPI processes, one after another.

A message is small Python and large sums. What depends on the layout and on the members alone is computed once: buffers,
JAX arrays over them, the pieces in which parts are summed. The common message, of one worker on a CPU whose parts are
all reduced by name, then takes a handful of function calls (`MPIChannel._directly`); every other one takes the general
path, by way of `ReduceMessage`. Both call MPI in the same order with the same buffers, so that which of them a process
takes is its own affair.

A channel has one set of receive buffers. Nothing is written to them before the frame has shown that all processes have
completed the message before: until then a process may have to hand that message on, after a loss (`operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from adaptive.extend import Arrived, Arriving, LookAtPiece, Parts, PartSpec, WhenWaitedFor, thread_status
from collectives.worlds.reducing.algorithms import is_large
from collectives.worlds.reducing.custom_on_processes import CustomReductions
from collectives.worlds.reducing.overlapped import overlapped_sum
from collectives.worlds.reducing.parts import FlatPart, pieces
from collectives.worlds.reducing.receive_buffers import ReceiveBuffers, check_dtypes, from_keys, keys, round_to

from .operations import ReduceMessage, carried_out
from .process_group import ProcessGroup

if TYPE_CHECKING:
    from collectives.worlds.mpi import MPIWorld


class MPIChannel:
    """A channel of an `MPIWorld`: the protocol of `Channel`.

    Args:
      layout, status, name: see `World.channel`.

    Raises:
      CollectiveError: MPI cannot reduce one of the parts.
    """

    def __init__(self, world: MPIWorld, layout: Sequence[PartSpec], status: int, name: Hashable):
        check_dtypes(layout)
        self._world, self._name = world, name
        self._ops = [part.op for part in layout]
        self._named = [j for j, op in enumerate(self._ops) if isinstance(op, str)]
        self._inbox = inbox = ReceiveBuffers(tuple(layout), status, world._frame.room)
        self._status_dtype = inbox.buffers[0].dtype
        is_float = self._status_dtype.kind == "f"
        self._limit = float(np.finfo(self._status_dtype).max) if is_float else -1.0  # of what needs no rounding
        several = len(world.devices) > 1
        self._local = world._local.channel([layout[j] for j in self._named], status, name) if several else None
        self._on_cpu = world.devices[0].platform == "cpu"
        # Whether a process can take its messages the short way, as far as the layout and its devices go.
        self._simple = not several and len(self._named) == len(layout) and inbox.status_in_frame
        self._simple &= inbox.is_default(world.devices[0])
        # The one of the short way. It holds no JAX arrays: see `ReduceMessage.carry_out`.
        told = inbox.name, inbox.text
        self._message = ReduceMessage("", "", *told, buffers=inbox.buffers, status=np.zeros(0), reduce=carried_out)
        self._together: ProcessGroup | None = None  # for whom the short way is prepared
        self._sums: list[tuple[int, Any, list[tuple[int, int, np.ndarray]]]] = []

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        """Reduce a message over all workers: the protocol of `Channel`."""
        if self._simple:
            # Free of copies. A part that is still being computed is waited for here, and not in a collective.
            arrived = self._directly(list(map(np.asarray, parts[0])), status, about, more, look)
            if arrived is not None:
                return arrived
        return self._begin(parts, status, about, more, look, step, None).wait()

    def start(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
        beside: Callable[[], bool] | None = None,
    ) -> Arriving:
        """Begin to reduce over this process's workers, and to copy from accelerators: the protocol of `Channel`.

        Nothing is sent before it is waited for: Allreduce blocks, and several in flight took longer (see `mpi.py`).
        """
        if self._simple and beside is None:
            return WhenWaitedFor(partial(self.exchange, parts, status, about, more, look, step))
        return self._begin(parts, status, about, more, look, step, beside)

    # --- the short way ------------------------------------------------------------------------------------------------

    @thread_status("in a collective", exchanges=True)
    def _directly(
        self, row: list[np.ndarray], status: np.ndarray, about: str, more: str, look: LookAtPiece | None
    ) -> Arrived | None:
        """Exchange a message in as few function calls as possible. Returns `None` if it has to go the general way.

        What it does is what `MPIWorld._collective` and `MPIWorld._do` do around a `ReduceMessage`, in one function.
        """
        world, inbox, message = self._world, self._inbox, self._message
        frame = world._frame
        world._lock.acquire()
        try:
            if world._closed or world._torn or get_ident() not in world._threads:
                world._begin()
        except BaseException:
            world._lock.release()
            raise
        try:
            if world._left is not None or (self._together is not world._together and not self._prepare()):
                return None
            if inbox.in_frame is not None:
                inbox.in_frame[:] = row[0]
            inbox.free[:] = status
            message.about, message.more, message.presences = about, more, None
            frame.announce(crc32(about.encode(), message.kind))
            world._operation = message
            world._begun += 1
            world._inside = True
            comm = world.comm
            try:
                came = perf_counter()
                try:
                    comm.Allreduce(world._mpi.IN_PLACE, frame.numbers)
                finally:  # also for one that did not come
                    world.waited += perf_counter() - came
                if frame.heard() == frame.expected:
                    arrived = inbox.free.astype(self._status_dtype)
                    if inbox.in_frame is not None:
                        if max(map(abs, inbox.in_frame.tolist()), default=0.0) <= self._limit:
                            inbox.buffers[0][:] = inbox.in_frame
                        else:  # or some of it is NaN
                            round_to(inbox.in_frame, inbox.buffers[0])
                        if look is not None:
                            look(0, 0, inbox.buffers[0])
                    for number, op, cuts in self._sums:
                        source = row[number].reshape(-1)
                        if op is None:
                            self._reduce(FlatPart(number, source, cuts[0][2]), self._ops[number])
                            continue
                        for start, stop, target in cuts:
                            comm.Allreduce(source[start:stop], target, op)
                            if look is not None:
                                look(number, start, target)
                    message.arrived = arrived
                else:
                    world._tell_presence(message)
            except Exception as error:
                if not world._settled(message, error):
                    world._do(message)  # raises: the others go on without those who are lost
            world._completed += 1
            world._last = message
            if message.presences is not None:
                world._disagree(message)
            for alias in inbox.aliases:
                if alias.is_deleted():  # it was donated
                    inbox.renew()
            return [inbox.aliases[:]], message.arrived
        except BaseException as error:
            world._end_by(error)
            raise
        finally:
            world._inside = False
            world._lock.release()

    def _prepare(self) -> bool:
        """Prepare the short way for those who are together now. Returns whether their messages can go it."""
        world, inbox = self._world, self._inbox
        large = inbox.large_others and world.processes > 1
        if world._ways is not None or (large and not world._on_devices.through_host):
            return False
        self._sums = []
        for j in self._named[inbox.in_frame is not None :]:
            target, op = inbox.buffers[j].reshape(-1), self._ops[j]
            if _is_extreme_of_floats(op, target.dtype):
                self._sums.append((j, None, [(0, target.size, target)]))
                continue
            found = pieces([FlatPart(j, None, target)], world._piece_bytes)
            cuts = [(piece.start, piece.start + piece.target.size, piece.target) for piece in found]
            self._sums.append((j, world._ops[str(op)], cuts))
        inbox.renew()
        self._together = world._together
        return True

    # --- the general way ----------------------------------------------------------------------------------------------

    def _begin(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str,
        more: str,
        look: LookAtPiece | None,
        step: int,
        beside: Callable[[], bool] | None,
    ) -> Arriving:
        local = None
        if self._local is not None:
            local = self._local.start([[row[j] for j in self._named] for row in parts], status)
        elif not self._on_cpu:
            self._copy_to_host(parts[0])
        return WhenWaitedFor(partial(self._wait_for, local, parts, status, about, more, look, step, beside))

    def _wait_for(
        self,
        local: Arriving | None,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str,
        more: str,
        look: LookAtPiece | None,
        step: int,
        beside: Callable[[], bool] | None,
    ) -> Arrived:
        """Reduce over ranks what is reduced over this process's workers, or the parts of its only one."""
        world, inbox, ops = self._world, self._inbox, self._ops
        row = parts[0]
        if local is not None:
            named = iter(local.wait()[0][0])
            row = [next(named) if isinstance(op, str) else x for x, op in zip(row, ops, strict=True)]
            if not self._on_cpu:
                self._copy_to_host(row)
        sent: list[Any] = [np.asarray(x) if self._on_cpu or j == 0 else x for j, x in enumerate(row)]
        with world._collective():
            if inbox.in_frame is not None:
                inbox.in_frame[:] = sent[0]
            if inbox.status_in_frame:
                inbox.free[:] = status
            apart = CustomReductions(inbox.buffers, parts, ops, world.workers, step)
            message = ReduceMessage(
                *(about, more, inbox.name, inbox.text),
                buffers=inbox.buffers,
                status=status,
                reduce=partial(self._reduce_all, sent, status, apart, look, beside),
                replicated=not apart.differ,
            )
            key = self._name, inbox.name
            if world._ways is not None and inbox.has_ways:
                world._ways.begin(message, key, fixed=world.deterministic)
            large = inbox.large_others
            world._on_devices.begin(message, key, row, ops, large=large, fixed=world.deterministic)
            world._do(message)
            results = inbox.arrays(world.devices, world._on_devices.results)
            world._on_devices.end()
        return apart.in_place(results, world.devices), message.arrived

    def _copy_to_host(self, row: Parts) -> None:
        """Begin to copy to the host what is reduced there."""
        stays = self._world._on_devices.stays(row, self._ops, self._name)
        for j, x in enumerate(row):
            if j not in stays:
                x.copy_to_host_async()

    def _reduce_all(
        self,
        sent: Sequence[Any],
        status: np.ndarray,
        apart: CustomReductions,
        look: LookAtPiece | None,
        beside: Callable[[], bool] | None,
    ) -> np.ndarray:
        """Reduce all parts into the receive buffers, after every process has passed the frame. Returns the reduced
        status; its dtype is that of part 0.
        """
        world, inbox = self._world, self._inbox
        first, ways = inbox.buffers[0], self._world._ways
        named = {j: self._ops[j] for j in self._named}
        if inbox.in_frame is not None:
            round_to(inbox.in_frame, first)
            del named[0]
        elif not inbox.status_in_frame:
            first[:] = sent[0]
            inbox.free[:] = status
        for j in world._on_devices.results:
            named.pop(j, None)

        def part(j: int) -> FlatPart:
            here = j == 0 and not inbox.status_in_frame
            return FlatPart(j, None if here else np.asarray(sent[j]).reshape(-1), inbox.buffers[j].reshape(-1))

        large = [j for j, op in named.items() if ways is not None and is_large(op, inbox.buffers[j].nbytes)]
        for j, op in named.items():
            if j not in large:
                self._reduce(part(j), op, look, beside)
        if ways is not None and large:
            ways.sum((part(j) for j in large), look)
        if apart.numbers:
            seats = [process.seats for process in world._together.everyone]
            reduce = partial(apart.reduce, world.comm, world.members, seats)
            reduce() if ways is None else ways.reduce(reduce)
        return inbox.free.astype(first.dtype)

    def _reduce(
        self, part: FlatPart, op: Any, look: LookAtPiece | None = None, beside: Callable[[], bool] | None = None
    ) -> None:
        """Allreduce a part piece by piece, and have each looked at."""
        if _is_extreme_of_floats(op, part.target.dtype):
            # As integers: MPI's extremes of floats drop NaNs or not, as the ranks happen to be paired.
            whole = keys(part.target if part.source is None else part.source, op)
            self._reduce(FlatPart(part.number, None, whole), op, beside=beside)
            part.target[:] = from_keys(whole, part.target.dtype)
            return
        for piece in self._reduced(part, self._world._ops[op], beside):
            if look is not None:
                look(piece.number, piece.start, piece.target)

    def _reduced(self, part: FlatPart, op: Any, beside: Callable[[], bool] | None) -> Iterator[FlatPart]:
        """The pieces of a part, as they have come."""
        world, mpi = self._world, self._world._mpi
        if beside is not None and not world._together.one_host:
            yield from overlapped_sum(mpi, world.comm, part, op, beside, survives=world.survives)
            return
        for piece in pieces([part], world._piece_bytes):
            world.comm.Allreduce(mpi.IN_PLACE if piece.source is None else piece.source, piece.target, op)
            yield piece


def _is_extreme_of_floats(op: Any, dtype: np.dtype) -> bool:
    return bool(op != "sum" and dtype.kind == "f")
