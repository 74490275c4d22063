"""The loop over a program's steps: a steady step if nothing has changed, otherwise a general step."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from adaptive.base.activity import COMPILING, INPUT
from adaptive.base.errors import DisagreementError, DriverError, NonFiniteError, WorkerError
from adaptive.base.failure import report_failure
from adaptive.base.source_lines import at, current_line
from adaptive.base.thread_status import IN_A_STEP, thread_status
from adaptive.base.world import MembersChanged
from adaptive.data.stream import Share
from adaptive.observe.report import Report
from adaptive.operators.sources import Reading
from adaptive.runtime.outcome import Outcome

from .membership_changes import MembershipChanges, RunEnds, RunOver
from .parts import ProgramParts
from .reports import finish_step
from .steady_loop import SteadyLoop

_log = logging.getLogger("adaptive")


class RunLoop:
    """Runs the steps of one program, in one thread at a time.

    Attributes:
      membership_changes: changes of membership, applied between steps.
      steady: runs the steps in which nothing changes.
    """

    def __init__(self, parts: ProgramParts):
        self._parts = parts
        self.membership_changes = MembershipChanges(parts)
        self.steady = SteadyLoop(parts, self.membership_changes)
        self._under_way = threading.Lock()  # held during a step
        self._pid = os.getpid()

    def step(self) -> Report:
        """Run one step; see `Program.step`.

        Raises:
          DriverError: a step of this program is already running; or this process is a forked child of the program's.
          RunEnds: there is no next step.
        """
        self.check_process()
        if not self._under_way.acquire(blocking=False):
            raise DriverError(
                f"{self._parts.name} is already in a step, in another thread, or because a hook called step(). Use a "
                "program in one thread; a hook changes the run by its `control` argument."
            )
        try:
            ambient = self._parts.ambient
            if ambient.matches_here():
                return self._step()
            with ambient.settings():
                return self._step()
        finally:
            self._under_way.release()

    def check_process(self) -> None:
        """Raise unless this process built the program.

        Raises:
          DriverError: it is a forked child of that process.
        """
        if os.getpid() != self._pid:
            raise DriverError(
                f"{self._parts.name} of process {self._pid} is used{at(current_line())} in its forked child "
                f"{os.getpid()}, where neither JAX nor the world's connections work. Start the child as a new process "
                'before it needs them:  multiprocessing.get_context("spawn")'
            )

    @thread_status(IN_A_STEP)
    def _step(self) -> Report:
        p, began = self._parts, time.perf_counter()
        run, clock, kernels = p.run, p.clock, p.engine.kernels
        steady = self.steady.holds()
        if not steady:
            p.activity.begin()
            self.compile_first()
        since, clock.began = began - clock.began, began
        try:
            if kernels.busy:
                kernels.check()
            p.world.build_digests = p.build_digests
            outcome = self.steady.step(began, since) if steady else None
            if outcome is None:
                steady = False
                p.world.begin_run()
                outcome = self._general_step(since)
            plain = steady and self.steady.is_plain(outcome)
            notes = [] if plain else p.skipped.check(outcome.trouble, run.step + 1)
        except RunEnds as end:
            if isinstance(end, RunOver):
                p.progress = end.progress
            raise
        except (NonFiniteError, WorkerError, DisagreementError) as error:  # raised on all processes
            lost = f"lost with step {run.step + 1}: start from a checkpoint"
            is_what = lost if p.engine.lost_state else f"that of step {run.step}"
            error.add_note(f"The state of {p.name} is {is_what}.")
            raise
        except Exception as error:
            error.add_note(f"in step {run.step + 1}, on {p.workers_in_words}")
            report_failure(p.world, f"in step {run.step + 1} of {p.name}", error)
            raise
        if plain:
            return self.steady.report(outcome)
        report = finish_step(p, outcome, notes)
        self.steady.prepare()
        return report

    def _general_step(self, since: float) -> Outcome:
        """Run a general step; go on with the same examples if members are lost, or memory runs out.

        Args:
          since: seconds since the start of the previous step.
        """
        p = self._parts
        while True:
            if not self.membership_changes.settled:
                p.progress = self.membership_changes.apply(p.progress)
            if p.mailboxes.make():
                continue  # members may have been lost in the exchange
            try:
                before = p.activity.turn(INPUT)
                try:
                    share = p.stream.take(p.sizes.current)
                finally:
                    p.activity.turn(before)
                return self._run_engine(share, since)
            except MembersChanged:
                continue

    def _run_engine(self, share: Share, since: float) -> Outcome:
        p, sizes, seconds = self._parts, self._parts.sizes.current, self._parts.clock.compute_seconds
        step, total, taking_part = p.run.step, sum(sizes), np.asarray(sizes) > 0
        readings = [
            Reading(
                *(step, p.seed, w, total, sizes[w], sizes[w], 1, share.offsets[i]),
                *(seconds[i], since, taking_part),
            )
            for i, w in enumerate(p.world.workers)
        ]
        return p.engine.step(share, readings, p.stream.prefetch, search=p.skipped.next_raises, more=p.decisions.last)

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
