"""The parts of a program, built from its arguments, and the state of its run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import jax

from adaptive.base.activity import BETWEEN, Activity
from adaptive.base.process.signals import pending_termination
from adaptive.base.process.source_lines import at
from adaptive.base.revision import Revision
from adaptive.base.roster import Roster
from adaptive.base.values.ambient import AmbientContext
from adaptive.base.world import World
from adaptive.control.batch_sizes import NOT_RESIZABLE
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.decisions import Decisions
from adaptive.control.hooks import Hooks
from adaptive.control.hosts import HostSurvey
from adaptive.control.hyperparameters import Hyperparameters
from adaptive.control.mailboxes import ProgramMailboxes
from adaptive.control.membership import Membership
from adaptive.control.readiness import KernelsOf
from adaptive.control.status import Status
from adaptive.data.stream import Stream, open_data
from adaptive.disk.best import CheckpointValues
from adaptive.graph.draws import notes_on_draws
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.observe.events import Listeners
from adaptive.observe.origin import run_origin
from adaptive.observe.sinks import SinkThread
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels import KernelOptions
from adaptive.runtime.kernels.cache import share_compilations
from adaptive.runtime.kernels.memory_bound import MemoryBound, bytes_left
from adaptive.runtime.kernels.microbatches import CALL_OVERHEAD
from adaptive.runtime.step_context import StepContext

from .arguments import Driver, Options, StateForm, built_in, check_driver, made_by
from .first_plan import check_alike, first_plan, plan_for_capacity
from .reports import SkippedSteps

if TYPE_CHECKING:  # imported on use
    from adaptive.observe.progress import Progress

    from .run_checkpointer import RunCheckpointer


class RunLimit(NamedTuple):
    """The limits of a run, unless a hook or the script stops it before. `None`: no limit. Replicated."""

    epoch: int | None = None
    step: int | None = None


@dataclass(eq=False)
class RunState:
    """The part of a run's state that does not belong to one of the program's parts.

    Attributes:
      notes: notes for the next report.
      compute_seconds: of the last step, for each worker of this process; NaN if unknown. Local.
      step: number of completed steps.
      began: start of the last step that began, by `time.perf_counter`; NaN before the first. Local.
      limit: the limit of the current call of `Program.run`.
      under_way: whether there is one: its loop has begun, and has not been left.
      restored: whether a checkpoint was restored since the last step.
      compiled: whether the programs of a first step are compiled.
      origin: data about this process for its first event; `None` after that.
      checkpointer: that of the current call of `Program.run`; progress, sinks: those of the last call.
      values: by which the checkpoints of the last call with checkpoints are compared.
      logged: values for the first step of the first run.
      directories: directories of checkpoints from which the program was restored, or to which it has written.
    """

    TRANSFERRED = ("step", "limit", "run_id")  # what a joining process takes over from the others

    run_id: str
    notes: list[str]
    compute_seconds: list[float]
    step: int = 0
    began: float = math.nan
    limit: RunLimit = field(default_factory=RunLimit)
    under_way: bool = False
    restored: bool = False
    compiled: bool = False
    origin: dict[str, Any] | None = None
    checkpointer: RunCheckpointer | None = None
    progress: Progress | None = None
    sinks: SinkThread | None = None
    values: CheckpointValues | None = None
    logged: dict[str, float] = field(default_factory=dict)
    directories: set[Path] = field(default_factory=set)

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the last step, in all outputs. Local."""
        if self.sinks is None:
            self.logged |= values
        for output in (self.sinks, self.progress, self.values):
            if output is not None:
                output.log(values, self.step)

    def forget_seconds(self) -> None:
        """Mark all durations as unknown, as before the first step."""
        self.compute_seconds, self.began = [math.nan] * len(self.compute_seconds), math.nan

    def note(self, text: str) -> None:
        """Add a note to the next report."""
        self.notes.append(text)

    def flush_logs(self) -> None:
        """Write all steps so far to the logs. Local."""
        if self.sinks is not None:
            self.sinks.flush()


class ProgramParts:
    """The parts of a program. None refers to the program itself. See `Program` for arguments and errors.

    They are built in an order that is the same on all processes, because building communicates.

    Args:
      name: the program's name in errors and messages.
      ambient: the context in which to trace the driver.

    Attributes:
      build_digests: digests that processes compare if a message does not match: see `World.build_digests`.
      revision: incremented by every change on which prepared steps depend.
      roster: the members when building began, for which the first sizes were chosen.
    """

    def __init__(
        self,
        driver: Driver,
        state: Any,
        data: Any,
        options: Options,
        world: World,
        name: str,
        ambient: AmbientContext,
    ):
        began = time.time()
        self.world, self.name, self.ambient = world, name, ambient
        check_driver(driver)
        self.roster = roster = Roster.of(world)  # may change in any operation below: see `Members`
        self.data, self.seed = open_data(data, world.capacity, world.workers, world, options.seed), options.seed
        self.form, leaves = StateForm.of(made_by(state), options.per_worker_state, world.local_mesh)
        on_device = world.devices[0].platform != "cpu"
        self.stream = Stream(self.data, seed=self.seed, workers=world.workers, beside=on_device)
        planner = Planner(
            *(driver, self.form.shapes, self.data.shapes),
            capacity=world.capacity,
            local_state=self.form.local,
            ambient=ambient,
            on_mesh=world.local_mesh is not None,
        )
        self.sizes, self.plan = first_plan(planner, self.data, world, roster.members, options)
        settings = {"batch sizes": self.sizes.current, **options.settings}
        if world.local_mesh is not None:
            settings["mesh"] = repr(world.local_mesh)
        whole = partial(plan_for_capacity, planner, self.sizes.limits, options)
        self.build_digests = check_alike(world, name, self.form, leaves, self.data, self.plan, settings, whole)
        built_in(world)
        self.mailboxes = ProgramMailboxes(world, self.plan, planner.mailboxes, name)
        if world.processes > 1:
            share_compilations()
        machines, self.revision = HostSurvey(world, f"building {name}"), Revision()
        notes = [*self.data.notes, *_of_fixed_sizes(self.plan), *notes_on_draws(self.plan)]
        self.run = RunState(machines.run_id, notes, [math.nan] * len(world.workers))
        fixed_by = "" if options.resizable else NOT_RESIZABLE
        if self.plan.one_size:
            options = replace(options, resizable=False)
            fixed_by = f"{self.plan.one_size}. Gather values whose shape does not depend on the batch."
        self._prepare_status(options, roster, fixed_by)
        context = StepContext(
            planner,
            leaves,
            world,
            status=self.status,
            name=name,
            kernels=self._kernel_options(options, machines),
            finite=options.nonfinite != "allow",
            activity=self.activity,
            revision=self.revision,
        )
        self.engine = Engine(context)
        self._prepare_sizes(options, fixed_by)
        self._prepare_hooks(heterogeneous=machines.heterogeneous)
        self.skipped, self.listeners = SkippedSteps(options.nonfinite), Listeners()
        self.activity.begin()  # seconds from here on do not belong to building
        self.activity.end()
        self.activity.between()
        self.run.origin = run_origin(began, machines.host_names, settings)
        self.activity.turn(BETWEEN)
        self.activity.between()  # discards the time until here, which `origin` has

    def _prepare_status(self, options: Options, roster: Roster, fixed_by: str) -> None:
        """Create the parts that write into the status of each step."""
        plan = self.plan
        self.digest = DecisionDigest({each.hook.name: each.line for each in plan.hooks})
        self.activity = Activity(self.world)
        self.membership = Membership(
            self.world,
            in_status=any(m.travels and m.gate is None for m in plan.messages),
            fixed_by=fixed_by,
            needed=self.sizes.needed,
            termination=pending_termination,
            roster=roster,
            revision=self.revision,
        )
        self.status = Status(self.world, self.digest, self.sizes, self.membership)

    def _prepare_sizes(self, options: Options, fixed_by: str) -> None:
        """Let new batch sizes wait for their kernels."""
        engine, sizes, splittable = self.engine, self.sizes, self.plan.splittable
        expect = partial(Engine.expect, proxy(engine))  # weak, because the engine's status refers to the sizes
        sizes.limits = sizes.limits._replace(call_overhead=CALL_OVERHEAD if splittable else 0.0)
        sizes.take_effect(
            KernelsOf(engine.kernels, self.world.workers, expect),
            one_by_one=not splittable,
            # Without a status no process knows whether all are ready. In deterministic programs speeds must not decide.
            waits=options.deterministic or not engine.has_status,
            fixed_by=fixed_by,
            revision=self.revision,
        )

    def _prepare_hooks(self, *, heterogeneous: bool) -> None:
        plan, workers = self.plan, self.engine.workers
        self.hyperparameters = Hyperparameters(plan.op_states, workers.set_op_state, workers.op_state)
        self.hooks = Hooks(
            *(plan.hooks, self.world.capacity, self.membership, self.hyperparameters), keep_sizes=bool(plan.one_size)
        )
        self.decisions = Decisions(
            *(self.world, self.name, self.hooks, self.sizes, self.membership, self.hyperparameters, self.digest),
            heterogeneous=heterogeneous,
        )

    def _kernel_options(self, options: Options, machines: HostSurvey) -> KernelOptions:
        """Return how kernels are compiled and chosen."""
        memory = None
        if options.is_auto:
            left = partial(bytes_left, list(self.world.devices), machines.on_this_host)
            memory = MemoryBound(left, self.run.note)
        return KernelOptions(options.microbatch, options.deterministic, options.resizable, memory)

    def state_as_given(self, leaves: list[jax.Array]) -> Any:
        """Return the state in the user's structure, from its leaves."""
        return self.form.as_given(leaves, [var.aval.weak_type for var in self.plan.graph.state_vars])


def _of_fixed_sizes(plan: Plan) -> list[str]:
    """Return notes on the policies of a program whose batch sizes cannot change because of its driver."""
    policies = [h for h in plan.hooks if plan.one_size and h.hook.handler.every_step]
    return [
        f"{h.hook.name!r}{at(h.line)} cannot change batch sizes or workers, and what it requests of these is ignored: "
        f"{plan.one_size}."
        for h in policies
    ]
