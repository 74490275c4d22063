"""The loop over a program's steps."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptive.base.activity import COMPILING, INPUT, OTHER
from adaptive.base.errors import DisagreementError, DriverError, NonFiniteError, WorkerError
from adaptive.base.process.failure import report_failure
from adaptive.base.process.signals import PENDING_TERMINATION
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.process.thread_status import IN_A_STEP, thread_status
from adaptive.base.world import MembersChanged
from adaptive.observe.report import Report
from adaptive.operators.sources import Reading
from adaptive.runtime.fused_step import UNDER_WAY
from adaptive.runtime.step_context import Outcome

from .members import Members, RunEnds
from .parts import ProgramParts
from .reports import MOST_SKIPPED, Reports

_log = logging.getLogger("adaptive")


class RunLoop:
    """Runs the steps of one program, in one thread at a time.

    What is equal in two consecutive steps is prepared when it changes: steps need one comparison with the revision,
    which every change increments (`base/revision.py`).

    Attributes:
      members: those for which the program's state is valid; they change between steps.
    """

    def __init__(self, parts: ProgramParts):
        self._parts = parts
        self.members = Members(parts)
        self._reports = Reports(parts, self.members)
        self._valid: tuple[Any, ...] | None = None  # what the preparation is valid for
        self._sizes: tuple[int, ...] = ()
        self._fixed: list[tuple[Any, ...]] = []  # the fields of each worker's `Reading` that stay
        self._taking_part = np.zeros(0, bool)  # which workers have examples
        self._facts: tuple[Any, ...] = ()  # those that the status has reported
        self._details = ""  # the last decisions, for errors
        # Before each of the last steps: its number, the cursors of the data, and the steps skipped in a row.
        self._before: deque[tuple[int, Any, int]] = deque(maxlen=UNDER_WAY + 2)
        self._under_way = threading.Lock()  # held during a step
        self._interrupts = parts.engine.context.interrupts
        self._interrupts.enabled = True
        self._pid = os.getpid()

    def step(self, *, wait: bool = True, has_settings: bool | None = None) -> Report:
        """Run one step; see `Program.step`. Raises RunEnds if there is no next step, and a DriverError if a step is
        already running, or in a forked child of the program's process.

        Args:
          wait: whether to wait until the step is known to be finite. If not, and it turns out not to be, later steps
            are taken back, and it is taken again and reported again.
          has_settings: whether this thread has the settings of the build; `None`: find out.
        """
        if os.getpid() != self._pid:
            self.check_process()
        if not self._under_way.acquire(blocking=False):
            raise DriverError(
                f"{self._parts.name} is already in a step, in another thread, or because a hook called step(). Use a "
                "program in one thread; a hook changes the run by its `control` argument."
            )
        try:
            ambient = self._parts.ambient
            if ambient.matches_here() if has_settings is None else has_settings:
                return self._step(wait)
            with ambient.settings():
                return self._step(wait)
        finally:
            self._under_way.release()
            if self._interrupts.held:
                self._interrupts.release()

    def check_process(self) -> None:
        """Raise a DriverError if this process is a forked child of the one that built the program."""
        if os.getpid() != self._pid:
            raise DriverError(
                f"{self._parts.name} of process {self._pid} is used{at(current_line())} in its forked child "
                f"{os.getpid()}, where neither JAX nor the world's connections work. Start the child as a new process "
                'before it needs them:  multiprocessing.get_context("spawn")'
            )

    @thread_status(IN_A_STEP)
    def _step(self, wait: bool) -> Report:
        p, began = self._parts, time.perf_counter()
        run, kernels, world = p.run, p.engine.kernels, p.world
        p.activity.now = INPUT
        p.activity.marks.append((~INPUT, began, world.waited))
        since, run.began = began - run.began, began
        try:
            if kernels.busy:
                kernels.check()
            world.build_digests = p.build_digests
            outcome = None
            while outcome is None:
                now = (p.revision.number, world.generation, world.run_under_way)
                if now != self._valid or PENDING_TERMINATION:
                    self._prepare()
                self._before.append((run.step, p.stream.cursors, p.skipped.in_a_row))
                try:
                    outcome = self._take_step(p, since, wait)
                    if outcome is None:
                        self._take_back()
                except MembersChanged:  # the step is taken again, on the same examples
                    self._valid = None
                    p.activity.turn(INPUT)
            notes = []
            if outcome.trouble is not None or p.skipped.in_a_row:
                notes = p.skipped.check(outcome.trouble, run.step + 1)
        except RunEnds:
            raise
        except (NonFiniteError, WorkerError, DisagreementError) as error:  # raised on all processes
            lost = f"lost with step {run.step + 1}: start from a checkpoint"
            is_what = lost if p.engine.lost_state else f"that of step {run.step}"
            error.add_note(f"The state of {p.name} is {is_what}.")
            raise
        except Exception as error:
            error.add_note(f"in step {run.step + 1}, on {world.workers_in_words}")
            report_failure(p.world, f"in step {run.step + 1} of {p.name}", error)
            raise
        return self._reports.finish(outcome, notes)

    def _prepare(self) -> None:
        """Apply all changes of members, and prepare the next steps. Communicates if there are any."""
        p, world = self._parts, self._parts.world
        p.activity.turn(OTHER)
        self.settle()
        self.compile_first()
        world.begin_run()
        while True:
            self.members.apply()
            if not p.mailboxes.make():  # members may have been lost in the exchange
                break
        self._reports.members_changed, self._reports.epoch = True, p.stream.epoch
        is_settled = self.members.settled
        self._valid = (p.revision.number, world.generation, world.run_under_way) if is_settled else None
        sizes = p.sizes.current
        if sizes != self._sizes:  # the same objects while sizes stay
            self._sizes, self._taking_part = sizes, np.asarray(sizes) > 0
        self._facts = ()
        self._fixed = [(p.seed, w, sum(sizes), sizes[w], sizes[w], 1) for w in world.workers]
        p.activity.turn(INPUT)

    def settle(self) -> bool:
        """Wait until it is known whether all steps were finite. Returns whether they were; if not, they are taken back
        up to the first that was not, which is the next step.
        """
        if self._parts.engine.settle():
            return True
        self._take_back()
        return False

    def _take_back(self) -> None:
        """Go back to the first step that was not finite. Steps from that one on have not changed the state."""
        p, number = self._parts, self._parts.engine.take_back()
        if number == p.run.step:
            return
        cursors, in_a_row = next((cursors, n) for step, cursors, n in reversed(self._before) if step == number)
        p.stream.go_back(cursors)
        p.hooks.go_back(number)
        p.run.step, p.skipped.in_a_row, self._reports.epoch = number, in_a_row, p.stream.epoch

    def _take_step(self, p: ProgramParts, since: float, wait: bool) -> Outcome | None:
        """Read the examples, compute, exchange, and commit. Returns `None` if a step was not finite. Raises
        MembersChanged if members were lost, and the step is not committed.

        Args:
          since: seconds since the start of the previous step.
          wait: whether to wait until the step is known to be finite. Done in any case before the values of the step are
            used, and before sizes change.
        """
        status, digest, seconds = p.status, p.digest, p.run.compute_seconds
        share = p.stream.take(self._sizes)
        facts = (
            digest.value,
            digest.step,
            status.checkpoint_due,
            p.world.processes,
            p.engine.kernels.compiled.complete,
        )
        status.repeats = facts == self._facts and p.sizes.pending is None and not PENDING_TERMINATION
        if facts != self._facts:
            self._facts, self._details, self._reports.in_force = facts, p.decisions.last, p.hyperparameters.values
        readings, step, taking_part = [], p.run.step, self._taking_part
        for fixed, offset, known in zip(self._fixed, share.offsets, seconds, strict=True):
            # Skips the initializer in Python.
            readings.append(tuple.__new__(Reading, (step, *fixed, offset, known, since, taking_part)))
        search = p.skipped.raises or p.skipped.in_a_row == MOST_SKIPPED
        wait = wait or p.run.step + 1 >= p.hooks.next_due or p.listeners.waits
        wait = wait or p.sizes.pending is not None or not p.stream.goes_back
        try:
            return p.engine.step(share, readings, p.stream.prefetch, None, search, self._details, wait)
        except BaseException:
            self._facts = ()  # they may not have been sent
            raise
        finally:
            status.repeats = False

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compile_first(self) -> None:
        """Compile the kernels of the next step, if no step was compiled before."""
        if not self._parts.run.compiled:
            self.compile_for(self._parts.sizes.current)

    def compile_for(self, batch_sizes: Sequence[int]) -> None:
        """Compile the kernels for a step with these sizes of all workers, and wait for them."""
        p = self._parts
        sizes = [batch_sizes[worker] for worker in p.world.workers]
        p.engine.expect(batch_sizes)
        with p.activity.doing(COMPILING):
            if p.run.compiled:
                p.engine.kernels.require(sizes)
                return
            p.engine.compile(sizes, of_all=batch_sizes)
        if not any(sizes):  # workers that may get examples later compile the buckets of the others
            p.engine.kernels.extend(max(p.sizes.current))
        p.run.compiled = True
