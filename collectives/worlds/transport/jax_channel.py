"""Messages of one layout between the processes that `jax.distributed` has joined, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import jax
import numpy as np

from adaptive.extend import Arrived, Arriving, LookAtPiece, Parts, PartSpec, WhenWaitedFor
from collectives.worlds.reducing.receive_buffers import in_words, round_to
from collectives.worlds.reducing.sharded import ONE_AT_A_TIME, Joined, Sharded
from collectives.worlds.reducing.shared_memory import SharedMemoryBuffers

from .operations import ReduceMessage

if TYPE_CHECKING:
    from collectives.worlds.jax_world import JaxWorld


class _Rest(Protocol):
    """The parts of a message that do not travel in the frame."""

    def put(self) -> None:
        """What there is to do before all have agreed what it is."""
        ...

    def arrive(self) -> list[list[jax.Array]]:
        """The parts, reduced, of each of this process's workers."""
        ...


class _ByXLA:
    """Parts that one program over the devices of all processes reduces: by NCCL, or by gloo."""

    def __init__(self, sharded: Sharded, joined: Joined, workers: int):
        self._sharded, self._joined, self._workers = sharded, joined, workers
        sharded.compile(joined)  # behind the frame the others would wait for it, and for ever if it fails

    def put(self) -> None:
        """Nothing: XLA has no order but that of its programs."""

    def arrive(self) -> list[list[jax.Array]]:
        if not self._joined.arrays:
            return [[] for _ in range(self._workers)]
        with ONE_AT_A_TIME:
            reduced = jax.block_until_ready(self._sharded.reduce(self._joined))
        return self._sharded.copies(reduced)


def _look_at(look: LookAtPiece, first: int, part: int, start: int, piece: np.ndarray) -> None:
    """Show a piece of a message whose first parts have arrived otherwise."""
    look(part + first, start, piece)


class JaxChannel:
    """A channel of a `JaxWorld`: the protocol of `Channel`.

    Part 0 travels in the frame if there is room for it, and the others go through shared memory or XLA.

    Args:
      layout, status: see `World.channel`.

    Attributes:
      ops: the reductions of the parts, in order.
    """

    def __init__(self, world: JaxWorld, layout: Sequence[PartSpec], status: int):
        self._world = world
        room = len(world._frame.room)
        self._in_frame = layout[0].shape[0] <= room  # part 0, with the status at its end
        self._status_in_frame = status <= room
        self.ops = [part.op for part in layout]
        self._text = in_words(tuple(layout), status)
        self._name = crc32(self._text.encode())
        memory, rest = world._memory, tuple(layout[self._in_frame :])
        self._room: SharedMemoryBuffers | None = None if memory is None else memory.room(rest)

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
        return self.start(parts, status, about, more, look, step).wait()

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
        """Begin to join what is to be reduced, and compile what reduces it: the protocol of `Channel`.

        Nothing is sent before it is waited for, when all are about the same.
        """
        world = self._world
        world._check_open()
        if self._in_frame and not world._on_cpu:
            for row in parts:
                row[0].copy_to_host_async()
        rows = [row[1:] for row in parts] if self._in_frame else parts
        rest: _Rest
        if self._room is not None:
            rest = self._room.message(rows, world.devices, look and partial(_look_at, look, self._in_frame))
        else:
            joined = world._sharded.join(rows, self.ops[self._in_frame :], step, world.members)
            rest = _ByXLA(world._sharded, joined, len(world.devices))
        own = [row[0] for row in parts] if self._in_frame else []
        return WhenWaitedFor(partial(self._wait_for, own, rest, status, about, more))

    def _wait_for(self, own: list[jax.Array], rest: _Rest, status: np.ndarray, about: str, more: str) -> Arrived:
        """Reduce part 0 and the status in the frame, and the rest behind it.

        Args:
          own: this process's workers' part 0, if it travels in the frame.
        """
        world = self._world
        travelling = world._frame.room[: len(own[0]) if own else len(status)]
        if not self._status_in_frame:
            travelling = status.astype(np.float64)
        arrived: list[list[jax.Array]] = []
        message = ReduceMessage(
            *(about, more, self._name, self._text),
            buffers=(),
            status=status,
            reduce=lambda: self._reduce(arrived, own, rest, travelling, status),
        )
        with world._collective():
            if own:
                travelling[:] = sum(np.asarray(x, np.float64) for x in own)
            travelling[len(travelling) - len(status) :] = status
            rest.put()
            world._do(message)
        return arrived, message.arrived

    def _reduce(
        self,
        arrived: list[list[jax.Array]],
        own: list[jax.Array],
        rest: _Rest,
        travelling: np.ndarray,
        status: np.ndarray,
    ) -> np.ndarray:
        """Reduce what does not travel in the frame, after every process has passed it. Returns the reduced status."""
        world = self._world
        if not self._status_in_frame:
            world._lines.sum(travelling)
        free = travelling[len(travelling) - len(status) :].astype(status.dtype)
        arrived[:] = rest.arrive()
        if own:
            first = np.empty(own[0].shape, own[0].dtype)  # not to be used again: it may become the array's memory
            round_to(travelling, first)
            for row, x in zip(arrived, jax.device_put([first] * len(world.devices), list(world.devices)), strict=True):
                row.insert(0, x)
        return free
