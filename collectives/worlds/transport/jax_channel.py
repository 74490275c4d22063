"""The channel of a `JaxWorld`: messages of one layout between the processes of `jax.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import jax
import numpy as np

from adaptive.base.channel import Arrived, Parts, PartSpec
from collectives.worlds.reducing.receive_buffers import describe_layout, round_to
from collectives.worlds.reducing.sharded import ONE_AT_A_TIME, Joined, Sharded
from collectives.worlds.reducing.shared_memory import SharedMemoryBuffers

from .operations import ReduceMessage

if TYPE_CHECKING:
    from collectives.worlds.jax_world import JaxWorld


class _Rest(Protocol):
    """The parts of a message that are not reduced in the preamble."""

    def prepare(self) -> None:
        """Prepare the reduction, before the preamble."""
        ...

    def reduce(self) -> list[list[jax.Array]]:
        """Return the reduced parts for each worker of this process."""
        ...


class _ReducedByXLA:
    """Parts that one XLA program over the devices of all processes reduces, by NCCL or gloo."""

    def __init__(self, sharded: Sharded, joined: Joined, workers: int):
        self._sharded, self._joined, self._workers = sharded, joined, workers
        sharded.compile(joined)  # before the preamble: after it, the others would wait for the compilation

    def prepare(self) -> None:
        """Do nothing: the program is already compiled."""

    def reduce(self) -> list[list[jax.Array]]:
        if not self._joined.arrays:
            return [[] for _ in range(self._workers)]
        with ONE_AT_A_TIME:
            reduced = jax.block_until_ready(self._sharded.reduce(self._joined))
        return self._sharded.copies(reduced)


class JaxChannel:
    """A channel of a `JaxWorld`: see `Channel`.

    Part 0 is reduced in the preamble if it fits, the others in shared memory or by XLA.

    Args:
      world: the world.
      layout, status: see `World.channel`.

    Attributes:
      ops: the reductions of the parts.
    """

    def __init__(self, world: JaxWorld, layout: Sequence[PartSpec], status: int):
        self._world, self._transport = world, world.transport
        room = len(self._transport.preamble.room)
        self._in_preamble = layout[0].shape[0] <= room  # part 0, with the status at its end
        self._status_in_preamble = status <= room
        self.ops = [part.op for part in layout]
        self._text = describe_layout(tuple(layout), status)
        self._name = crc32(self._text.encode())
        memory, rest = world.shared_memory, tuple(layout[self._in_preamble :])
        self._buffers: SharedMemoryBuffers | None = None if memory is None else memory.buffers(rest)

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Reduce a message over all workers: see `Channel.exchange`. Sends nothing before the preamble has passed."""
        world = self._world
        world.lifetime.check_open()
        if self._in_preamble and world.devices[0].platform != "cpu":
            for row in parts:
                row[0].copy_to_host_async()
        rows = [row[1:] for row in parts] if self._in_preamble else parts
        rest: _Rest
        if self._buffers is not None:
            rest = self._buffers.message(rows, world.devices)
        else:
            joined = world.sharded.join(rows, self.ops[self._in_preamble :], step, world.members)
            rest = _ReducedByXLA(world.sharded, joined, len(world.devices))
        own = [row[0] for row in parts] if self._in_preamble else []
        return self._finish(own, rest, status, about, more)

    def _finish(self, own: list[jax.Array], rest: _Rest, status: np.ndarray, about: str, more: str) -> Arrived:
        """Reduce part 0 and the status in the preamble, and the rest after it.

        Args:
          own: part 0 of this process's workers, if it is reduced in the preamble; else empty.
          rest: the other parts.
          status: see `Channel.exchange`.
          about: see `Channel.exchange`.
          more: see `Channel.exchange`.
        """
        transport = self._transport
        traveling = transport.preamble.room[: len(own[0]) if own else len(status)]
        if not self._status_in_preamble:
            traveling = status.astype(np.float64)
        arrived: list[list[jax.Array]] = []
        message = ReduceMessage(
            *(about, more, self._name, self._text),
            buffers=(),
            status=status,
            reduce=lambda: self._reduce(arrived, own, rest, traveling, status),
        )
        with transport.collective():
            if own:
                traveling[:] = sum(np.asarray(x, np.float64) for x in own)
            traveling[len(traveling) - len(status) :] = status
            rest.prepare()
            transport.perform(message)
        return arrived, message.arrived

    def _reduce(
        self,
        arrived: list[list[jax.Array]],
        own: list[jax.Array],
        rest: _Rest,
        traveling: np.ndarray,
        status: np.ndarray,
    ) -> np.ndarray:
        """Reduce the rest of the message, after every process has passed the preamble. Returns the status."""
        if not self._status_in_preamble:
            self._transport.tree.sum(traveling)
        reduced_status = traveling[len(traveling) - len(status) :].astype(status.dtype)
        arrived[:] = rest.reduce()
        if own:
            first = np.empty(own[0].shape, own[0].dtype)  # new each time: a JAX array may alias it
            round_to(traveling, first)
            devices = list(self._world.devices)
            for row, x in zip(arrived, jax.device_put([first] * len(devices), devices), strict=True):
                row.insert(0, x)
        return reduced_status
