"""Base class of all worlds: their `with` block, and whether they are open.

Entering a world makes it the world of eager collectives; leaving it closes it. Inside the block, termination signals
are handled.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextvars import Token
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

import jax

from adaptive import CollectiveError, DisagreementError, NonFiniteError, Preempted, WorkerError
from adaptive.base.process.failure import report_failure
from adaptive.base.process.signals import SignalHandlers
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.current import enter, leave
from adaptive.base.world import World
from launchers import ending


class Lifetime:
    """Whether a world is open, and how it ends. Shared by the world, its transport and its channels.

    Args:
      world: the world, for error messages; held by a weak reference.

    Attributes:
      closed: whether the world can no longer be used by this process.
      leaving: whether the last `with` block of the world has ended.
      terminated: whether it ends because all processes received a termination signal.
      exit_reason: how the block was left other than at its end, for example "sys.exit()"; else "".

    In a forked child of this process the world is closed, because MPI, XLA and sockets belong to the parent.
    """

    def __init__(self, world: Any):
        self._world = weakref.ref(world)
        self.closed = self.leaving = self.terminated = False
        self.exit_reason = ""
        self._pid = os.getpid()
        _open.add(self)

    def check_open(self) -> None:
        """Check that the world is open.

        Raises:
          CollectiveError: it is closed, or this process is a forked child of the one that opened it.
        """
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"the world of process {self._pid} is used{at(current_line())} in its forked child {os.getpid()}, "
                "which has no connections of its own. Let the child compute without the world and the program, or "
                'start it as a new process:  multiprocessing.get_context("spawn")'
            )
        if self.closed:
            raise CollectiveError(
                f"{self.world_name} is used{at(current_line())} after it was closed. Use a world only inside its "
                "block:\n"
                "    with comm.world() as world:\n"
                "        program = ad.Program(..., world=world)"
            )

    @property
    def world_name(self) -> str:
        """The `repr` of the world."""
        return repr(self._world())


_open: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _close_in_child() -> None:
    for lifetime in _open:
        lifetime.closed = True


os.register_at_fork(after_in_child=_close_in_child)


class WorldBase(World):
    """A world as a context manager. Worlds nest: inside, collectives use the world that was entered last.

    Attributes:
      lifetime: whether the world is open.
    """

    def __init__(self) -> None:
        self._tokens: list[tuple[Token[World | None], SignalHandlers]] = []
        self.lifetime = Lifetime(self)

    def __enter__(self) -> Self:
        self.lifetime.check_open()
        self._tokens.append((enter(self), SignalHandlers()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, handlers = self._tokens.pop()
        leave(self, token)
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
            report_failure(self, f"in its {type(self).__name__}'s block", error)
        self._abandon(f"it has left the block of its world by {type(error).__name__}: {error}")

    def _abandon(self, why: str) -> None:
        """Close the world on this process only, and send the others the reason `why`, unless it is empty."""
        self.lifetime.closed = True

    def close(self) -> None:
        """Free the world's resources. Called at the end of its `with` block; calling it again does nothing."""
        self.lifetime.closed = True

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Return every process's value, by rank: here, the only one."""
        self.lifetime.check_open()
        return [value]

    def barrier(self) -> None:
        """Return once every process has called this: here, at once."""
        self.lifetime.check_open()


def forward(path: str) -> Any:
    """Return a property that reads a dotted attribute path, by C code, because some are read in every step."""
    return property(attrgetter(path))


def describe(devices: Sequence[jax.Device]) -> str:
    """Describe devices: `cpu:0`, `cpu:0, cpu:1`, `cuda:0 … cuda:7`."""
    names = [str(device) for device in devices]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"
