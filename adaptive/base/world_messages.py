"""The part of a `World` that exchanges messages between its processes: `WorldMessages`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import jax
import numpy as np

from .channel import Arrived, Channel, Parts, PartSpec
from .reductions import Reduction


class WorldMessages(Protocol):
    """The processes of a world, and the collectives by which they exchange messages.

    A collective completes on all processes or on none, even if processes are lost during it.

    Every collective has a description (`about=`), equal on all processes. If descriptions differ, or processes are in
    different collectives, all processes raise DisagreementError before anything is sent. `more` is shown in that error,
    but not compared.
    """

    @property
    def rank(self) -> int:
        """This process's rank among the connected processes, 0 … processes-1. Local."""
        ...

    @property
    def processes(self) -> int:
        """The number of connected processes. Replicated."""
        ...

    @property
    def workers(self) -> range:
        """The worker slots that this process carries. Local."""
        ...

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The device of each of this process's workers, in the order of `workers`. Local."""
        ...

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> Channel:
        """Return a channel for messages of one layout. Does not communicate.

        A channel owns the receive buffers of its messages. It lasts as long as the world, also when members change.

        Args:
          parts: shape, dtype and reduction of each part. Part 0 is one-dimensional, floating, and summed.
          status: number of elements that each *process* adds to a message: see `Channel.exchange`. 0 for none.
          name: identifies the message among those of a program.

        Raises:
          CollectiveError: a part's dtype cannot be reduced in this world.
        """
        ...

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
        """Exchange one message on a cached channel of its layout; for occasional messages.

        Arguments are those of `World.channel` and `Channel.exchange`; `channel` is the
        name. Results are valid until the next message of the same layout and name.
        """
        ...

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Gather every process's `value`, by rank, from the processes present at completion. Blocks. Not for steps.

        Raises the errors of `exchange`, except `MembersChanged`.
        """
        ...

    def barrier(self) -> None:
        """Return once every process has called this. Raises the errors of `exchange`."""
        ...

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError in their current or next collective. Blocks until they have.

        Args:
          why: "in step 4 of program 1 ('train'): OSError: disk read error".
        """
        ...

    @property
    def hang_timeout(self) -> float:
        """Seconds for which a process may keep the others waiting before it is reported as stuck. 0: no limit.
        Replicated.
        """
        ...

    @property
    def waited(self) -> float:
        """Total seconds that this process has waited for others to enter collectives. Local."""
        ...


class MembersChanged(Exception):
    """Members were lost during an exchange, whose results are discarded. Raised on all remaining processes.

    The world stays usable, without the lost members: the caller sends its message again, or another one.
    """


def retry_on_members_changed(exchange: Callable[[], Arrived]) -> Arrived:
    """Carry out an exchange that doesn't depend on the membership; repeat it if members were lost meanwhile."""
    while True:
        try:
            return exchange()
        except MembersChanged:
            continue
