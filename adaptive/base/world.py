"""The `World` protocol: what the runtime needs of the machines. `collectives` implements it.

A *process* runs this Python program; a *worker* computes one local batch. A process carries one worker per local device
that it was given, so there may be more workers than processes.

A world has `capacity` *worker slots*, numbered 0 … capacity-1 in rank order; a process carries the contiguous range
`workers`. Programs are compiled for the capacity, which is fixed. `members` are the occupied slots, and `size` is their
number. They may change between two steps: workers are lost, or a program requests another number of them. Available
workers that aren't members are in *reserve*.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from .channel import Arrived, Channel, LookAtPiece, Parts, PartSpec
from .reductions import Reduction

TransferPayload = tuple[Any, list[np.ndarray]]  # what can be pickled, and is small; and contiguous arrays


@runtime_checkable
class World(Protocol):
    """Worker slots, the workers in them, and the collectives by which they exchange messages.

    A collective completes on all processes or on none, even if processes are lost during it. Membership (`members`,
    `rank`, `processes`) changes only inside collectives, at the same point on all processes.

    Every collective has a description (`about=`), equal on all processes. If descriptions differ, or processes are in
    different collectives, all processes raise DisagreementError before anything is sent. `more` is shown in that error,
    but not compared.
    """

    @property
    def capacity(self) -> int:
        """The number of worker slots over all processes: the maximum number of workers. Constant. Replicated."""
        ...

    @property
    def size(self) -> int:
        """The current number of workers. Replicated."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """The occupied worker slots, in order; at least one. Replicated.

        Messages have room for every slot; the content of an empty one changes no result.
        """
        ...

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member the generation in which it joined; identifies a new worker in an old slot. Replicated."""
        ...

    @property
    def generation(self) -> int:
        """The number of changes of membership so far. Replicated."""
        ...

    @property
    def least(self) -> int:
        """The minimum number of workers. Replicated."""
        ...

    @property
    def most(self) -> int:
        """The number of available workers: members and those in reserve. Replicated."""
        ...

    @property
    def respawn(self) -> bool:
        """Whether workers that are lost, or leave upon a signal, are replaced. Replicated."""
        ...

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join; 0 but on one process. May communicate."""
        ...

    def nearest(self, workers: int) -> int:
        """Return the available number of workers nearest to a requested one: between `least` and `most`, and of whole
        processes. Replicated.
        """
        ...

    def request_workers(self, workers: int) -> None:
        """Start to prepare joining workers, for `workers` members in all. Does not block. Replicated.

        A later call replaces an earlier one.
        """
        ...

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members between two steps. Collective. `generation` grows if any member changes.

        Args:
          workers: the new number. The workers in the highest slots leave for the reserve, or ready workers join, in the
            lowest free slots.
          leaving: slots whose workers leave first, for good. Only whole processes leave.

        Raises:
          WorkerCountError: the number is not available.
          Preempted: this process leaves for good; raised after the others continue without it.
        """
        ...

    @property
    def unowned_slots(self) -> tuple[int, ...]:
        """The empty slots that no connected process carries: rank 0 sends neutral values for them. Replicated."""
        ...

    @property
    def in_reserve(self) -> bool:
        """Whether this process carries no worker and is in reserve (`wait`). Local."""
        ...

    @property
    def spawns(self) -> bool:
        """Whether processes may be spawned to join. Replicated."""
        ...

    build_digests: Mapping[str, str]
    """Digests of the running program by name, if `spawns`: a joining process must have built an equal one."""

    deterministic: bool
    """Whether measurements must not affect the bits of a sum; set by deterministic programs. Replicated.
    """

    def algorithm(self, channel: Hashable) -> str:
        """Return the algorithm of a channel's messages and the reason, as text; "" if there is only one. Replicated."""
        ...

    @property
    def run_under_way(self) -> bool:
        """Whether a run is under way, during which processes in reserve take no part in collectives. Replicated."""
        ...

    @property
    def needs_state_transfer(self) -> bool:
        """Whether joined processes still lack the state of the others (`transfer_state`). Replicated."""
        ...

    def begin_run(self) -> None:
        """Start a run: members return, and processes in reserve wait. Collective over all processes."""
        ...

    def end_run(self) -> None:
        """End a run: processes in reserve take part in collectives again. Collective over all workers."""
        ...

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait in reserve until this process has joined the workers, or the run has ended.

        Args:
          is_ready: returns whether this process could join now.

        Raises:
          WorkerError: the run has ended with an error.
          ReserveReleased: the workers have left the world's block.
        """
        ...

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """Send the state of the running program to joining processes. Collective.

        Args:
          make: called on one process that has the state; returns it.
          room: called on joining processes; returns arrays of the shapes and dtypes of the state's, to receive it in.

        Returns:
          The state on joining processes; `None` on the others.
        """
        ...

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The processes lost so far, without which the others continued, in order. Replicated."""
        ...

    @property
    def hang_timeout(self) -> float:
        """Seconds for which a process may keep the others waiting before it is taken for stuck. 0 where nobody watches.
        Replicated.
        """
        ...

    @property
    def survives(self) -> bool:
        """Whether the other processes continue when some are lost or leave for good. Replicated."""
        ...

    def poll_reserve_terminating(self) -> bool:
        """Return whether a process on standby received a termination signal and the others cannot continue without it.

        Known to rank 0; False on the others. May communicate.
        """
        ...

    @property
    def waited(self) -> float:
        """Total seconds that this process has waited for others to enter collectives. Local."""
        ...

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
          name: which of a program's messages this is, for `way`.

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
        look: LookAtPiece | None = None,
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


class Loss(NamedTuple):
    """A lost process, without which the others continue. Replicated."""

    workers: tuple[int, ...]  # its worker slots, now empty
    process: str  # "rank 2 (pid 4711 on node7)"
    phase: str  # the collective in which the others noticed: "message 1 of step 14 of program 1 ('train')"
    seconds: float  # from then until they continued, measured by rank 0; 0 if unknown

    def __str__(self) -> str:
        who = f"worker{'s' * (len(self.workers) > 1)} {', '.join(map(str, self.workers))}"
        milliseconds = 1e3 * self.seconds
        took = f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
        repaired = f"; {took} ms to repair" if self.seconds else ""
        return f"{who} lost: {self.process} disconnected in {self.phase}{repaired}."


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
