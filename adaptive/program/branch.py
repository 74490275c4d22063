"""A branch of a run: trial steps, after which the program returns to its state before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptive.base.ambient import with_build_settings
from adaptive.base.decision import Decision
from adaptive.base.errors import DriverError
from adaptive.base.failure import fails_together
from adaptive.base.roster import Roster, with_same_members
from adaptive.base.source_lines import at, current_line
from adaptive.base.split import split
from adaptive.operators.hyperparameters import checked_hyperparameters

from .checkpoint import snapshot
from .parts import ProgramParts
from .restore import prepare
from .run_loop import RunLoop


class Branch:
    """A context manager for trial steps of a program: see `Program.branch`.

    Entering communicates like a checkpoint. Leaving does not, so that a process that raises in the branch can leave it.
    """

    def __init__(self, parts: ProgramParts, loop: RunLoop, global_batch: int | None, values: Mapping[str, Any]):
        self._parts, self._loop, self._ambient = parts, loop, parts.ambient
        self.world, self._name = parts.world, parts.name  # for `fails_together`
        self._global_batch, self._values = global_batch, values

    @with_build_settings
    @fails_together("in beginning a branch of")
    def __enter__(self) -> None:
        p, run = self._parts, self._parts.run
        if p.membership.target > len(p.world.members):
            raise DriverError(
                f"branch{at(current_line())}: {p.membership.target} workers were requested and "
                f"{len(p.world.members)} have joined. Workers cannot join in a branch. Begin the "
                "branch when all have joined:  if len(program.members) == program.target_workers:"
            )
        there = p.hyperparameters
        values = checked_hyperparameters(there.values, self._values, there.types) if self._values else {}
        decision = Decision(p.sizes.exactly(self._global_batch).global_batch, hyperparameters=values)
        run.flush_logs()
        self._checkpoint = with_same_members(p.world, lambda: snapshot(p))
        self._before = run.run_id, run.restored, run.notes, p.skipped.in_a_row, p.digest.export()
        run.notes = []
        self._outer = p.hooks.suspended, p.listeners.suspended
        p.hooks.suspended = p.listeners.suspended = True
        try:
            p.digest.enter(run.step, "program.branch", decision)
            self._loop.compile_first()
            self._loop.compile_for(p.sizes.target)  # in force after the branch
            sizes, total = p.sizes, decision.global_batch
            if total is not None:
                batch_sizes = split(total, sizes.shares, sizes.bounds())
                self._loop.compile_for(batch_sizes)
                sizes.restart(batch_sizes, sizes.shares, sizes.members, total)
            there.request(values)
            p.revision.increment()
        except BaseException:
            self._restore()
            raise

    @with_build_settings
    def __exit__(self, *exc: object) -> None:
        if not self._parts.engine.lost_state:  # otherwise only a checkpoint on disk could be restored
            self._restore()

    def _restore(self) -> None:
        p, run = self._parts, self._parts.run
        prepare(p, self._loop, self._checkpoint)(Roster.of(p.world))
        run.run_id, run.restored, run.notes, p.skipped.in_a_row, digest = self._before
        p.digest.adopt(digest)
        p.hooks.suspended, p.listeners.suspended = self._outer
