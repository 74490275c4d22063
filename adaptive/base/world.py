"""The class `World`: what the runtime needs of the machines. `collectives` implements it.

A *process* runs this Python program; a *worker* computes one local batch. A process has one worker for each of its
local devices, so there may be more workers than processes; or one worker that computes on a mesh of them.

A world has `capacity` *worker slots*, numbered 0 … capacity-1 in rank order; a process holds the contiguous range
`workers`. Programs are compiled for the capacity, which is fixed. `members` are the occupied slots, and `size` is their
number. Members may change between two steps: workers are lost, or a program requests another number of workers.
Available workers that aren't members are in *reserve*.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from .channel import Arrived, BlockingChannel, Channel, PartSpec, SentMessage
from .errors import WorkerCountError
from .local_mesh import LocalMesh
from .mailbox import Mailbox
from .reductions import Reduction
from .worker_mesh import WorkerMesh

T = TypeVar("T")
TransferPayload = tuple[Any, list[np.ndarray]]  # a small picklable object, and contiguous arrays
KEPT_CHANNELS = 64  # per world; bounds the memory if eager calls use many layouts


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


class World:
    """The worker slots of a job, the workers in them, and the collectives by which they exchange messages.

    The defaults are those of one process whose workers neither join nor leave. A world of one process sets `capacity`,
    `workers` and `devices`, and overrides `channel` or `exchange`.

    A collective completes on all processes or on none, even if processes are lost during it. Its description (`about=`)
    is equal on all processes; if descriptions differ, or processes are in different collectives, all raise
    DisagreementError before anything is sent. `more` is shown in that error, but not compared. Membership changes only
    inside collectives, at the same point on all processes.

    Attributes:
      rank: this process's rank among the connected processes. Local.
      processes: number of connected processes. Replicated.
      capacity: number of worker slots over all processes. Constant. Replicated.
      workers: the worker slots that this process carries. Local.
      devices: the device of each of `workers`; of a worker on a mesh, the first. Local.
      local_mesh: the mesh on which a worker of this process computes; `None` for one device each. Local.
      generation: number of changes of membership so far. Replicated.
      losses: the processes lost so far, in order. Replicated.
      unowned_slots: empty slots that no connected process carries: rank 0 sends neutral values for them. Replicated.
      respawn: whether workers that are lost, or leave upon a signal, are replaced. Replicated.
      spawns: whether processes may be spawned to join. Replicated.
      survives: whether others continue when processes are lost or leave for good. Replicated.
      in_reserve: whether this process is in reserve (`wait`). Local.
      run_under_way: whether processes in reserve take no part in collectives now. Replicated.
      needs_state_transfer: whether joined processes still lack the state of the others (`transfer_state`). Replicated.
      build_digests: if `spawns`, digests of the running program by name, which a joining process's must equal.
      hang_timeout: seconds until a process that keeps others waiting is reported as stuck; 0: no limit. Replicated.
      waited: total seconds that this process has waited for others to enter collectives. Local.
    """

    rank = 0
    processes = 1
    capacity: int
    workers: range
    devices: Sequence[jax.Device]
    local_mesh: LocalMesh | None = None
    generation = 0
    losses: tuple[Loss, ...] = ()
    unowned_slots: tuple[int, ...] = ()
    respawn = spawns = survives = False
    in_reserve = run_under_way = needs_state_transfer = False
    build_digests: Mapping[str, str] = MappingProxyType({})
    hang_timeout = waited = 0.0

    # --- messages -----------------------------------------------------------------------------------------------------

    def channel(self, parts: Sequence[PartSpec], status: int, name: Hashable = 0) -> Channel:
        """Return a channel for messages of one layout, with receive buffers of its own. Does not communicate. Lasts as
        long as the world, also when members change.

        Args:
          parts: part 0 is one-dimensional, floating, and summed.
          status: number of elements that each *process* adds to a message: see `SentMessage`.
          name: identifies the message among those of a program.

        Raises:
          CollectiveError: a part's dtype cannot be reduced in this world.
        """
        return BlockingChannel(self.exchange, [part.op for part in parts], name)

    def exchange(self, message: SentMessage, ops: Sequence[Reduction], name: Hashable = 0) -> Arrived:
        """Exchange one message on a cached channel of its layout and name; for occasional messages.

        Results are valid until this thread's next message of the same layout and name. Raises as `Channel.exchange`.
        """
        layout = tuple(PartSpec(x.shape, x.dtype, op) for x, op in zip(message.parts[0], ops, strict=True))
        key, channels = (layout, len(message.status), name, get_ident()), self._channels
        channel = channels.get(key)
        if channel is None:
            if len(channels) >= KEPT_CHANNELS:
                channels.clear()
            channel = channels[key] = self.channel(layout, len(message.status), name)
        return channel.exchange(message)

    @cached_property
    def _channels(self) -> dict[Hashable, Channel]:
        return {}

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Gather every process's `value`, by rank, from the processes present at completion. Blocks. Not for steps.

        Raises the errors of `exchange`, except `MembersChanged`.
        """
        return [value]

    def barrier(self) -> None:
        """Return once every process has called this. Raises the errors of `exchange`."""

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError in their current or next collective. Blocks until they have.

        Args:
          why: "in step 4 of program 1 ('train'): OSError: disk read error".
        """

    # --- members ------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The occupied worker slots, in order; at least one. Replicated."""
        return tuple(range(self.capacity))

    @property
    def targets(self) -> Sequence[jax.Device | NamedSharding]:
        """What `jax.device_put` is given to copy a value to each of this process's workers. Local."""
        return self.devices if self.local_mesh is None else (self.local_mesh.whole,) * len(self.devices)

    @property
    def workers_in_words(self) -> str:
        """This process's workers: "worker 3", "workers 4–7". Local."""
        first, *others = self.workers
        return f"workers {first}–{others[-1]}" if others else f"worker {first}"

    @property
    def size(self) -> int:
        """The current number of workers. Replicated."""
        return len(self.members)

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member the generation in which it joined; identifies a new worker in an old slot. Replicated."""
        return (0,) * self.capacity

    @property
    def least(self) -> int:
        """The minimum number of workers. Replicated."""
        return len(self.members)

    @property
    def most(self) -> int:
        """The number of available workers: members and those in reserve. Replicated."""
        return len(self.members)

    def nearest(self, workers: int) -> int:
        """Return the available number of workers, of whole processes, nearest to a requested one. Replicated."""
        return self.least

    def request_workers(self, workers: int) -> None:
        """Start to prepare joining workers, for `workers` members in all. Does not block. Replicated."""
        self.change(workers)

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join; 0 on all processes but one. May communicate."""
        return 0

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members between two steps. Collective. `generation` grows if any member changes.

        Args:
          workers: the new number. Those in the highest slots leave for the reserve, or ready ones join in the lowest.
          leaving: slots whose workers leave first, for good. Only whole processes leave.

        Raises:
          WorkerCountError: the number is not available.
          Preempted: this process leaves for good; raised after the others continue without it.
        """
        if leaving or workers != len(self.members):
            number = workers - len(leaving)
            raise WorkerCountError(f"{self!r} cannot have {number} workers: its workers neither join nor leave.")

    def begin_run(self) -> None:
        """Start a run: members return, and processes in reserve wait. Collective over all processes."""

    def end_run(self) -> None:
        """End a run: processes in reserve take part in collectives again. Collective over all workers."""

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait in reserve until this process has joined the workers, or the run has ended.

        Args:
          is_ready: returns whether this process could join now.

        Raises:
          WorkerError: the run has ended with an error.
          ReserveReleased: the workers have left the world's block.
        """

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """Send the state of the running program to joining processes. Collective.

        Args:
          make: returns the state; called on one process that has it.
          room: returns receive buffers of the state's shapes and dtypes; called on joining processes.

        Returns:
          The state on joining processes; `None` on the others.
        """
        return None

    # --- what only some worlds offer ----------------------------------------------------------------------------------

    def worker_mesh(self) -> WorkerMesh | None:
        """Return the mesh of all workers; `None` if a program over all of them is no faster than messages.
        Replicated.
        """
        return None

    def run_on_mesh(
        self, program: Callable[[np.ndarray], T], status: np.ndarray, about: str = "", more: str = "", layout: str = ""
    ) -> T:
        """Call `program` once every process has made this call, and return its result. Needs a `worker_mesh`. No other
        collective of this process runs at the same time: started in different orders on two devices, they deadlock.

        Args:
          program: dispatches a program over the mesh; with several processes, waits for its results. Its argument is
            the status, summed over all processes; replicated.
          status: what this process adds to that sum; floating, one-dimensional, of one length on all processes.
          about, more, layout: see `World`; `layout` is a further description.

        Raises:
          DisagreementError: the processes' calls differ. On every process, before any has called `program`.
          WorkerError: a process has called `fail`, before any has called `program`; or a process was lost.
          CollectiveError: the world is closed.
        """
        raise NotImplementedError

    def why_no_mailbox(self) -> str:
        """Return why this world has no mailboxes; "" if it has. Replicated."""
        return "" if self.processes == 1 else "it supports collectives only"

    def create_mailbox(self, nbytes: Sequence[int], about: str, instead_of: Mailbox | None = None) -> Mailbox:
        """Create a mailbox for the current members. Collective.

        Args:
          nbytes: size of each vector that a worker publishes.
          about: see `World`.
          instead_of: an earlier mailbox that this one replaces; it is closed.
        """
        return Mailbox()

    def checkpoint_saved(self, step: int) -> None:
        """Tell the launcher that a checkpoint of this step is on the disk. Called by one process, in any thread."""
