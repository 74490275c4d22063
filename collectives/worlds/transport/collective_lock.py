"""What worlds of several processes do together: one thread of each process at a time, and all about the same thing."""

from __future__ import annotations

from typing import Any

from adaptive.extend import FAILURE_THREAD, current_line

from .disagreement import Intent
from .operations import BARRIER, CLOSE, GatherBytes, Operation


class PeerError(Exception):
    """The other processes know that this one has failed."""


class InTurn:
    """For worlds that have operations done, by `_do`, in a block of `_collective`.

    Such a world says by `_begin` whether one can begin now, and by `_end_by` what becomes of an error in it.
    """

    _lock: Any
    _inside = False  # a collective that other processes are in too
    _begun = 0  # operations: for the watch, which sees by it that another one has begun
    _threads: dict[int, str]  # that have used this world, by their numbers
    _leaving: bool

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Every process's `value`, by rank: of those that are there when it is completed."""
        gather = GatherBytes(value, about, more)
        with self._collective():
            self._do(gather)
        return gather.result

    def barrier(self) -> None:
        """Return once every process has called it."""
        with self._collective():
            self._do(Operation("a barrier", "", BARRIER))

    def _collective(self) -> Turn:
        """Around all that processes do together: one thread at a time, and errors of what carries it as ours."""
        return Turn(self)

    def _presence(self, operation: Operation, *of_world: str) -> Intent:
        """What this process is about, in words."""
        names = [name for name in self._threads.values() if name != FAILURE_THREAD]
        leaves = self._leaving or operation.kind == CLOSE
        what = operation.about, operation.text, operation.more, current_line(), operation.failure
        return Intent(*what, leaves, names, *of_world)

    def _begin(self) -> None:
        raise NotImplementedError

    def _end_by(self, error: BaseException) -> None:
        raise NotImplementedError

    def _do(self, operation: Operation) -> None:
        raise NotImplementedError


class Turn:
    """A `with` block of `InTurn._collective`; a class of its own, since every message is in one."""

    def __init__(self, world: InTurn):
        self._world = world

    def __enter__(self) -> None:
        self._world._lock.acquire()
        try:
            self._world._begin()
        except BaseException:
            self._world._lock.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        world = self._world
        try:
            if error is not None:
                world._end_by(error)
        finally:
            world._inside = False
            world._lock.release()
