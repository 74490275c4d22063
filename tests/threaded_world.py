"""A job whose processes are threads of this one, and die at chosen operations: for tests of losses.

`ThreadedWorld` is a `World` in its shortest form: an operation is completed on all processes that come
to it, or on none. A process dies when it reaches an operation, so a test can count the operations of what it tests, and
have a process die at each of them in turn. To die in the middle of an operation, when some of the others have completed
it, is the same to a program as to die before the next one: that it is, the tests of `MPIWorld` show (tests/mpi).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

import adaptive as ad
from adaptive.base.channel import Arrived, SentMessage
from adaptive.base.reductions import Reduction, combine_microbatches
from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import Loss, MembersChanged, World

_SECONDS = 10.0  # for all processes to come to an operation; only a test that fails takes them


class Killed(BaseException):
    """This process is dead. No `except Exception` sees it."""


class Presence(NamedTuple):
    """What a process has come to."""

    kind: str
    about: str
    value: Any


class Job:
    """Processes that are threads, one worker on each.

    Args:
      dies: for each process that dies, at which of its operations, counted from 0; `None` for the next one.

    Attributes:
      operations: what each process has come to so far, in words.
      name: no two jobs have the same.
    """

    _numbers = itertools.count(1)

    def __init__(self, processes: int, dies: Mapping[int, int] | None = None):
        self.processes, self.dies = processes, dict(dies or {})
        self.name = f"job {next(self._numbers)}"
        self.operations: dict[int, list[str]] = {number: [] for number in range(processes)}
        self._there = set(range(processes))
        self._worker_slots, self._losses = WorkerSlots(processes), ()
        self._came: dict[int, Presence] = {}
        self._done: dict[int, Any] = {}  # what an operation was to each process that has come to it
        self._changed = threading.Condition()

    def run(self, script: Callable[[ThreadedWorld], Any]) -> dict[int, Any]:
        """Run a script on all processes. Returns what it has returned, by the number of the process, of those that
        live; raises what one of them has raised.
        """
        returned: dict[int, Any] = {}
        raised: list[BaseException] = []

        def process(number: int) -> None:
            try:
                returned[number] = script(ThreadedWorld(self, number))
            except Killed:
                pass
            except BaseException as error:
                raised.append(error)
            finally:
                self._leave(number)

        threads = [threading.Thread(target=process, args=(number,), daemon=True) for number in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(raised, key=lambda error: isinstance(error, ad.WorkerError)):  # the cause first
            raise error
        return returned

    def meet(self, number: int, presence: Presence) -> Any:
        """Come to an operation, and return what it was: see `_complete`."""
        with self._changed:
            count = len(self.operations[number])
            self.operations[number].append(f"{presence.kind} {presence.about}")
            if self.dies.get(number) == count:
                raise Killed
            self._came[number] = presence
            self._complete()
            if not self._changed.wait_for(lambda: number in self._done, _SECONDS):
                raise TimeoutError(f"process {number} waits in {presence}, with {sorted(self._came)}")
            return self._done.pop(number)

    def _leave(self, number: int) -> None:
        with self._changed:
            self._there.discard(number)
            self._complete()

    def _complete(self) -> None:
        """If all who are left have come: who is there from now on, who was lost, whether anybody was lost since the
        operation before, and what each has brought, by number.
        """
        if not self._there or self._came.keys() < self._there:
            return
        gone = sorted(set(self._worker_slots.members) - self._there)
        for worker_slot in gone:
            self._worker_slots.empty(worker_slot)
            self._losses += (
                Loss((worker_slot,), f"process {worker_slot}", next(iter(self._came.values())).about, 0.0),
            )
        state = self._worker_slots, self._losses, bool(gone), dict(self._came)
        self._done.update({number: deepcopy(state[:2]) + state[2:] for number in self._came})
        self._came.clear()
        self._changed.notify_all()


class ThreadedWorld(WorkerSlots, World):
    """One process's world. `number` is the process's, and its worker's worker slot: `rank` is counted among those
    left."""

    survives = True

    def __init__(self, job: Job, number: int):
        super().__init__(job.processes)
        self.workers = range(number, number + 1)
        self.devices = (jax.local_devices()[0],)
        self.job, self._number = job, number
        self._processes = tuple(range(job.processes))

    @property
    def rank(self) -> int:
        return self._processes.index(self._number)

    @property
    def processes(self) -> int:
        return len(self._processes)

    @property
    def unowned_slots(self) -> tuple[int, ...]:
        return tuple(worker_slot for worker_slot in range(self.capacity) if worker_slot not in self._processes)

    def _meet(self, kind: str, about: str, value: Any = None, *, repeats: bool = True) -> list[Any]:
        """What each has brought, by rank.

        Raises:
          MembersChanged: some are lost, and the operation does not repeat.
          DisagreementError: not all are about the same.
          WorkerError: another process has failed.
        """
        worker_slots, self.losses, changed, came = self.job.meet(self._number, Presence(kind, about, value))
        vars(self).update(vars(worker_slots))
        self._processes = tuple(sorted(came))
        failed = [presence.value for presence in came.values() if presence.kind == "failure"]
        if failed and kind != "failure":
            raise ad.WorkerError(failed[0])
        if not failed and len({(presence.kind, presence.about) for presence in came.values()}) > 1:
            raise ad.DisagreementError(str({number: presence[:2] for number, presence in came.items()}))
        if changed and not repeats:
            raise MembersChanged
        return [came[number].value for number in self._processes]

    def exchange(self, message: SentMessage, ops: Sequence[Reduction], name: Hashable = 0) -> Arrived:
        mine = [np.asarray(part) for part in message.parts[0]], message.status
        everyone = self._meet("message", message.about, mine, repeats=False)
        columns = zip(ops, zip(*(sent for sent, _ in everyone), strict=True), strict=True)
        reduced = [
            jax.device_put(np.asarray(reduce(partial(combine_microbatches, op), column))) for op, column in columns
        ]
        return [reduced], np.sum([said for _, said in everyone], axis=0)

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        return self._meet("gather", about, value)

    def barrier(self) -> None:
        self._meet("barrier", "")

    def fail(self, why: str) -> None:
        self._meet("failure", "", why)
