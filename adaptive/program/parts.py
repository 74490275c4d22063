"""The parts of a program, and the state of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from adaptive.base.activity import Activity
from adaptive.base.ambient import AmbientContext
from adaptive.base.revision import Revision
from adaptive.base.world import World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.decisions import Decisions
from adaptive.control.hooks import Hooks
from adaptive.control.hyperparameters import Hyperparameters
from adaptive.control.membership import Membership
from adaptive.control.status import Status
from adaptive.data.stream import Stream
from adaptive.graph.plan import Plan
from adaptive.observe.events import Listeners
from adaptive.observe.origin import RunOrigin
from adaptive.observe.run_warnings import RunWarnings
from adaptive.observe.sinks import SinkThread
from adaptive.runtime.engine import Engine

from .arguments import StateForm
from .mailboxes import ProgramMailboxes
from .member_tracker import MemberTracker
from .step_checks import SkippedSteps, StepClock
from .tracing import TraceRecorder

if TYPE_CHECKING:  # imported on use
    from adaptive.observe.progress import Progress

    from .run_checkpointer import RunCheckpointer


class RunLimit(NamedTuple):
    """The limits of a run, unless a hook stops it before. `None`: no limit. Replicated."""

    epoch: int | None = None
    step: int | None = None


@dataclass(eq=False)
class RunState:
    """The part of a run's state that does not belong to one of the program's parts.

    Attributes:
      run_id: see `Program.run_id`.
      notes: notes for the next report.
      step: number of completed steps.
      limit: the limit of the current call of `Program.run`.
      restored: whether a checkpoint was restored since the last step.
      compiled: whether the programs of a first step are compiled.
      origin: data about this process for its first event; `None` after that.
      checkpointer, progress, sinks: those of the last call of `Program.run`.
      logged: values for the first step of the first run.
      directories: directories of checkpoints from which the program was restored, or to which it has written.
    """

    run_id: str
    notes: list[str]
    step: int = 0
    limit: RunLimit = field(default_factory=RunLimit)
    restored: bool = False
    compiled: bool = False
    origin: RunOrigin | None = None
    checkpointer: RunCheckpointer | None = None
    progress: Progress | None = None
    sinks: SinkThread | None = None
    logged: dict[str, float] = field(default_factory=dict)
    directories: set[Path] = field(default_factory=set)

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the last step, in the logs and on the screen. Local."""
        if self.sinks is None:
            self.logged |= values
        for output in (self.sinks, self.progress):
            if output is not None:
                output.log(values, self.step)

    def flush_logs(self) -> None:
        """Write all steps so far to the logs. Local."""
        if self.sinks is not None:
            self.sinks.flush()


@dataclass(eq=False)
class ProgramParts:
    """The parts of a program, created by `build`. None refers to the program itself.

    Attributes:
      name: the program's name in errors and messages.
      build_digests: digests that processes compare if a message does not match: see `World.build_digests`.
      revision: incremented by every change on which prepared steps depend.
      members: the members for which the parts' state is valid.
    """

    name: str
    world: World
    ambient: AmbientContext
    seed: int
    form: StateForm
    data: Any
    plan: Plan
    build_digests: Mapping[str, str]
    revision: Revision
    stream: Stream
    sizes: BatchSizes
    membership: Membership
    digest: DecisionDigest
    status: Status
    activity: Activity
    engine: Engine
    hyperparameters: Hyperparameters
    hooks: Hooks
    decisions: Decisions
    members: MemberTracker
    mailboxes: ProgramMailboxes
    clock: StepClock
    skipped: SkippedSteps
    listeners: Listeners
    tracing: TraceRecorder
    run_warnings: RunWarnings
    run: RunState

    @property
    def workers_in_words(self) -> str:
        """This process's workers, for errors."""
        first, *others = self.world.workers
        return f"workers {first}–{others[-1]}" if others else f"worker {first}"

    def state_as_given(self, leaves: list[jax.Array]) -> Any:
        """Return the state in the user's structure, from its leaves."""
        return self.form.as_given(leaves, [var.aval.weak_type for var in self.plan.graph.state_vars])
