"""The status: what each process reports about itself in every step, summed over all processes.

The last message of a step ends with a few elements that belong to the runtime: the *status*. Each process writes its
own report, the elements are summed over processes like the rest of the message, and each process reads the sum. So
comparing decisions, and agreeing on new batch sizes, needs no message of its own. Only this file knows the layout:

    word           one per worker   4 * digest + leave_request; 0 from other processes: the digest of its process's
                                    decisions (`decision_digest.py`), and whether its process must leave: a
                                    `LeaveRequest` (`membership.py`)
    can_make_pending  one           number of processes that can run the pending batch sizes
    can_make_any   one              number of processes that can run any batch sizes from now on
    ready_to_join  one              number of requested workers that are ready to join
    checkpoint_due one              number of processes that report that a checkpoint is due
    seconds        three a worker   input, computing and busy: see `WorkerSeconds`

All but the seconds, the *facts*, are the same in nearly all steps. A process that receives the same facts again does
nothing, and one whose own facts have not changed (`repeats`) writes only its seconds.

In single precision the status takes 16 bytes per worker, and 16 more. The word has 24 bits, and is exact.
"""

from __future__ import annotations

import numpy as np

from adaptive.base.activity import WorkerSeconds
from adaptive.base.world import World
from adaptive.runtime.step_context import StepStatus

from .batch_sizes import BatchSizes
from .decision_digest import DecisionDigest
from .membership import Membership

_REQUESTS = 4  # a power of two above the largest leave_request
_OF_ALL = 4  # facts: can_make_pending … checkpoint_due
_SECONDS = 3  # of each worker: input, computing, busy


class Status(StepStatus):
    """This process's report of each step, and what it received.

    Attributes:
      length: number of elements.
      checkpoint_due: whether this process reports that a checkpoint is due. Local.
      checkpoint_requested: whether any process did so with the last message. Replicated.
      own_seconds: this process's part of `WorkerSeconds`, as `Activity.of_workers` returned it. Local.
      heard: the last message's sum; shape=(length,), a new array each time. Replicated.
      repeats: whether this process's facts are those that it reported last. Local.
    """

    def __init__(self, world: World, digest: DecisionDigest, sizes: BatchSizes, members: Membership):
        self._n = world.capacity
        self._n_facts, self.length = self._n + _OF_ALL, status_length(self._n)
        self._world, self._digest, self._sizes, self._members = world, digest, sizes, members
        self.checkpoint_due = self.checkpoint_requested = self.repeats = False
        self._own, self._seconds_view = np.zeros(0), np.zeros((_SECONDS, 0))  # last report, view of its seconds
        self.heard, self._facts, self._any_requested = np.zeros(self.length), b"", False  # with the last message

    def encode(self) -> np.ndarray:
        """Return this process's part of the sum; shape=(length,), valid until the next call."""
        if not self.repeats:
            self._write_facts()
        if self.own_seconds[1]:
            self._seconds_view[0], self._seconds_view[1], self._seconds_view[2] = self.own_seconds
        return self._own

    def _write_facts(self) -> None:
        workers, sizes, n = self._world.workers, self._sizes, self._n
        self._own = np.zeros(self.length)
        self._seconds_view = self._own[self._n_facts :].reshape(_SECONDS, n)[:, workers.start : workers.stop]
        self._own[workers.start : workers.stop] = _REQUESTS * self._digest.value + self._members.leave_request
        ready = sizes.can_make_pending, sizes.can_make_any, self._members.ready_to_join
        self._own[n : self._n_facts] = *ready, self.checkpoint_due

    def decode(self, elements: np.ndarray) -> None:
        """Apply the sum of all processes' reports; shape=(length,). Kept until the next message.

        Raises:
          DisagreementError: a process took another decision. On every process.
        """
        facts = elements[: self._n_facts].tobytes()
        if not (self.repeats and facts == self._facts):
            self._apply(elements)
        self._facts, self.heard, self.checkpoint_requested = facts, elements, self._any_requested

    def _apply(self, elements: np.ndarray) -> None:
        facts = elements[: self._n_facts].copy()
        for slot in self._world.unowned_slots:  # no process reports for these
            facts[slot] = _REQUESTS * self._digest.value
        digests, leave_requests = np.divmod(facts[: self._n], _REQUESTS)
        can_make_pending, can_make_any, ready, due = facts[self._n :].tolist()
        everyone = self._world.processes
        self._digest.compare(digests, own=self._world.workers)
        self._sizes.on_agreed(can_make_pending=can_make_pending == everyone, can_make_any=can_make_any == everyone)
        self._members.on_agreed(ready_to_join=round(ready), leave_requests=leave_requests)
        self._any_requested = due > 0

    def seconds(self, waited: float) -> WorkerSeconds:
        """Return the seconds of all workers, from the last message; `waited`: those that this process waited."""
        input_, computing, busy = self.heard[self._n_facts :].astype(np.float32).reshape(_SECONDS, self._n)
        return WorkerSeconds.measured(input_, computing, busy, self._world.workers, waited)


def status_length(capacity: int) -> int:
    """Return the number of elements of a status."""
    return capacity + _OF_ALL + _SECONDS * capacity
