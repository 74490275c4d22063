"""Channels: exchange one of a program's messages, step after step; see `World.channel`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from .reductions import Reduction

Parts = Sequence[jax.Array]
Arrived = tuple[list[list[jax.Array]], np.ndarray]  # what `Channel.exchange` returns


class PartSpec(NamedTuple):
    """Shape, dtype and reduction of one part of a message: equal on all workers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    op: Reduction  # "sum", "max", "min", or a `Reduction` that is an object


class Channel(Protocol):
    """Exchanges messages of one layout, one after another. Created by `World.channel`.

    Every step sends messages of the same layout, so everything that depends only on the layout is computed once.
    """

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Reduce a message over all workers. Blocks until it has arrived.

        Args:
          parts: `parts[i][j]` is part j of this process's i-th worker, on that worker's device. The last `len(status)`
            elements of part 0 are reserved and ignored. No part may be a result of this channel.
          status: this *process*'s elements, of part 0's dtype; summed over processes.
          about, more: see `World`.
          step: number of the step, from 1, for reductions that depend on it.

        Returns:
          `(results, status)`. `results[i][j]` is part j, reduced, on the device of this process's i-th worker, bitwise
          equal on all workers, except for `Mixed` reductions. Valid until the next exchange on this channel. `status`
          is reduced, on the host. The reserved elements of `results[i][0]` are unspecified.

        Raises:
          DisagreementError: the processes' calls differ. On every process.
          WorkerError: a process has called `fail`. On every other process.
          MembersChanged: processes were lost before any process completed the message. On all remaining processes.
        """
        ...


KEPT_CHANNELS = 64  # per world; bounds the memory if eager calls use many layouts


class Channels:
    """Mixin for worlds that implement `channel`: `exchange` on cached channels."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Channel] = {}  # least recently used first

    def exchange(
        self,
        parts: Sequence[Parts],
        ops: Sequence[Reduction],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Exchange one message on the channel of its layout and name: the protocol of `World`."""
        layout = tuple(PartSpec(x.shape, x.dtype, op) for x, op in zip(parts[0], ops, strict=True))
        key = layout, len(status), channel
        found = self._kept.pop(key, None)
        if found is None:
            found = self.channel(layout, len(status), channel)  # type: ignore[attr-defined]
            if len(self._kept) == KEPT_CHANNELS:
                del self._kept[next(iter(self._kept))]  # results keep its memory alive
        self._kept[key] = found
        return found.exchange(parts, status, about, more, step)


class Blocking:
    """Mixin for worlds that implement `exchange`: `channel` on top of it."""

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> Channel:
        """Return a channel that calls the world's `exchange`: the protocol of `World`."""
        return BlockingChannel(self.exchange, [part.op for part in parts], name)  # type: ignore[attr-defined]


class BlockingChannel(NamedTuple):
    """A channel that calls the world's `exchange`.

    Attributes:
      carry_out: the world's `exchange`.
    """

    carry_out: Callable[..., Arrived]
    ops: Sequence[Reduction]
    name: Hashable

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Exchange a message: the protocol of `Channel`."""
        return self.carry_out(parts, self.ops, status, self.name, about, more, step)


class LoneChannel:
    """A channel of a world of one worker: the results are the parts."""

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        step: int = 0,
    ) -> Arrived:
        """Return the parts and the status, as given: the protocol of `Channel`."""
        return [list(parts[0])], status
