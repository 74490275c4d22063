"""The part of a `World` that reports and changes its members: `WorldMembers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

TransferPayload = tuple[Any, list[np.ndarray]]  # a small picklable object, and contiguous arrays


class WorldMembers(Protocol):
    """The worker slots of a world, the workers in them, and the reserve.

    Membership changes only inside collectives, at the same point on all processes.
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

    @property
    def spawns(self) -> bool:
        """Whether processes may be spawned to join. Replicated."""
        ...

    @property
    def survives(self) -> bool:
        """Whether the other processes continue when some are lost or leave for good. Replicated."""
        ...

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The processes lost so far, in order. Replicated."""
        ...

    @property
    def unowned_slots(self) -> tuple[int, ...]:
        """The empty slots that no connected process carries: rank 0 sends neutral values for them. Replicated."""
        ...

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join; 0 on all processes but one. May communicate."""
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
    def in_reserve(self) -> bool:
        """Whether this process carries no worker and is in reserve (`wait`). Local."""
        ...

    @property
    def run_under_way(self) -> bool:
        """Whether a run is under way, during which processes in reserve take no part in collectives. Replicated."""
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

    @property
    def needs_state_transfer(self) -> bool:
        """Whether joined processes still lack the state of the others (`transfer_state`). Replicated."""
        ...

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """Send the state of the running program to joining processes. Collective.

        Args:
          make: called on one process that has the state; returns it.
          room: called on joining processes; returns the receive buffers: arrays of the state's shapes and dtypes.

        Returns:
          The state on joining processes; `None` on the others.
        """
        ...

    build_digests: Mapping[str, str]
    """Digests of the running program by name, if `spawns`: a joining process must have built an equal one."""

    def poll_reserve_terminating(self) -> bool:
        """Return whether a process on standby received a termination signal and the others cannot continue without it.

        Known to rank 0; False on the others. May communicate.
        """
        ...


@runtime_checkable
class ReportsCheckpoints(Protocol):
    """The method of a world whose launcher must know whether the run makes progress, besides those of `World`."""

    def checkpoint_saved(self, step: int) -> None:
        """Report that a checkpoint of this step is on the disk. Called by one process, in any thread."""
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
