"""Construction of a program's parts, from the arguments of `Program`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import proxy

from adaptive.base.activity import Activity
from adaptive.base.ambient import AmbientContext
from adaptive.base.revision import Revision
from adaptive.base.roster import Roster
from adaptive.base.signals import pending_termination
from adaptive.base.source_lines import at
from adaptive.base.world import World
from adaptive.control.batch_sizes import NOT_RESIZABLE, BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.decisions import Decisions
from adaptive.control.hooks import Hooks
from adaptive.control.hosts import HostSurvey
from adaptive.control.hyperparameters import Hyperparameters
from adaptive.control.membership import Membership
from adaptive.control.readiness import KernelsOf
from adaptive.control.status import Status
from adaptive.data.shards import stream_of
from adaptive.data.stream import Stream
from adaptive.graph.draws import notes_on_draws
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.observe.events import Listeners
from adaptive.observe.origin import RunOrigin, process_started
from adaptive.observe.run_warnings import RunWarnings
from adaptive.runtime.cache import share_compilations
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels import KernelOptions
from adaptive.runtime.kernels.memory_bound import MemoryBound, bytes_left
from adaptive.runtime.microbatches import CALL_OVERHEAD

from .arguments import Driver, Options, StateForm, built_in, check_driver, made_by, new_run_id
from .first_plan import check_alike, first_plan, plan_for_capacity
from .mailboxes import ProgramMailboxes
from .member_tracker import MemberTracker
from .parts import ProgramParts, RunState
from .step_checks import SkippedSteps, StepClock
from .tracing import TraceRecorder


def build(
    driver: Driver, state: Any, data: Any, options: Options, *, world: World, name: str, ambient: AmbientContext
) -> ProgramParts:
    """Check the arguments of a `Program`, and build its parts. Communicates.

    Args:
      name: the program's name.
      ambient: the context in which to trace the driver.

    Raises:
      DriverError: see `Program`, also for `DataError`, `BatchSizeError` and `DisagreementError`.
    """
    began = time.time()
    check_driver(driver)
    options = options.checked()
    roster = Roster.of(world)  # may change in any operation below: see `MemberTracker`
    examples = stream_of(data, world.capacity, world.workers, world)
    form, leaves = StateForm.of(made_by(state), options.per_worker_state)
    on_device = world.devices[0].platform != "cpu"
    stream = Stream(examples, seed=options.seed, workers=world.workers, beside=on_device)
    planner = Planner(
        driver, form.shapes, examples.shapes, capacity=world.capacity, local_state=form.local, ambient=ambient
    )
    sizes, plan = first_plan(planner, examples, world, roster.members, options)
    settings = {"batch sizes": sizes.current, **options.settings}
    whole = partial(plan_for_capacity, planner, sizes.limits, options.global_batch, options.microbatch)
    build_digests = check_alike(world, name, form, leaves, examples, plan, settings, whole)
    built_in(world)
    mailboxes = ProgramMailboxes(world, plan, planner.mailboxes, name)
    if world.processes > 1:
        share_compilations()
    machines, revision = HostSurvey(world, f"machines of {name}"), Revision()
    fixed_by = NOT_RESIZABLE
    if plan.one_size:
        options = replace(options, resizable=False)
        fixed_by = f"{plan.one_size}. Gather values whose shape does not depend on the batch."
    digest, activity = DecisionDigest({each.hook.name: each.line for each in plan.hooks}), Activity(world)
    membership = Membership(
        world,
        in_status=any(m.travels and m.gate is None for m in plan.messages),
        resizable=options.resizable,
        fixed_by=fixed_by,
        needed=sizes.needed,
        termination=pending_termination,
        roster=roster,
        revision=revision,
    )
    notes = [*examples.notes, *plan.unused, *_of_fixed_sizes(plan), *notes_on_draws(plan)]
    run = RunState(new_run_id(world, name), notes=notes)
    status = Status(world, digest, sizes, membership)
    engine = Engine(
        planner,
        leaves,
        world,
        status=status,
        name=name,
        kernels=_kernel_options(options, world, machines, run),
        finite=options.nonfinite != "allow",
        activity=activity,
        revision=revision,
    )
    _prepare_sizes(sizes, engine, options, fixed_by, revision)
    hyperparameters = Hyperparameters(plan.op_states, engine.workers.set_op_state, engine.workers.op_state)
    hooks = Hooks(plan.hooks, world.capacity, membership, hyperparameters, keep_sizes=bool(plan.one_size))
    decisions = Decisions(
        *(world, name, hooks, sizes, membership, hyperparameters, digest), heterogeneous=machines.heterogeneous
    )
    inputs = None if stream.in_memory else status.inputs
    activity.begin()
    activity.end()
    activity.between()  # seconds from here on do not belong to building
    run.origin = RunOrigin(process_started(), began, time.time(), machines.host_names, settings)
    return ProgramParts(
        name=name,
        world=world,
        ambient=ambient,
        seed=options.seed,
        form=form,
        data=examples,
        plan=plan,
        build_digests=build_digests,
        revision=revision,
        stream=stream,
        sizes=sizes,
        membership=membership,
        digest=digest,
        status=status,
        activity=activity,
        engine=engine,
        hyperparameters=hyperparameters,
        hooks=hooks,
        decisions=decisions,
        members=MemberTracker(world, engine, hooks, sizes, roster),
        mailboxes=mailboxes,
        clock=StepClock(world),
        skipped=SkippedSteps(options.nonfinite),
        listeners=Listeners(),
        tracing=TraceRecorder(world, name, engine, activity),
        run_warnings=RunWarnings(plan, hooks, inputs, deterministic=options.deterministic),
        run=run,
    )


def _kernel_options(options: Options, world: World, machines: HostSurvey, run: RunState) -> KernelOptions:
    """Return how kernels are compiled and chosen; notes on bounds by memory go to the run's next report."""
    memory = None
    if options.is_auto:
        left = partial(bytes_left, list(world.devices), machines.on_this_host)
        memory = MemoryBound(left, lambda note: run.notes.append(note))
    return KernelOptions(options.microbatch, options.deterministic, options.resizable, machines.compile_order, memory)


def _prepare_sizes(sizes: BatchSizes, engine: Engine, options: Options, fixed_by: str, revision: Revision) -> None:
    """Let new batch sizes wait for their kernels."""
    splittable = engine.plan.splittable
    expect = partial(Engine.expect, proxy(engine))  # weak, because the engine's status refers to the sizes
    sizes.limits = sizes.limits._replace(call_overhead=CALL_OVERHEAD if splittable else 0.0)
    sizes.take_effect(
        KernelsOf(engine.kernels, engine.world.workers, expect),
        one_by_one=not splittable,
        # Without a status no process knows whether all are ready. In deterministic programs, speeds must not decide.
        waits=options.deterministic or not engine.has_status,
        resizable=options.resizable,
        fixed_by=fixed_by,
        revision=revision,
    )


def _of_fixed_sizes(plan: Plan) -> list[str]:
    """Return notes on the policies of a program whose batch sizes cannot change because of its driver."""
    policies = [h for h in plan.hooks if plan.one_size and h.hook.handler.every_step]
    return [
        f"{h.hook.name!r}{at(h.line)} cannot change batch sizes or workers, and what it requests of these is ignored: "
        f"{plan.one_size}."
        for h in policies
    ]
