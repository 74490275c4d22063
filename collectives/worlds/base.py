"""What all worlds share: entering one makes it the world of eager collectives, leaving it closes it.

In between, signals that tell this process to go are listened for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from types import TracebackType
from typing import Self

import jax

from adaptive import CollectiveError, DisagreementError, NonFiniteError, Preempted, WorkerCountError, WorkerError
from adaptive.extend import FixedMembership, SignalHandlers, World, at, current_line, enter, leave, report_failure
from launchers import ending


class WorldBase(FixedMembership):
    """A world as a context manager. Worlds nest: inside, collectives go to the world that was entered last."""

    def __init__(self) -> None:
        self._tokens: list[tuple[Token[World | None], SignalHandlers]] = []
        self._closed = False
        self._leaving = False
        self._all_go = False  # because they were told to
        self._parting = ""  # by what it is left, if not at its end

    capacity: int

    generation = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The seats with a worker on them: all."""
        return tuple(range(self.capacity))

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member the generation in which it came: all were there from the start."""
        return (0,) * self.capacity

    # Worlds whose workers come and go say otherwise.

    respawn = False

    @property
    def ready(self) -> int:
        """How many of those who were called in are ready to join: nobody is."""
        return 0

    @property
    def least(self) -> int:
        """How many workers there have to be: as many as there are."""
        return len(self.members)

    @property
    def most(self) -> int:
        """How many workers there can be: as many as there are."""
        return len(self.members)

    def nearest(self, workers: int) -> int:
        """The number of workers that can be had, nearest to one that is asked for: the protocol of `World`."""
        return min(max(workers, self.least), self.most)

    def request_workers(self, workers: int) -> None:
        """Get no more ready than there are: the protocol of `World`."""
        self._check_number(workers)

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Come to as many members as there are: the protocol of `World`."""
        self._check_number(workers - len(leaving))

    def _check_number(self, workers: int) -> None:
        if workers != len(self.members):
            raise WorkerCountError(f"{self!r} cannot have {workers} workers: in it nobody comes, and nobody leaves.")

    def __enter__(self) -> Self:
        self._check_open()
        self._tokens.append((enter(self), SignalHandlers()))  # type: ignore[arg-type]  # the subclasses are Worlds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, listening = self._tokens.pop()
        leave(self, token)  # type: ignore[arg-type]
        with listening:
            self._end_block(error)

    def _end_block(self, error: BaseException | None) -> None:
        if isinstance(error, WorkerError | DisagreementError | NonFiniteError):
            ending.all_have_heard()
        if self._tokens or self._closed:
            return
        if ending.leaves():
            self._abandon("")  # the others are told by the end of this process, and go on
            return
        self._leaving = True
        if isinstance(error, Preempted):  # on all processes
            self._all_go = True
            self.close()
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._parting = "" if error is None else "sys.exit()"
            self.close()
            return
        # Not as above: closing is collective, and others may be in an exchange.
        if isinstance(error, Exception | SystemExit):
            report_failure(self, f"in its {type(self).__name__}'s block", error)  # type: ignore[arg-type]
        self._abandon(f"it has left the block of its world by {type(error).__name__}: {error}")

    def _abandon(self, why: str) -> None:
        """Be closed on this process alone."""
        self._closed = True

    def close(self) -> None:
        """Give back what the world holds. Leaving its `with` block does so; closing twice is harmless."""
        self._closed = True

    def fail(self, why: str) -> None:
        """Tell the other processes: here are none."""

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(
                f"{self!r} is closed, and is used again{at(current_line())}. Keep what uses a world inside its block:\n"
                "    with comm.world() as world:\n"
                "        program = ad.Program(..., world=world)"
            )


def describe(devices: Sequence[jax.Device]) -> str:
    """`cpu:0`, `cpu:0, cpu:1`, `cuda:0 … cuda:7`."""
    names = [str(device) for device in devices]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"
