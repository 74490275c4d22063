"""Channels: exchange one of a program's messages, step after step; see `World.channel`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from .reductions import Reduction, Sliced

Parts = Sequence[jax.Array]
Arrived = tuple[list[list[jax.Array]], np.ndarray]  # what `Channel.exchange` returns


class PartSpec(NamedTuple):
    """Shape, dtype and reduction of one part of a message: equal on all workers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    op: Reduction  # "sum", "max", "min", or a `Reduction` that is an object
    sharding: Sharding | None = None  # over the worker's mesh; `None`: not sharded

    @property
    def itemsize(self) -> int:
        """Bytes of an element on the wire."""
        return (self.op.wire_dtype(self.dtype) if isinstance(self.op, Sliced) else self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the part that one worker sends."""
        return math.prod(self.shape) * self.itemsize


@dataclass(slots=True)
class SentMessage:
    """What one process sends in an exchange. May be changed and sent again.

    Attributes:
      parts: `parts[i][j]` is part j of this process's i-th worker, on that worker's device. The last `len(status)`
        elements of part 0 are reserved and ignored. No part may be a result of the same channel.
      status: this *process*'s elements, of part 0's dtype; summed over processes.
      about: description, equal on all processes: see `World`.
      more: further information for errors, not compared.
      step: number of the step, from 1, for reductions that depend on it.
    """

    parts: Sequence[Parts]
    status: np.ndarray
    about: str = ""
    more: str = ""
    step: int = 0


class Channel(ABC):
    """Exchanges messages of one layout, one after another, with all that depends on it computed once. Created by
    `World.channel`; used by one thread at a time.
    """

    @abstractmethod
    def exchange(self, message: SentMessage) -> Arrived:
        """Reduce a message over all workers. Blocks until it has arrived.

        Returns:
          `(results, status)`. `results[i][j]` is part j, reduced, on the device of this process's i-th worker, bitwise
          equal on all workers, except for `Mixed` reductions. Valid until the next exchange on this channel. `status`
          is reduced, on the host. The reserved elements of `results[i][0]` are unspecified.

        Raises:
          DisagreementError: the processes' calls differ. On every process.
          WorkerError: a process has called `fail`. On every other process.
          MembersChanged: processes were lost before any process completed the message. On all remaining processes.
        """


class BlockingChannel(Channel):
    """A channel that calls its world's `exchange`."""

    def __init__(self, exchange: Callable[..., Arrived], ops: Sequence[Reduction], name: Hashable):
        self._exchange, self._ops, self._name = exchange, ops, name

    def exchange(self, message: SentMessage) -> Arrived:
        """Exchange a message: see `Channel`."""
        return self._exchange(message, self._ops, self._name)


class LoneChannel(Channel):
    """A channel of one worker: the results are the parts. `check` raises an error if the world cannot be used."""

    def __init__(self, check: Callable[[], object] = int):
        self._check = check

    def exchange(self, message: SentMessage) -> Arrived:
        """Return the parts and the status, as given: see `Channel`."""
        self._check()
        return [list(message.parts[0])], message.status
