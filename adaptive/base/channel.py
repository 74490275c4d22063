"""Channels: how the runtime exchanges one of a program's messages, step after step; see `World.channel`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import numpy as np

from .reductions import Reduction

Parts = Sequence[jax.Array]
Arrived = tuple[list[list[jax.Array]], np.ndarray]  # what `Channel.exchange` returns
LookAtPiece = Callable[[int, int, np.ndarray], None]  # the part's number, the piece's first element in it, the piece


class PartSpec(NamedTuple):
    """Shape, dtype and reduction of one part of a message: equal on all workers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    op: Reduction  # "sum", "max", "min", or a `Reduction` that is an object


class Channel(Protocol):
    """Exchanges messages of one layout, one after another. Made by `World.channel`.

    A step sends the same messages as the step before, so all that depends on the layout alone is computed once, here.
    """

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        """Reduce a message over all workers; blocks until it has arrived.

        Args:
          parts: `parts[i][j]` is part j of this process's i-th worker, on that worker's device. The last elements of
            part 0, as many as the channel's status has, are free: what they hold is ignored. No part may be a result
            of this channel.
          status: what this *process* adds to the message, of part 0's dtype; summed over processes.
          about, more: see `World`.
          look: worlds that reduce on the host, piece by piece, call it with each piece that has just been reduced,
            while the piece is in the caches. Others need not call it, nor for all pieces.
          step: the number of the step, from 1 on, for reductions that depend on it.

        Returns:
          `(results, status)`. `results[i][j]` is part j, reduced, on the device of this process's i-th worker, bitwise
          equal on all workers, but for what is `Mixed`. It is valid until the next exchange on this channel: whatever
          reads it has to finish before. `status` is reduced, on the host. What `results[i][0]` holds in its place is
          unspecified.

        Raises:
          DisagreementError: the processes' calls differ. On every process.
          WorkerError: a process has called `fail`. On every other process.
          MembersChanged: processes were lost before it was completed on any of the others. On all of these.
        """
        ...

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
        """Begin an exchange, and return: what can be done of it without waiting for others is under way.

        Several may be under way, on different channels. They are waited for in the order in which they were started, by
        the thread that has started them, and before it does anything else in this world. Arguments and errors are those
        of `exchange`; errors are raised here or by `Arriving.wait`.

        Args:
          beside: whether this process computes something meanwhile, so that waiting should leave it its cores.
            On all processes, or on none.
        """
        ...


class Arriving(Protocol):
    """A message that is being exchanged."""

    def wait(self) -> Arrived:
        """Return what `Channel.exchange` returns, when it is there. Called once."""
        ...


class WhenWaitedFor(NamedTuple):
    """An exchange, or the rest of one, that is carried out by `wait`."""

    carry_out: Callable[[], Arrived]

    def wait(self) -> Arrived:
        """Carry it out."""
        return self.carry_out()


KEPT_CHANNELS = 64  # of a world; eager calls may have any number of layouts


class Channels:
    """For worlds that implement `channel`: `exchange` on channels that are made when they are first used, and kept."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Channel] = {}  # used last comes last

    def exchange(
        self,
        parts: Sequence[Parts],
        ops: Sequence[Reduction],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
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
        return found.exchange(parts, status, about, more, look, step)


class Blocking:
    """For worlds that implement `exchange`: their channels call it."""

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> Channel:
        """Return a channel that calls the world's `exchange`: the protocol of `World`."""
        return BlockingChannel(self.exchange, [part.op for part in parts], name)  # type: ignore[attr-defined]


class BlockingChannel(NamedTuple):
    """A channel of a world that can do nothing of an exchange without waiting for others: it begins in `wait`.

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
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        """Exchange a message: the protocol of `Channel`."""
        return self.carry_out(parts, self.ops, status, self.name, about, more, look, step)

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
        """Return an exchange that is carried out when it is waited for: the protocol of `Channel`."""
        return WhenWaitedFor(partial(self.exchange, parts, status, about, more, look, step))


class LoneChannel:
    """A channel of a world of one worker, whose parts are the results: the protocol of `Channel`."""

    def exchange(
        self,
        parts: Sequence[Parts],
        status: np.ndarray,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        """Return the parts and the status, as given: the protocol of `Channel`."""
        return [list(parts[0])], status

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
        """Return an exchange that is over when it is waited for: the protocol of `Channel`."""
        return WhenWaitedFor(partial(self.exchange, parts, status))
