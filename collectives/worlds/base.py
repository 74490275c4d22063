"""Base class of all worlds: their `with` block, and membership that never changes.

Entering a world makes it the world of eager collectives; leaving it closes it. Inside the block, termination signals
are handled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

import jax

from adaptive import DisagreementError, NonFiniteError, Preempted, WorkerCountError, WorkerError
from adaptive.base.current import enter, leave
from adaptive.base.failure import report_failure
from adaptive.base.signals import SignalHandlers
from adaptive.base.worker_slots import FixedMembership
from adaptive.base.world import World
from launchers import ending

from .lifetime import Lifetime


class WorldBase:
    """A world as a context manager. Worlds nest: inside, collectives use the world that was entered last.

    Attributes:
      lifetime: whether the world is open.
    """

    def __init__(self) -> None:
        self._tokens: list[tuple[Token[World | None], SignalHandlers]] = []
        self.lifetime = Lifetime(self)

    def __enter__(self) -> Self:
        self.lifetime.check_open()
        self._tokens.append((enter(self), SignalHandlers()))  # type: ignore[arg-type]  # the subclasses are Worlds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, handlers = self._tokens.pop()
        leave(self, token)  # type: ignore[arg-type]
        with handlers:
            self._end_block(error)

    def _end_block(self, error: BaseException | None) -> None:
        lifetime = self.lifetime
        if isinstance(error, WorkerError | DisagreementError | NonFiniteError):
            ending.all_have_heard()
        if self._tokens or lifetime.closed:
            return
        if ending.leaves():
            self._abandon("")  # the others notice the end of this process, and continue
            return
        lifetime.leaving = True
        if isinstance(error, Preempted):  # on all processes
            lifetime.terminated = True
            self.close()
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            lifetime.exit_reason = "" if error is None else "sys.exit()"
            self.close()
            return
        # Closing is collective, and the others may be in an exchange, so close on this process alone.
        if isinstance(error, Exception | SystemExit):
            report_failure(self, f"in its {type(self).__name__}'s block", error)  # type: ignore[arg-type]
        self._abandon(f"it has left the block of its world by {type(error).__name__}: {error}")

    def _abandon(self, why: str) -> None:
        """Close the world on this process only, and send the others the reason `why`, unless it is empty."""
        self.lifetime.closed = True

    def close(self) -> None:
        """Free the world's resources. Called at the end of its `with` block; calling it again does nothing."""
        self.lifetime.closed = True

    def fail(self, why: str) -> None:
        """Report to the other processes that this one has failed. Does nothing here: there are none."""


class FixedMembers(FixedMembership):
    """Membership of a world whose workers neither join nor leave: see `World`."""

    capacity: int
    generation = 0
    respawn = False

    @property
    def members(self) -> tuple[int, ...]:
        """The worker slots that are occupied: all."""
        return tuple(range(self.capacity))

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member, the generation in which it joined: 0."""
        return (0,) * self.capacity

    @property
    def least(self) -> int:
        """The least number of workers: all."""
        return len(self.members)

    @property
    def most(self) -> int:
        """The largest number of workers: all."""
        return len(self.members)

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join: none."""
        return 0

    def nearest(self, workers: int) -> int:
        """Return the possible number of workers nearest to `workers`."""
        return self.least

    def request_workers(self, workers: int) -> None:
        """Request a number of workers. Does nothing: the number is fixed."""
        self._check_number(workers)

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members to `workers`, which must be the present number.

        Raises:
          WorkerCountError: it is another number.
        """
        self._check_number(workers - len(leaving))

    def _check_number(self, workers: int) -> None:
        if workers != len(self.members):
            raise WorkerCountError(f"{self!r} cannot have {workers} workers: its workers neither join nor leave.")


def forward(path: str) -> Any:
    """Return a property that reads a dotted attribute path, by C code, because some are read in every step."""
    return property(attrgetter(path))


def describe(devices: Sequence[jax.Device]) -> str:
    """Describe devices: `cpu:0`, `cpu:0, cpu:1`, `cuda:0 … cuda:7`."""
    names = [str(device) for device in devices]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"
