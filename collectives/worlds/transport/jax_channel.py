"""The channel of a `JaxWorld`: messages of one layout between the processes of `jax.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import jax
import numpy as np

from adaptive.base.channel import Arrived, Channel, PartSpec, SentMessage
from collectives.worlds.reducing.receive_buffers import describe_layout, round_to
from collectives.worlds.reducing.sharded import ONE_AT_A_TIME, Joined

from .operations import ROOM, RunOnce

if TYPE_CHECKING:
    from collectives.worlds.jax_world import JaxWorld


class JaxChannel(Channel):
    """A channel of a `JaxWorld`: see `Channel`.

    Part 0 is reduced in the preamble if it fits. One XLA program over the devices of all processes reduces the others,
    by NCCL or gloo.

    Args:
      world: the world.
      layout, status: see `World.channel`.
    """

    def __init__(self, world: JaxWorld, layout: Sequence[PartSpec], status: int):
        self._world = world
        self._in_preamble = layout[0].shape[0] <= ROOM  # part 0, with the status at its end
        self._ops = [part.op for part in layout]
        self._text = describe_layout(layout, status)
        self._kind = crc32(self._text.encode())

    def exchange(self, message: SentMessage) -> Arrived:
        """Reduce a message over all workers: see `Channel.exchange`. Sends nothing before the preamble has passed."""
        world, parts, status = self._world, message.parts, message.status
        world.lifetime.check_open()
        if self._in_preamble and world.devices[0].platform != "cpu":
            for row in parts:
                row[0].copy_to_host_async()
        rows = [row[1:] for row in parts] if self._in_preamble else parts
        joined = world.sharded.join(rows, self._ops[self._in_preamble :], message.step, world.members)
        world.sharded.compile(joined)  # before the preamble: after it, the others would wait for the compilation
        own = [row[0] for row in parts] if self._in_preamble else []
        n = len(own[0]) if own else len(status)
        arrived: list[list[jax.Array]] = []

        def reduce() -> None:
            if n > ROOM:
                world.transport.sum(traveling)
            arrived.extend(self._reduce(own, joined, traveling))

        operation = RunOnce(message.about, message.more, self._kind, self._text, reduce)
        traveling = operation.room[:n] if n <= ROOM else np.zeros(n)
        if own:
            traveling[:] = sum(np.asarray(x, np.float64) for x in own)
        traveling[n - len(status) :] = status
        world.transport.run(operation)
        return arrived, traveling[n - len(status) :].astype(status.dtype)

    def _reduce(self, own: list[jax.Array], joined: Joined, traveling: np.ndarray) -> list[list[jax.Array]]:
        """Reduce a message after every process has passed the preamble. Returns the parts on each device.

        Args:
          own: part 0 of this process's workers, if it is reduced in the preamble; else empty.
          joined: the other parts.
          traveling: part 0, reduced in the preamble.
        """
        world = self._world
        rows: list[list[jax.Array]] = [[] for _ in world.devices]
        if joined.arrays:
            with ONE_AT_A_TIME:
                rows = world.sharded.copies(jax.block_until_ready(world.sharded.reduce(joined)))
        if own:
            first = np.empty(own[0].shape, own[0].dtype)  # new each time: a JAX array may alias it
            round_to(traveling, first)
            for row, x in zip(rows, jax.device_put([first] * len(rows), list(world.devices)), strict=True):
                row.insert(0, x)
        return rows
