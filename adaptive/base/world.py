"""What the runtime needs of the machines: the `World` protocol. `collectives` implements it.

A *process* runs this Python program; a *worker* computes one local batch. A process carries one worker per local
device it was given, so `capacity` (workers) may exceed `processes`. Workers are numbered 0 … capacity-1 in rank
order, and a process carries the contiguous range `workers`.

These numbers are *seats*: `capacity` is how many there are. Programs are compiled for it, and it stays. `members`
are the seats with a worker on them, `size` is their number. They may change between two steps: because workers are
lost, or because a program asks for another number of them. Workers that could be had, and are not members, are in
*reserve*.
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
    """Seats, workers on them, and the one thing these do together: exchange messages.

    What processes do together is completed on all of them, or on none: also where some are lost in the middle of it.
    Who is there (`members`, `rank`, `processes`) changes at the same point on all processes, and only where they do
    something together.

    Everything that processes do together is *about* something, said in words (`about=`) that are equal on all of them.
    Where they are not, or where one process is in another collective than the others, all processes raise
    DisagreementError, before anything is sent. `more` is shown in that error, and not compared.
    """

    @property
    def capacity(self) -> int:
        """The number of seats, over all processes: how many workers there can be. Stays the same. Replicated."""
        ...

    @property
    def size(self) -> int:
        """The number of members: how many workers there are now. Replicated."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """The seats with a worker on them, in order; at least one. Replicated.

        What is exchanged has a place for every seat all the same; what it holds for an empty one changes no result.
        """
        ...

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member the generation in which it came: it tells a new worker on an old seat. Replicated."""
        ...

    @property
    def generation(self) -> int:
        """How often anybody has left or joined. Replicated."""
        ...

    @property
    def least(self) -> int:
        """How many workers there have to be. Replicated."""
        ...

    @property
    def most(self) -> int:
        """How many workers there can be now: the members and those in reserve. Replicated."""
        ...

    @property
    def respawn(self) -> bool:
        """Whether workers that are lost, or told to go, are replaced. Replicated."""
        ...

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join; 0 but on one process. May communicate."""
        ...

    def nearest(self, workers: int) -> int:
        """The number of workers that can be had now, nearest to one that is asked for: between `least` and `most`, and
        of whole processes. Replicated.
        """
        ...

    def request_workers(self, workers: int) -> None:
        """Begin to get so many ready that there can be `workers` members in all. Does not block. Replicated.

        A later call takes the place of an earlier one; where there are as many members, nobody is missing any more.
        """
        ...

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Come to a number of members, between two steps, on all of them alike. `generation` grows if anybody moves.

        Args:
          workers: after it. The highest seats leave, back to the reserve; or workers that are ready join, on the lowest
            free seats.
          leaving: seats whose workers leave first, for good. Processes leave as wholes.

        Raises:
          WorkerCountError: it cannot be.
          Preempted: this process is one of those that leave for good. When the others have taken leave of it.
        """
        ...

    @property
    def unowned_slots(self) -> tuple[int, ...]:
        """The empty seats that no process carries of those that are together: the process with rank 0 says for them
        that nothing was computed there. Replicated.
        """
        ...

    @property
    def in_reserve(self) -> bool:
        """Whether this process carries no worker, and waits until it is needed (`wait`). Local."""
        ...

    @property
    def spawns(self) -> bool:
        """Whether processes may be spawned to join. Replicated."""
        ...

    build_digests: Mapping[str, str]
    """Digests of the program whose steps are taken, by name, where `spawns`: who joins must have built the same."""

    deterministic: bool
    """Whether nothing that was measured may change the bits of a sum, as its order; programs that are deterministic
    set it. Replicated.
    """

    def algorithm(self, channel: Hashable) -> str:
        """Which of several ways messages of a channel go, and why, in words; nothing where there is one. Replicated."""
        ...

    @property
    def run_under_way(self) -> bool:
        """Whether a run is under way, in which workers and processes in reserve are not together. Replicated."""
        ...

    @property
    def needs_state_transfer(self) -> bool:
        """Whether processes have come in that do not know yet what the others know (`transfer_state`). Replicated."""
        ...

    def begin_run(self) -> None:
        """A run begins: the workers go on by themselves, and processes in reserve wait. Of all that are together."""
        ...

    def end_run(self) -> None:
        """A run is over: processes in reserve come out of their waiting, and all are together. Of all workers."""
        ...

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait in reserve: until this process has joined the workers, or all are together and `in_reserve` is false.

        Args:
          is_ready: whether it could join now.

        Raises:
          WorkerError: the run has ended with an error.
          ReserveReleased: the workers have left the world's block.
        """
        ...

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """What newcomers have to know. Communicates.

        Args:
          make: called on processes that know it.
          room: called on newcomers: arrays as those that `make` brings elsewhere, to receive them in.

        Returns:
          It, to newcomers; `None` to the others.
        """
        ...

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The processes that are gone, and the others went on, in the order in which they were missed. Replicated."""
        ...

    @property
    def hang_timeout(self) -> float:
        """Seconds for which a process may keep the others waiting before it is taken for stuck. 0 where nobody watches.
        Replicated.
        """
        ...

    @property
    def survives(self) -> bool:
        """Whether others go on where processes are lost, or leave for good. Replicated."""
        ...

    def poll_reserve_terminating(self) -> bool:
        """Return whether a process on standby received a termination signal and the others cannot continue without it.

        Known to rank 0; False on the others. May communicate.
        """
        ...

    @property
    def waited(self) -> float:
        """Seconds, so far, that this process has waited for others to come to what all do together. Local."""
        ...

    @property
    def rank(self) -> int:
        """This process's number, 0 … processes-1: of those that are together now. Local."""
        ...

    @property
    def processes(self) -> int:
        """How many processes are together now. Replicated."""
        ...

    @property
    def workers(self) -> range:
        """The workers that this process carries. Local."""
        ...

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The device of each worker that this process carries, in the order of `workers`. Local."""
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
        """Exchange one message on a channel that the world makes for its layout, and keeps for some time.

        For what is sent now and then. Arguments are those of `World.channel` and `Channel.exchange`; `channel` is the
        name. Results are valid until the next message of the same layout and name.
        """
        ...

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Every process's `value`, by rank: of those that are there when it is completed. Blocks. For set-up, not for
        the steps. Raises as `exchange` does, but for `MembersChanged`.
        """
        ...

    def barrier(self) -> None:
        """Return once every process has called it. Raises as `exchange` does."""
        ...

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError, in whatever they do together now or next. Blocks until they have.

        Args:
          why: "in step 4 of program 1 ('train'): OSError: disk read error".
        """
        ...


class Loss(NamedTuple):
    """A process that is gone, with its workers, and the others go on. Replicated."""

    workers: tuple[int, ...]  # the seats that it has left empty
    process: str  # in words, as the others know it: "rank 2 (pid 4711 on node7)"
    phase: str  # what the others were doing together when they noticed: "message 1 of step 14 of program 1 ('train')"
    seconds: float  # from then until they could go on, as the process with rank 0 measured it; 0 where nobody did

    def __str__(self) -> str:
        who = f"worker{'s' * (len(self.workers) > 1)} {', '.join(map(str, self.workers))}"
        milliseconds = 1e3 * self.seconds
        took = f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
        repaired = f"; {took} ms to repair" if self.seconds else ""
        return f"{who} lost: {self.process} was gone in {self.phase}{repaired}."


class MembersChanged(Exception):
    """Members were lost in the course of an exchange, and nothing of it counts. On all processes that are left.

    The world is as good as before, without them: whoever sent something sends it again, or something else in its place.
    """


def retry_on_members_changed(exchange: Callable[[], Arrived]) -> Arrived:
    """Exchange what does not depend on who is there: again, where members were lost in the course of it."""
    while True:
        try:
            return exchange()
        except MembersChanged:
            continue
