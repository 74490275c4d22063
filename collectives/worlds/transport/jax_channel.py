"""The channel of a `JaxWorld`: messages of one layout between the processes of `jax.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import jax
import numpy as np

from adaptive.base.channel import Arrived, Parts, PartSpec
from collectives.worlds.reducing.receive_buffers import describe_layout, round_to
from collectives.worlds.reducing.sharded import ONE_AT_A_TIME, Joined

from .operations import ReduceMessage

if TYPE_CHECKING:
    from collectives.worlds.jax_world import JaxWorld


class JaxChannel:
    """A channel of a `JaxWorld`: see `Channel`.

    Part 0 is reduced in the preamble if it fits. One XLA program over the devices of all processes reduces the others,
    by NCCL or gloo.

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
        joined = world.sharded.join(rows, self.ops[self._in_preamble :], step, world.members)
        world.sharded.compile(joined)  # before the preamble: after it, the others would wait for the compilation
        own = [row[0] for row in parts] if self._in_preamble else []
        return self._finish(own, joined, status, about, more)

    def _finish(self, own: list[jax.Array], joined: Joined, status: np.ndarray, about: str, more: str) -> Arrived:
        """Reduce part 0 and the status in the preamble, and the rest after it.

        Args:
          own: part 0 of this process's workers, if it is reduced in the preamble; else empty.
          joined: the other parts.
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
            reduce=lambda: self._reduce(arrived, own, joined, traveling, status),
        )
        with transport.collective():
            if own:
                traveling[:] = sum(np.asarray(x, np.float64) for x in own)
            traveling[len(traveling) - len(status) :] = status
            transport.perform(message)
        return arrived, message.arrived

    def _reduce(
        self,
        arrived: list[list[jax.Array]],
        own: list[jax.Array],
        joined: Joined,
        traveling: np.ndarray,
        status: np.ndarray,
    ) -> np.ndarray:
        """Reduce the rest of the message, after every process has passed the preamble. Returns the status."""
        if not self._status_in_preamble:
            self._transport.tree.sum(traveling)
        reduced_status = traveling[len(traveling) - len(status) :].astype(status.dtype)
        world = self._world
        arrived[:] = [[] for _ in world.devices]
        if joined.arrays:
            with ONE_AT_A_TIME:
                arrived[:] = world.sharded.copies(jax.block_until_ready(world.sharded.reduce(joined)))
        if own:
            first = np.empty(own[0].shape, own[0].dtype)  # new each time: a JAX array may alias it
            round_to(traveling, first)
            devices = list(world.devices)
            for row, x in zip(arrived, jax.device_put([first] * len(devices), devices), strict=True):
                row.insert(0, x)
        return reduced_status
