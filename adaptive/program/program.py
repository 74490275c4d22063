"""A driver program, run: the user's door to everything in this package."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import proxy

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.activity import COMPILING, COMPUTING, HOOKS, INPUT, OTHER, Activity
from adaptive.base.ambient import AmbientContext, with_build_settings, without_debug_checks
from adaptive.base.decision import Decision
from adaptive.base.errors import DataError, DisagreementError, DriverError, NonFiniteError, Preempted, WorkerError
from adaptive.base.failure import fails_together, report_failure
from adaptive.base.roster import Roster, with_same_members
from adaptive.base.signals import SignalHandlers, acknowledge_termination, pending_termination
from adaptive.base.thread_status import thread_status
from adaptive.base.versions import warn_if_untested
from adaptive.base.world import MembersChanged, World
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.decisions import Decisions
from adaptive.control.hooks import Hooks
from adaptive.control.hyperparameters import Hyperparameters
from adaptive.control.machines import Machines
from adaptive.control.membership import Membership
from adaptive.control.readiness import KernelsOf
from adaptive.control.split import positive
from adaptive.control.status import Status
from adaptive.control.together import together
from adaptive.data.one_example import taken
from adaptive.data.shards import Shards, stream_of, unused_shards
from adaptive.data.stream import Share, Stream
from adaptive.data.tables import by_column
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.observe.events import Asked, Listener, Listeners, StepEvent, Subscription, hook_values
from adaptive.observe.report import Report
from adaptive.observe.run_warnings import RunWarnings
from adaptive.observe.sinks import Sink, SinkThread, checked
from adaptive.operators.sources import Reading
from adaptive.runtime.cache import share_compilations
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels import KernelOptions
from adaptive.runtime.outcome import Outcome

from .arguments import Driver, StateForm, built_in, checked_nonfinite, count, made_by, new_run_id, next_name, world_of
from .boards import ProgramBoards
from .first_plan import check_alike, first_plan
from .member_tracker import MemberTracker
from .membership_changes import AllLeave, MembershipChanges, RunEnds, RunLimit, RunOver, RunProgress
from .overlap import checked as checked_overlap
from .overlap import overlapped
from .state_transfer import ProgramParts
from .steady_loop import SteadyLoop
from .step_checks import SkippedSteps, StepClock, UpdateCheck
from .tracing import Traced, Tracing, check_writable

# What most runs do not use, or not before the first step, is imported where it is used.
if TYPE_CHECKING:
    from adaptive.check.invariance import Invariance
    from adaptive.check.means import MeanCheck

    from . import checkpoint as _checkpoint
    from .checkpoints import Checkpoints
    from .run_checkpointer import RunCheckpointer
    from .select_checkpoint import SelectedCheckpoint

_log = logging.getLogger("adaptive")
_SAME_CHECKPOINT = "Restore the same checkpoint on every rank; all may read one file. Nothing has been restored."


class Program:
    """A driver on a data set, over the workers of a world.

    The driver is an ordinary JAX function, `driver(state, batch) -> (state, metrics)`, on a local batch. It is traced
    once per kernel size, cut at its collectives, checked (all that must be equal on all workers is), compiled, and
    run.

    Args:
      driver: the training step. `state` and `metrics` are pytrees of arrays; `batch` is a pytree like `data`, with some
        number of examples. May be wrapped in `jax.jit`.
      state: the initial state: any pytree of arrays and numbers, equal on all processes. Copied to the device of each
        worker, so arrays that are sharded over devices are refused. Python numbers are promoted like Python numbers, as
        under `jax.jit`, unless a step makes arrays of them. Or a function of no arguments that returns it: then each
        array is let go as soon as it is copied, and a large state is never held twice, unless something else keeps it.
      data: a pytree of arrays with one leading axis; or a data frame or table, taken by column, without its index; or
        anything with `__len__` and `__getitem__` whose items are pytrees, in which lists of numbers are arrays, each
        item the same whenever it is read; or a list of examples; or a loader of such; or what `ad.data` makes,
        where examples are transformed, read by processes of their own, or given by an iterator. The same whole data set
        on every process, and unchanged while the program runs. Or `Shards`: data of each worker's own.
      global_batch: examples per step, over all workers.
      world: where to run. By default the world that was entered last in this thread, or else this process as one
        worker, if there are no others.
      seed: of the order of examples and of `step_key()`.
      shares: relative sizes of the workers' first batches; a worker whose share is 0 takes no examples. Equal by
        default.
      microbatch: the most examples in one kernel call, for memory. A larger local batch runs as several calls.
      max_local_batch: the most examples that a worker may get: one number for all, or one per worker.
      quantum: what sizes are rounded to when they are changed, so that a size is made of few kernel calls. By default a
        power of two of about a sixteenth of a worker's batch.
      nonfinite: what to do in a step in which what `all_reduce` brings is not finite: because a worker's contributions
        are not, because their sum is too large for its type, or because all weights of a mean are zero. "raise", or
        "skip" the step (its examples are consumed, the state stays), or "allow", for drivers that decide by the reduced
        values themselves, as those do that scale their loss: then nothing is looked at, and a mean of nothing is NaN.
        Not with "allow", an update that makes NaNs of finite values (an optimizer's 0 / 0) raises in the next step, or
        when the state is asked for; it cannot be skipped, since it has overwritten the state.
      max_skipped: how many steps in a row may be skipped; one more raises.
      per_worker_state: picks the part of the state that may differ between workers on purpose, such as a local
        optimizer's: `lambda state: state["momentum"]`. The rest must be replicated. Local state that is
        computed from a whole local batch has that run as one kernel call; from `comm.local_mean(grads)`, in any calls.
      deterministic: choose kernel calls by size alone and not by measured time, and take up new sizes at once, waiting
        for their kernels, so that two runs with the same decisions are equal to the last bit. Over several hosts large
        sums of this world go one way from then on, whatever is faster.
      overlap: whether gradients are sent while others are still computed: "auto", where that pays; `True`, `False`, or
        into how many stages the backward pass is cut for it. "auto" cuts where processes are on several hosts and the
        message takes 10 ms or more between them, which is measured when the program is built. Results are equal but for
        rounding. `explain()` says what was decided, and why.
      resizable: whether batch sizes may change while the program runs. If `False`, nothing is compiled behind the
        steps: there are kernels for the first sizes and for no others, and whoever asks for others gets an error. Only
        `restore` brings other sizes, and waits for their kernels.

    Raises:
      DriverError: the driver cannot be run as written; or there is no world, and several processes.
      DataError: the data cannot be used.
      BatchSizeError: `global_batch` or `shares` cannot be.
      DisagreementError: processes differ in driver, data, state or settings. On every process.

    Example:
      >>> import jax.numpy as jnp, adaptive as ad, collectives as comm
      >>> def driver(state, batch):
      ...     return state + comm.all_reduce(batch["x"].mean()), {"mean": comm.all_reduce(batch["x"].mean())}
      >>> program = ad.Program(driver, jnp.zeros(()), {"x": jnp.arange(8.0)}, global_batch=8)
      >>> float(program.step().metrics["mean"])
      3.5
    """

    @without_debug_checks
    @fails_together("in building")
    def __init__(
        self,
        driver: Driver,
        state: Any,
        data: Any,
        *,
        global_batch: int,
        world: World | None = None,
        seed: int = 0,
        shares: Sequence[float] | None = None,
        microbatch: int | None = None,
        max_local_batch: int | Sequence[int] | None = None,
        quantum: int | None = None,
        nonfinite: Literal["raise", "skip", "allow"] = "raise",
        max_skipped: int = 25,
        per_worker_state: Callable[[Any], Any] | None = None,
        deterministic: bool = False,
        resizable: bool = True,
        overlap: bool | int | Literal["auto"] = "auto",
    ):
        self._ambient = AmbientContext()
        self._means: MeanCheck | None = None
        self.world = world_of(world)
        if self.world.rank == 0:
            warn_if_untested()
        self._name = next_name(self.world, driver)
        roster = Roster.of(self.world)  # may change in any operation below: see `MemberTracker`
        nonfinite, self._seed = checked_nonfinite(nonfinite), count("seed", seed)
        max_skipped = count("max_skipped", max_skipped, least=1)
        microbatch = None if microbatch is None else positive("microbatch", microbatch)
        quantum = None if quantum is None else positive("quantum", quantum)
        overlap = checked_overlap(overlap)
        self._data = stream_of(data, self.world.capacity, self.world.workers, self.world)
        self._form, leaves = StateForm.of(made_by(state), per_worker_state)
        beside = self.world.devices[0].platform != "cpu"
        self._stream = Stream(self._data, seed=self._seed, workers=self.world.workers, world=self.world, beside=beside)
        planner = Planner(
            driver,
            self._form.shapes,
            self._data.shapes,
            capacity=self.world.capacity,
            local_state=self._form.local,
            ambient=self._ambient,
        )
        self._sizes, self._plan = first_plan(
            planner,
            self._data,
            self.world,
            roster.members,
            global_batch=global_batch,
            shares=shares,
            max_local_batch=max_local_batch,
            quantum=quantum,
            microbatch=microbatch,
        )
        settings = {
            "batch sizes": self._sizes.current,
            "max_local_batch": max_local_batch,
            "quantum": self._sizes.limits.quantum,
            "microbatch": microbatch,
            "seed": self._seed,
            "nonfinite": nonfinite,
            "max_skipped": max_skipped,
            "resizable": bool(resizable),
            "deterministic": bool(deterministic),
            "overlap": overlap,
        }
        self._build_digests = check_alike(self.world, self._name, self._form, leaves, self._data, self._plan, settings)
        built_in(self.world)
        if deterministic:
            self.world.deterministic = True
        self._boards = ProgramBoards(self.world, self._plan, planner.boards, self._name)
        if self.world.processes > 1:
            share_compilations()
        machines = Machines(self.world, f"machines of {self._name}")
        self._overlap = overlapped(
            *(planner, self.world, overlap),
            hosts=machines.hosts,
            deterministic=deterministic,
            about=f"a message of {self._name}",
        )
        self._plan = planner.reference
        self._digest = DecisionDigest()
        self._membership = Membership(
            self.world,
            tells=any(m.travels and m.gate is None for m in self._plan.messages),
            resizable=bool(resizable),
            needed=self._sizes.needed,
            termination=pending_termination,
            roster=roster,
        )
        self._status = Status(self.world, self._digest, self._sizes, self._membership)
        self._activity = Activity(self.world)
        self._engine = Engine(
            planner,
            leaves,
            self.world,
            status=self._status,
            name=self._name,
            kernels=KernelOptions(microbatch, not deterministic, bool(resizable), machines.compile_order),
            finite=nonfinite != "allow",
            activity=self._activity,
        )
        # Without a message nobody can tell that all are ready; and when they are depends on how fast machines are.
        waits = deterministic or not self._engine.has_status
        expect = partial(
            Engine.expect, proxy(self._engine)
        )  # the engine has the sizes: it must not be kept alive by them
        readiness = KernelsOf(self._engine.kernels, self.world.workers, expect)
        self._sizes.take_effect(readiness, one_by_one=not self._plan.splittable, waits=waits, resizable=bool(resizable))
        self._hyperparameters = Hyperparameters(
            self._plan.slots, self._engine.workers.set_slot, self._engine.workers.slot
        )
        self._hooks = Hooks(self._plan.hooks, self.world.capacity, self._membership, self._hyperparameters)
        self._decisions = Decisions(
            *(self.world, self._name, self._hooks, self._sizes, self._membership, self._hyperparameters, self._digest),
            heterogeneous=machines.heterogeneous,
        )
        self._member_tracker = MemberTracker(self.world, self._engine, self._hooks, self._sizes, roster)
        self._clock = StepClock(self.world)
        self._skips = SkippedSteps(nonfinite, max_skipped)
        self._update = UpdateCheck(self._engine, self._name)
        parts = ProgramParts(
            *(self._engine, self._hooks, self._hyperparameters, self._sizes, self._membership, self._member_tracker),
            *(self._digest, self._stream, self._skips),
        )
        self._membership_changes = MembershipChanges(self.world, self._name, parts, self._clock, self._update)
        self._listeners = Listeners()
        self._tracing = Tracing(self.world, self._name, self._engine, self._activity)
        self._run_warnings = RunWarnings(
            *(self._plan, self._hooks, bool(resizable), None if self._stream.in_memory else self._status.inputs),
            deterministic=bool(deterministic),
            tells=self._engine.has_status,
        )
        self._checkpointer: RunCheckpointer | None = None  # of the run that is under way
        self._sinks: tuple[SinkThread, ...] = ()  # of the run that is under way
        self._directories: set[Path] = set()  # of checkpoints that this program goes on from, or has written
        self._notes = list(self._data.notes)  # for the next report
        self._step, self._restored = 0, False  # `_restored`: since the last step
        self._run_id = new_run_id(self.world, self._name)
        self._limit = RunLimit()
        self._steady = SteadyLoop(self)
        self._alone = threading.Lock()  # held while a step is under way
        self._compiled = False

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The user's state, as of the last step. A copy: it stays valid when the program goes on.

        Replicated, but for what is marked as local: of that, the first worker of this process's.

        Raises:
          NonFiniteError: the last update made NaNs. Once: then it can be looked at.
        """
        if not self._update.told:
            self._update.here(self._step)
        return self._as_given([jnp.copy(leaf) for leaf in self._engine.states[self._engine.workers.some_present]])

    def _as_given(self, leaves: list[jax.Array]) -> Any:
        return self._form.as_given(leaves, [var.aval.weak_type for var in self._plan.graph.state_vars])

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples per worker in the next step. Replicated."""
        return self._sizes.current

    @property
    def global_batch(self) -> int:
        """Examples in the next step. Replicated."""
        return sum(self._sizes.current)

    @property
    def members(self) -> tuple[int, ...]:
        """The seats with a worker on them, as of the last step. Replicated."""
        return self._sizes.members

    @property
    def target_workers(self) -> int:
        """How many members there are to be: as many as were asked for last. Replicated."""
        return self._membership.target

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The driver's `ad.hyperparameter`s in the next step, by name: numbers, and lists of them. Replicated."""
        return self._hyperparameters.values

    @property
    def steps(self) -> int:
        """Steps done. Replicated."""
        return self._step

    @property
    def run_id(self) -> str:
        """Identifies the run in its logs and checkpoints. `restore` takes over the checkpoint's. Replicated."""
        return self._run_id

    @property
    def epoch(self) -> int:
        """Whole epochs of data consumed. Replicated."""
        return self._stream.epoch

    @property
    def warm(self) -> bool:
        """Whether nothing is being compiled behind the steps. Local."""
        return self._compiled and self._engine.kernels.warm

    @property
    def plan(self) -> Plan:
        """What a step does, as data."""
        return self._plan

    def explain(self) -> str:
        """Return the plan in words: segments, messages with their bytes, hooks and slots, with the driver's lines; and
        the memory that a worker needs in a step, by kind. Temporaries are those of the kernels compiled so far.
        """
        from .explain import explain
        from .memory_needed import in_words, memory_needed

        shards = [shard.length for shard in self._data.shard_ranges] if isinstance(self._data, Shards) else []
        layouts = self._engine.layouts
        text = explain(
            *(self._plan, layouts, self._sizes.current, shards, self._sizes.resizable),
            ways=[self.world.algorithm((self._name, number)) for number in range(len(layouts))],
            overlap=self._overlap.in_words,
        )
        memory = in_words(memory_needed(self._engine, self._data, self._sizes.current))
        return "\n".join([text, *(f"input    {line}" for line in self._stream.in_words()), *memory])

    # --- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        progress: bool = False,
        log: Sequence[Sink] = (),
        record: str | Path | None = None,
        checkpoint: Checkpoints | None = None,
    ) -> Iterator[Report]:
        """Run steps, and report each.

        Args:
          epochs: until so many more epochs have ended. A batch may span the end of an epoch. It then takes the last
            examples of one epoch and the first of the next one, among which one example can be in it twice.
          steps: at most so many more steps.
          progress: show on rank 0 where the run stands: one live line on a terminal, plain lines elsewhere, on stderr;
            and what it is waiting for when a step takes long.
          log: sinks to which rank 0 writes each step, from a thread beside the steps:
            `[ad.log.TensorBoard("runs/a"), ad.log.CSV("run.csv")]`, or your own (see `ad.log.Sink`). One that fails is
            told no more, and the run goes on without it; a warning in the log "adaptive" and a note in rank 0's report
            say so.
          record: a file for `ad.log.JSONL`, one more sink: what hooks were shown and what they decided, to be replayed
            by `adaptive replay`.
          checkpoint: where and how often to keep checkpoints on disk: `ad.Checkpoints("run/", every="1 epoch")`. The
            last state is kept when the run ends, also where all are told to go, but not where its loop is left by
            `break` or an error.

        Yields:
          A `Report` per step; ends early when a hook calls `control.stop()`. With neither `epochs` nor `steps`, only
          then.

        Raises:
          Preempted: this process was told to go, by SIGTERM or SIGUSR1, and has left the others; or all were, and the
            last state is on the disk. See docs/elastic.md.
          CheckpointError: no checkpoints can be kept as `checkpoint` says. On rank 0, before the first step.
        """
        if epochs is not None:
            self._stream.check_epochs("steps=…")
        self._limit = RunLimit(
            None if epochs is None else self.epoch + count("epochs", epochs),
            None if steps is None else self._step + count("steps", steps),
        )
        self._decisions.stopped = False
        self._run_warnings.begin()
        listening = nullcontext() if checkpoint is None else SignalHandlers()
        with listening, self._shown(progress), self._logged(log, record), self._kept(checkpoint) as checkpointer:
            all_leave: AllLeave | None = None
            while not (all_leave or self._decisions.stopped):
                limit = self._limit
                if limit.step is not None and self._step >= limit.step:
                    break
                if limit.epoch is not None and self._stream.epoch >= limit.epoch:
                    break
                try:
                    report = self._one_step()
                except RunOver:  # of the workers; this process was in reserve
                    return
                except AllLeave as why:
                    all_leave = why
                    continue
                if checkpointer is not None:
                    checkpointer.after(report)
                yield report
            self._tracing.end()
            self._update.together(self._step, "the end of run()")
            self._compare_last_decision()
            if checkpointer is not None:
                checkpointer.end(in_any_case=all_leave is not None)
            if all_leave is not None:
                more = "" if checkpointer else ", and keeps no checkpoint, since it was given no checkpoint="
                raise self._preempted(all_leave, more)
            self.world.end_run()
            self._adopt_progress(self._membership_changes.transfer_state(self._progress))

    @contextmanager
    def _shown(self, progress: bool) -> Iterator[None]:
        if not progress:
            yield
            return
        from adaptive.observe.progress import Course as RunCourse
        from adaptive.observe.progress import Progress

        sizes = [self._sizes.current[worker] for worker in self.world.workers]
        missing = 0 if self._compiled else self._engine.missing(sizes)
        course = RunCourse(self._plan.graph.name, self._sizes.current, len(self._data), *self._limit, missing)
        shown = Progress(course, self.world, self._activity, self._engine.kernels)
        with self.subscribe(shown):
            try:
                yield
            except BaseException as error:
                shown.close(error)
                raise
            shown.close()

    @contextmanager
    def _logged(self, log: Sequence[Sink], record: str | Path | None) -> Iterator[None]:
        from adaptive.observe.record import JSONL

        with ExitStack() as open_ones:
            sinks = [*([] if record is None else [JSONL(record)]), *checked(log)]
            self._sinks = tuple(open_ones.enter_context(closing(SinkThread(sink, self.world))) for sink in sinks)
            for sink in self._sinks:
                open_ones.enter_context(self.subscribe(sink))
            yield

    def _flush_logs(self) -> None:
        """Write all steps so far to the logs. Local."""
        for sink in self._sinks:
            sink.flush()

    @contextmanager
    def _kept(self, checkpoint: Checkpoints | None) -> Iterator[RunCheckpointer | None]:
        if checkpoint is None:
            yield None
            return
        from .run_checkpointer import RunCheckpointer

        with RunCheckpointer(checkpoint, self) as self._checkpointer:
            try:
                yield self._checkpointer
            finally:
                checkpointer, self._checkpointer = self._checkpointer, None
                checkpointer.wait()
                self._notes += checkpointer.told()

    def subscribe(self, listener: Listener) -> Subscription:
        """Have `listener(event)` called with a `StepEvent` after every step of this process.

        Args:
          listener: must not communicate with other processes. One that raises is told no more: a warning in the log
            "adaptive" and a note in this process's report say so, and the run goes on.

        Returns:
          What ends it: `subscription.close()`, or a `with` block.
        """
        return self._listeners.add(listener)

    @fails_together("in trace of")
    def trace(self, path: str | os.PathLike[str], *, steps: int = 20) -> None:
        """Write a timeline of the next steps, for https://ui.perfetto.dev: a track per worker, with input, each kernel
        call and its size, messages and their parts, waiting, the final segment, and hooks; and of compilers.

        Call it before the steps, on every process alike: steps that are done cannot be traced any more. The file is
        written after the last of the steps, or at the end of `run()` if that comes first, or, of one process, when the
        program is closed. A warning says so if no step was taken. While steps are traced, the program waits for each
        kernel call, so that it is known how long it took.

        Args:
          path: the file, which rank 0 writes; `.json`.
          steps: how many.

        Raises:
          OSError: rank 0 cannot write there. On rank 0; on every other process a WorkerError.
        """
        steps = count("steps", steps, least=1)
        if not self.world.rank:
            check_writable(Path(path))
        self._tracing.traced = Traced(os.fspath(path), self._step + steps, self._step)

    def step(self) -> Report:
        """Run one step.

        Returns:
          Its report. The hooks that were due have run; what they asked for holds from the next step on, or from the
          first one for which every worker has its kernels.

        Raises:
          NonFiniteError: what `all_reduce` brought is not finite, and `nonfinite` is "raise", or "skip" and too many
            steps were skipped: the state is that of the step before. Or the update of the step before made NaNs: it is
            that, with them. On every process.
          WorkerError: another process failed, in this step or elsewhere. On every other process. Or too few workers are
            left.
          DisagreementError: hooks decided differently on some workers, or some process is not in this step but in
            another collective. On every process.
          DriverError: a step of this program is under way.
          Preempted: this process was told to go, by SIGTERM or SIGUSR1, and has left the others; or all were, before
            this step.
        """
        try:
            return self._one_step()
        except AllLeave as why:
            raise self._preempted(why) from None

    def _preempted(self, cause: AllLeave, more: str = "") -> Preempted:
        """What ends all processes. What one of them has written is on the disk before any of them goes on to its end.
        Communicates.
        """
        self.world.barrier()
        acknowledge_termination()
        why = f"{cause}: {self._name} ends after step {self._step}{more}."
        if not self.world.rank:
            _log.warning("%s", why)
        return Preempted(why)

    def _one_step(self) -> Report:
        if not self._alone.acquire(blocking=False):
            raise DriverError(
                f"{self._name} is in a step already, in another thread, or because a hook has called step(). Two steps "
                "at once would take one state. A program is for one thread; hooks ask by their control."
            )
        try:
            if self._ambient.matches_here():
                return self._take_step()
            with self._ambient.settings():
                return self._take_step()
        finally:
            self._alone.release()

    @thread_status("in a step")
    def _take_step(self) -> Report:
        began = time.perf_counter()
        steady = self._steady.holds()
        if not steady:
            self._activity.begin()
            self._compile_first()
        clock = self._clock
        since, clock.began = began - clock.began, began
        try:
            if self._engine.kernels.busy:
                self._engine.kernels.check()
            self.world.build_digests = self._build_digests
            outcome = self._steady.take(began, since) if steady else None
            if outcome is None:
                steady = False
                self.world.begin_run()
                outcome = self._by_those_left(since)
            plain = steady and self._steady.is_plain(outcome)
            notes = [] if plain else self._skips.take(outcome.trouble, self._step + 1)
        except RunEnds as end:
            if isinstance(end, RunOver):
                self._adopt_progress(end.progress)
            raise
        except (NonFiniteError, WorkerError, DisagreementError) as error:  # all processes raise it
            lost = f"lost with step {self._step + 1}: start from a checkpoint"
            is_what = lost if self._engine.lost_state else f"that of step {self._step}"
            error.add_note(f"The state of {self._name} is {is_what}.")
            raise
        except Exception as error:
            error.add_note(f"in step {self._step + 1}, on {self._who()}")
            report_failure(self.world, f"in step {self._step + 1} of {self._name}", error)
            raise
        return self._steady.report(outcome) if plain else self._finish(outcome, notes)

    def _by_those_left(self, since: float) -> Outcome:
        """The step, taken again on the same examples where members are lost in the course of it.

        Args:
          since: seconds since the step before began.
        """
        while True:
            if not self._membership_changes.settled:
                self._adopt_progress(self._membership_changes.apply(self._progress))
            if self._boards.make():
                continue  # members may have been lost in the course of it
            try:
                before = self._activity.turn(INPUT)
                try:
                    share = self._stream.take(self._sizes.current)
                finally:
                    self._activity.turn(before)
                return self._run_engine(share, since)
            except MembersChanged:
                continue

    @property
    def _progress(self) -> RunProgress:
        return RunProgress(self._step, self._limit, self._decisions.stopped, self._run_id, self._tracing.traced)

    def _adopt_progress(self, progress: RunProgress) -> None:
        self._step, self._limit, self._decisions.stopped, self._run_id, self._tracing.traced = progress

    def _compile_first(self) -> None:
        if not self._compiled:
            self._compile_for(self._sizes.current)

    def _compile_for(self, batch_sizes: Sequence[int]) -> None:
        """Have what a step of these sizes needs, of all workers."""
        sizes = [batch_sizes[worker] for worker in self.world.workers]
        self._engine.expect(batch_sizes)
        with self._activity.doing(COMPILING):
            if self._compiled:
                self._engine.kernels.require(sizes)
                return
            self._engine.compile(sizes, of_all=batch_sizes)
        if not any(sizes):  # workers that may be given examples yet have the buckets of those who have them
            self._engine.kernels.extend(max(self._sizes.current))
        self._compiled = True

    def _run_engine(self, share: Share, since: float) -> Outcome:
        sizes, seconds = self._sizes.current, self._clock.compute_seconds
        total, taking_part = sum(sizes), np.asarray(sizes) > 0
        readings = [
            Reading(
                self._step,
                self._seed,
                w,
                total,
                sizes[w],
                sizes[w],
                1,
                share.offsets[i],
                seconds[i],
                since,
                taking_part,
            )
            for i, w in enumerate(self.world.workers)
        ]

        def meanwhile() -> None:
            self._stream.prefetch(sizes)
            self._update.here(self._step, in_step=True)

        return self._engine.step(share, readings, meanwhile, search=self._skips.next_raises, more=self._decisions.last)

    def _finish(self, outcome: Outcome, notes: list[str]) -> Report:
        self._activity.turn(OTHER)
        ran, limits = (self._sizes.current, self._sizes.previous), self._sizes.limits
        causes = self._sizes.causes
        sizes, members = self._sizes.current, self._sizes.members
        joined, lost, come_and_gone = self._member_tracker.drain_events()
        self._step += 1
        epochs_before = self._stream.epoch
        self._stream.advance(sizes)
        kernels, consumed = self._engine.kernels, self._stream.consumed
        lossy = [kernels.tried_at_a_loss(local) for local in range(len(self.world.workers))]
        self._clock.take(outcome.compute_seconds, beside_compiler=kernels.step_ended(), tried_at_a_loss=lossy)
        if come_and_gone or isinstance(self._data, Shards):
            notes = [*come_and_gone, *notes, *unused_shards(self._data, *ran, first=self._step == 1)]
        if self._checkpointer is not None:
            self._notes += self._checkpointer.told()
        notes, self._notes = [*self._notes, *notes], []
        self._sizes.step_done()
        epoch = self._stream.epochs
        asked, decision = Asked.so_far(self._sizes, self._membership) if self._listeners.any else None, None
        in_force = self._hyperparameters.values
        if outcome.committed:
            if self._step >= self._hooks.next_due:  # what they read is not there yet: that is no time of theirs
                with self._activity.doing(COMPUTING):
                    jax.block_until_ready(outcome.hooks)
            self._activity.turn(HOOKS)
            decision, more = self._decide(outcome, epoch, ran)
            self._activity.turn(OTHER)
            notes += more
        counters, metrics, breakdown = kernels.counters, self._metrics(outcome), self._activity.end()
        seconds = sum(breakdown)
        report = Report(
            step=self._step,
            epoch=self._stream.epoch,
            examples=consumed,
            metrics=metrics,
            batch_sizes=sizes,
            global_batch=sum(sizes),
            messages=outcome.messages,
            message_bytes=outcome.message_bytes,
            seconds=seconds,
            compute_seconds=tuple(outcome.compute_seconds),
            microbatches=tuple(outcome.microbatches),
            kernels=counters.kernels,
            compile_seconds=counters.compile_seconds,
            waited_seconds=counters.waited_seconds,
            decision=decision,
            skipped=not outcome.committed,
            notes=tuple(notes),
            members=members,
            joined=joined,
            lost=lost,
            breakdown=breakdown,
            epoch_ended=self._stream.epoch > epochs_before,
            hyperparameters=in_force,
        )
        if not self.world.rank:
            self._run_warnings.take(report, self._status.heard, self._clock.beside_compiler)
        if asked is not None:
            values = hook_values(self._hooks, outcome.hooks)
            decided, requests = self._decisions.last_asked if decision is not None else ((), ())
            told = limits, self._seed, values, asked, decided, self._status.seconds, requests, causes
            event = StepEvent(report, epoch, ran[1], *told, self._run_id, self._restored)
            failed = self._listeners.tell(event)
            report = replace(report, notes=(*report.notes, *failed)) if failed else report
        self._restored = False
        self._tracing.after(self._step)
        self._steady.look()
        return report

    @thread_status("in the hooks")
    def _decide(
        self, outcome: Outcome, epoch: float, ran: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> tuple[Decision | None, list[str]]:
        try:
            return self._decisions.after_step(self._step, epoch, outcome.hooks, ran)
        except Exception as error:
            error.add_note(f"after step {self._step}, on {self._who()}")
            report_failure(self.world, f"in the hooks after step {self._step} of {self._name}", error)
            raise

    def _metrics(self, outcome: Outcome) -> Any:
        tree = self._plan.graph.metrics_tree
        if outcome.committed:
            return tree.unflatten(outcome.metrics)
        return jax.tree.unflatten(tree, [np.full(a.aval.shape, np.nan) for a in self._plan.graph.metrics])

    def _who(self) -> str:
        workers = list(self.world.workers)
        return f"worker {workers[0]}" if len(workers) == 1 else f"workers {workers[0]}–{workers[-1]}"

    def _compare_last_decision(self) -> None:
        """It has had no message to be compared in: compare it in one that carries nothing else."""
        if self.world.processes > 1 and self._engine.has_status and self._plan.hooks:
            about = f"the end of run() after step {self._step} of {self._name}"
            self._engine.exchange_status(about, self._decisions.last)

    # --- between steps ------------------------------------------------------------------------------------------------

    @with_build_settings
    def rescale(
        self,
        *,
        global_batch: int | None = None,
        shares: Sequence[float] | None = None,
        workers: int | None = None,
    ) -> None:
        """Change the global batch, its split, or the number of workers, between two steps. Call it on every process
        alike.

        Args:
          global_batch: examples per step over all workers.
          shares: relative sizes, one per worker; whole numbers that sum to the global batch are taken exactly. A worker
            whose share is 0 takes no examples, until it is given another share; any other takes at least one. Who
            joins later begins with the mean share.
          workers: how many there are to be. The highest seats leave, back to the reserve, before the next step. Those
            who are missing get ready beside the steps, and join together; until then `global_batch` is taken as far as
            those who are there can hold it. A later number takes the place of one that is not reached yet.

        Raises:
          BatchSizeError: they cannot be, or this program's sizes stay as they are (`resizable=False`).
          WorkerCountError: there cannot be so many workers, or so few.
        """
        self._decisions.by_hand(self._step, global_batch, shares, workers)

    @with_build_settings
    def set(self, **values: Any) -> None:
        """Have hyperparameters of the driver at other values from the next step on. Call it on every process alike.

        Args:
          **values: by name: `program.set(lr=0.05)`.

        Raises:
          DriverError: the driver has no `ad.hyperparameter` of this name, or it cannot be of this value.
        """
        self._decisions.set_by_hand(self._step, values)

    @with_build_settings
    def warm_up(self) -> None:
        """Compile now, and wait for it, what would be compiled behind the first steps. For measurements."""
        self._compile_first()
        self._engine.kernels.finish()

    # --- stopping and going on ----------------------------------------------------------------------------------------

    @with_build_settings
    @fails_together("in a checkpoint of")
    def checkpoint(self) -> dict[str, Any]:
        """All that this program is, between two steps: state, slots, what hooks have learned, data cursor, sizes.

        Returns:
          A pytree of numpy arrays and numbers, to be stored by any library that stores pytrees. Replicated; where
          state is marked as local, every process has to call this.

        Raises:
          NonFiniteError: the last update made NaNs.
          CheckpointError: leaves of the state have names that could not be told apart when they are restored.
          DriverError: a policy's state is not built as it was when the policy began.
        """
        self._flush_logs()
        return with_same_members(self.world, lambda: self._snapshot(None))

    @with_build_settings
    def _snapshot(self, copy: Callable[[Any], Any] | None) -> dict[str, Any]:
        """Return a checkpoint. Take it again if members are lost meanwhile: its local leaves are of other workers then.

        Args:
          copy: copies an array from the device; by default into memory of its own.
        """
        from . import checkpoint as _checkpoint

        self._update.together(self._step, "a checkpoint")
        parts = (self._engine, self._hooks, self._sizes, self._membership, self._stream)
        like = self._form.shapes
        return _checkpoint.save(*parts, step=self._step, run_id=self._run_id, like=like, copy=copy)

    @with_build_settings
    @fails_together("in restoring")
    def restore(
        self, checkpoint: dict[str, Any] | str | os.PathLike[str] | Checkpoints, *, missing_ok: bool = False
    ) -> None:
        """Go on from a checkpoint of a program with this driver and data, of as many workers or of another number.

        Leaves are found by their names and must have the dtypes and shapes that they have here, so a library that
        gives back dicts and lists for other containers does no harm. Slots and hooks are told apart by their labels
        and by their order in the driver. Every process calls this; what they restore is compared, and where one of
        them fails all do. A program that raises here is as it was before.

        Args:
          checkpoint: what `checkpoint()` has returned; or a directory of `ad.Checkpoints`, of which rank 0 chooses the
            newest that is whole (what is passed over is noted in the next report); or one checkpoint in it.
          missing_ok: do nothing where a directory holds no checkpoint at all: for scripts that are started again.

        Raises:
          CheckpointError: it is damaged, or of another program, seed or number of examples; or it holds local state,
            or is on shards, of another number of workers; or there is none; or this process does not see the
            directory that rank 0 sees.
          WorkerError: another process could not restore its own. On every other process.
          DisagreementError: it is not the same on all processes. On every process.
        """
        from . import checkpoint as _checkpoint
        from .checkpoints import Checkpoints
        from .select_checkpoint import select_checkpoint

        found, roster = None, Roster.of(self.world)
        if isinstance(checkpoint, str | os.PathLike | Checkpoints):
            found = select_checkpoint(self.world, checkpoint, missing_ok, f"restore of {self._name}")
            if found.checkpoint is None:
                self._begin_again(found)
                return
            checkpoint = found.checkpoint
        prepared: list[tuple[_checkpoint.Parsed, dict[str, str], tuple[Any, Any]]] = []

        def prepare() -> tuple[dict[str, str], None]:
            parsed = _checkpoint.parse(
                checkpoint, self._engine, self._hooks, self._sizes, self._stream, like=self._form.shapes
            )
            digests = parsed.digests() if self.world.processes > 1 else {}
            prepared.append((parsed, digests, _checkpoint.placed(parsed, self._engine)))
            self._compile_for(parsed.batch_sizes)
            return digests, None

        together(self.world, f"restore of {self._name}", prepare, _SAME_CHECKPOINT)
        ((parsed, digests, placed),) = prepared
        self._member_tracker.restart(parsed.members)
        self._engine.workers.replace(*placed)
        self._hooks.restart([parsed.hooks[name] for name in self._hooks.names])
        self._hyperparameters.restart()
        self._sizes.restart(parsed.batch_sizes, parsed.shares, parsed.members, parsed.wanted)
        self._membership.restart(parsed.workers, roster, members=len(parsed.members))
        self._stream.go_on(parsed.cursors, parsed.place)
        self._tracing.shift(parsed.step - self._step)
        self._step, self._skips.in_a_row, self._update.told = parsed.step, 0, False
        self._steady.stop()
        self._run_id, self._restored = parsed.run_id or self._run_id, True
        self._digest.restart(parsed.step, digests)
        self._clock.restart()
        self._run_warnings.begin()
        self._boards.forget()
        if found is not None:
            self._directories.add(found.directory)
            self._notes += found.notes

    def _begin_again(self, found: SelectedCheckpoint) -> None:
        """Be the run of a directory that holds no checkpoint yet: its process was killed before the first one."""
        if not self._step and found.run_id:
            self._run_id, self._restored = found.run_id, True

    # --- beside training ----------------------------------------------------------------------------------------------

    @fails_together("in evaluate of")
    def evaluate(
        self, fn: Callable[[Any, Any], Any], data: Any, *, batch: int = 256, op: Literal["mean", "sum"] = "mean"
    ) -> Any:
        """Means of `fn` over a data set: exact, weighted by examples, no example twice, over all workers. Or sums, or
        metrics that are merged.

        Args:
          fn: `fn(state, batch) -> means`: a pytree of scalars or arrays, each a mean over the batch's examples, or a
            sum over them if `op` is "sum"; and of metrics that have a `merge(other)`, such as those of clu and
            google-metrax, which are merged by it.
          data: as for `Program`.
          batch: examples in one call.
          op: what is made of arrays: their mean, or their sum.

        Returns:
          The means or sums as a pytree of numpy arrays, and the metrics, to be computed. Replicated.

        Raises:
          NonFiniteError: the last update made NaNs.
          DriverError: what `fn` returns is no mean over examples (or no sum, if `op` is "sum"), so that it would depend
            on `batch`, or no metric that can be merged. Found by comparing a few examples with two parts of them.
          DataError: the data cannot be used.
          BatchSizeError: `batch` is not a positive whole number.
          WorkerError: another process failed in this call. On every other process.
          DisagreementError: `fn`, `data` or `batch` are not the same on all processes. On every process.
        """
        from adaptive.check.means import MeanCheck

        from .evaluate import evaluate

        self._means = self._means or MeanCheck()
        self._update.together(self._step, "evaluate")
        states = [self._as_given(leaves) for leaves in self._engine.states]
        about = f"evaluate of {self._name} after step {self._step}"
        return evaluate(
            fn,
            states,
            data,
            self.world,
            batch,
            about,
            tuple(self._member_tracker.joined_in_generation),
            op,
            self._means,
        )

    @with_build_settings
    def check(self, batch: Any = None, *, seed: int = 0, tolerance: float | None = None) -> Invariance:
        """Whether this driver's step is the same however a batch is split.

        Batch norm, summed losses and losses that couple examples are not, and training with them depends on the
        number of workers and on their speeds. Runs some steps on one batch, in equal shares and in random uneven ones
        of several calls, on this process alone, and changes nothing. The state is compared, and metrics and hook
        values, but for what looks at the split on purpose: gathered rows, the noise scale. Steps are computed in double
        precision where that can be done, and compared element by element. State that is marked as local is not
        compared. Where workers average for themselves, or with some others, or in some steps only, the verdict is "no"
        without a comparison.

        Args:
          batch: a pytree like the data; by default the next `global_batch` examples.
          seed: of the splits.
          tolerance: the largest difference, relative to what is reduced as a whole, that counts as rounding; by
            default, for each element, a hundred units in its last place, or what moving the inputs by theirs does, if
            that is more.

        Returns:
          An `Invariance`. Its `verdict` is "yes", "no", or "not known", where nothing could be compared or not all of
          it. It is true for "yes" alone. Prints as what differs, or as the reason why it is not known.
        """
        from adaptive.check.invariance import check_invariance

        if batch is None:
            batch = self._stream.peek(self._sizes.current)
        else:
            batch = taken(by_column(batch, "batch"), "batch")
        if jax.tree.structure(batch) != jax.tree.structure(self._data.example):
            raise DataError(
                f"check: batch is built as {jax.tree.structure(batch)}, "
                f"the data as {jax.tree.structure(self._data.example)}."
            )
        return check_invariance(
            self._engine,
            batch,
            seed=seed,
            tolerance=tolerance,
            step=self._step,
            program_seed=self._seed,
        )

    def close(self) -> None:
        """End the background work. Also done when the process ends."""
        self._tracing.close()
        self._engine.close()
        self._stream.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
