"""A driver program, run: the user's door to everything in this package."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from . import _agreement as agreement
from . import _checkpoint
from ._arrays import NotAnArrayError, on_host
from ._barrier import Barrier, Sizes
from ._cache import share_compilations
from ._check import Invariance, check_invariance
from ._cores import n_cores
from ._current import current_world, why_not_alone
from ._data import Stream
from ._decision import Decision, Limits
from ._engine import Engine, Outcome
from ._errors import BatchSizeError, DataError, DisagreementError, DriverError, NonFiniteError, WorkerError
from ._evaluate import evaluate
from ._explain import explain
from ._failure import heard_by_all, tell
from ._finite import Trouble, not_finite, skipped_too_often
from ._local import LocalWorld
from ._minibatches import NotEqualPartsError
from ._numbers import whole
from ._plan import Plan
from ._planner import Planner
from ._record import Recorder
from ._report import Report
from ._same_data import digests_of_data, steadiness
from ._shards import Shards, rows_of
from ._sizes import check_shares, equal, most_of_each, positive
from ._surroundings import Surroundings, as_made, unwatched
from ._together import together
from ._trace import leaf_names
from ._unlike import are_unlike, decided_by_first
from ._updates import made_nans, share_found
from ._where import at, current_line
from ._world import World
from .operators import Reading

FEW_CORES = 4  # with fewer, the thread of a compiler is felt
_SAME_CHECKPOINT = "Restore the same checkpoint on every rank; all may read one file. Nothing has been restored."

Driver = Callable[[Any, Any], tuple[Any, Any]]


class Program:
    """A driver on a data set, over the workers of a world.

    The driver is an ordinary JAX function, `driver(state, batch) -> (state, metrics)`, on a local batch. It is traced
    once per kernel size, cut at its collectives, checked (all that must be equal on all workers is), compiled, and
    run.

    Args:
      driver: the training step. `state` and `metrics` are pytrees of arrays; `batch` is a pytree like `data`, with some
        number of examples. May be wrapped in `jax.jit`.
      state: the initial state: any pytree of arrays and numbers, equal on all processes. Copied. Python numbers are
        promoted like Python numbers, as under `jax.jit`, unless a step makes arrays of them.
      data: a pytree of arrays with one leading axis; or anything with `__len__` and `__getitem__` whose items are
        pytrees, each the same whenever it is read; or a list of examples. The same whole data set on every process, and
        unchanged while the program runs. Or `Shards`: data of each worker's own.
      global_batch: examples per step, over all workers.
      world: where to run. By default the world that was entered last in this thread, or else this process as one
        worker, if there are no others.
      seed: of the order of examples and of `step_key()`.
      shares: relative sizes of the workers' first batches. Equal by default.
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
      local: picks the part of the state that may differ between workers on purpose, such as a local optimizer's:
        `lambda state: state["momentum"]`. The rest must be replicated. A driver with local state runs each local
        batch as one kernel call.
      deterministic: choose kernel calls by size alone and not by measured time, and take up new sizes at once, waiting
        for their kernels, so that two runs with the same decisions are equal to the last bit.

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

    @unwatched
    @heard_by_all("in building")
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
        local: Callable[[Any], Any] | None = None,
        deterministic: bool = False,
    ):
        self._surroundings = Surroundings()
        self.world = _world_of(world)
        self._name = _next_name(self.world, driver)
        if nonfinite not in ("raise", "skip", "allow"):
            raise DriverError(f'nonfinite must be "raise", "skip" or "allow"; got {nonfinite!r}.')
        self._nonfinite, self._seed = nonfinite, _count("seed", seed)
        self._max_skipped = _count("max_skipped", max_skipped)
        if self._max_skipped < 1:
            raise DriverError(f"max_skipped must be positive; got {max_skipped}.")
        self._data = rows_of(data, self.world.size)
        self._auto_quantum = quantum is None
        microbatch = None if microbatch is None else positive("microbatch", microbatch)
        quantum = None if quantum is None else positive("quantum", quantum)
        self._state_tree, weak = jax.tree.structure(state), jax.tree.map(_is_weak, state)
        state = jax.tree.map(_as_array, state)
        self._local_state = _picked(local, self._state_tree)
        self._state_shapes = jax.tree.map(lambda a, w: jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=w), state, weak)
        self._stream = Stream(self._data, seed=self._seed, workers=self.world.workers)
        self._planner = Planner(
            driver,
            self._state_shapes,
            self._data.shapes,
            workers=self.world.size,
            local_state=self._local_state,
            surroundings=self._surroundings,
        )
        first_sizes = partial(self._first_sizes, global_batch, shares, max_local_batch, quantum)
        self._sizes, self._plan = self._first_plan(first_sizes, microbatch)
        self._sizes.one_by_one = not self._plan.splittable
        self._check_alike(
            state,
            {
                "batch sizes": self._sizes.current,
                "max_local_batch": max_local_batch,
                "quantum": self._sizes.limits.quantum,
                "microbatch": microbatch,
                "seed": self._seed,
                "nonfinite": nonfinite,
                "max_skipped": max_skipped,
            },
        )
        _built[self.world] = _built.get(self.world, 0) + 1
        if self.world.processes > 1:
            share_compilations()
        self._engine = Engine(
            self._planner,
            self._plan,
            jax.tree.leaves(state),
            self.world,
            tail=agreement.tail_length(self.world.size),
            name=self._name,
            kernels={
                "largest_call": microbatch,
                "timed": not deterministic,
                "turn": (self.world.rank, self.world.processes),
            },
            finite=nonfinite != "allow",
        )
        self._barrier = Barrier(self._plan.hooks, self.world.size)
        self._unlike = bool(self._plan.hooks) and are_unlike(self.world, f"machines of {self._name}")
        self._ledger = agreement.Ledger()
        self._step = 0
        self._alone = threading.Lock()  # held while a step is under way
        self._skipped = 0  # steps in a row
        self._told = False  # of NaNs that the last update made
        self._started_at = float("nan")
        self._compute_seconds = [float("nan")] * len(self.world.workers)
        self._few_cores = self.world.devices[0].platform == "cpu" and n_cores() < FEW_CORES
        self._compiling = False  # in a way that slows the steps down
        self._any_size = False  # whether every worker can make every size: once true, it stays
        # Without a message nobody can tell that all are ready; and when they are depends on how fast machines are.
        self._waits = deterministic or not self._engine.layouts
        self._stopped = False
        self._compiled = False
        self._recorder: Recorder | None = None
        self._notes: list[str] = []  # of the step in progress

    # --- building -----------------------------------------------------------------------------------------------------

    def _first_plan(self, first_sizes: Callable[[int], Sizes], microbatch: int | None) -> tuple[Sizes, Plan]:
        """Sizes of the first step and a plan for the largest of them.

        What sizes have to be multiples of is told by the driver's trace, which is made for a size: if that was none,
        both are made again.
        """
        multiple = 1
        while True:
            sizes = first_sizes(multiple)
            largest = max(sizes.current)  # of all workers, so that all processes have the same plan
            try:
                plan = self._planner.begin(min(largest, microbatch or largest))
                found = plan.multiple
                _check_microbatch_can_be(plan, microbatch)
                if multiple % found == 0:
                    return sizes, plan
            except NotEqualPartsError as error:
                if microbatch is not None:
                    raise _no_microbatches(microbatch, str(error)) from None
                found = error.steps
            multiple = lcm(multiple, found)

    def _first_sizes(self, global_batch, shares, max_local_batch, quantum, multiple: int) -> Sizes:
        n, examples = self.world.size, len(self._data)
        largest = [examples] * n if max_local_batch is None else most_of_each(max_local_batch, n)
        if quantum is not None and quantum % multiple:
            raise BatchSizeError(f"quantum={quantum} is no multiple of {multiple}, the driver's minibatches.")
        lanes = np.broadcast_to([lane.length for lane in self._data.lanes], (n,))
        there = [min(most, int(length)) for most, length in zip(largest, lanes, strict=True)]
        for worker, most in enumerate(there):
            if most < multiple:
                raise BatchSizeError(
                    f"worker {worker} can take {most} examples at most, by max_local_batch or for want of data: fewer "
                    f"than the {multiple} minibatches that the driver cuts every local batch into."
                )
        upper = tuple(most // multiple * multiple for most in there)
        most = -(-examples // multiple) * multiple  # a larger quantum is as good as this
        limits = Limits((multiple,) * n, upper, min(quantum or multiple, most), multiple)
        sizes = Sizes(global_batch, [1] * n if shares is None else shares, limits, examples)
        if quantum is None:
            sizes.limits = limits._replace(quantum=auto_quantum(sum(sizes.current), n, multiple))
        if shares is None:
            sizes.current = sizes.previous = equal(sum(sizes.current), limits)
        return sizes

    def _check_alike(self, state: Any, settings: dict[str, Any]) -> None:
        if self.world.processes == 1:
            return
        built = {name: repr(value) for name, value in settings.items()}
        built.update(digests_of_data(self._data))
        leaves = zip(leaf_names(state, "state"), jax.tree.leaves(state), strict=True)
        built.update(
            (name, agreement.digest_of_tree(leaf))
            for i, (name, leaf) in enumerate(leaves)
            if i not in self._local_state
        )
        steady = partial(steadiness, self._data, self.world.rank)
        agreement.check_built_alike(self.world, built, self._plan, f"building {self._name}", steady)

    def _local(self, sizes: Sequence[int]) -> list[int]:
        return [sizes[w] for w in self.world.workers]

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The user's state, as of the last step. A copy: it stays valid when the program goes on.

        Replicated, but for what is marked as local: of that, the first worker of this process's.

        Raises:
          NonFiniteError: the last update made NaNs. Once: then it can be looked at.
        """
        if not self._told:
            self._check_update()
        return self._as_given([jnp.copy(leaf) for leaf in self._engine.states[0]])

    def _as_given(self, leaves: Sequence[jax.Array]) -> Any:
        """The state as the user knows it: what is a Python number in the driver is promoted like one here too."""
        weak = [var.aval.weak_type for var in self._plan.graph.state_vars]
        pairs = zip(leaves, weak, strict=True)
        return jax.tree.unflatten(
            self._state_tree, [jnp.asarray(leaf.item()) if is_weak else leaf for leaf, is_weak in pairs]
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples per worker in the next step. Replicated."""
        return self._sizes.current

    @property
    def global_batch(self) -> int:
        """Examples in the next step. Replicated."""
        return sum(self._sizes.current)

    @property
    def steps(self) -> int:
        """Steps done. Replicated."""
        return self._step

    @property
    def epoch(self) -> int:
        """Whole epochs of data consumed. Replicated."""
        return self._stream.consumed // len(self._data)

    @property
    def warm(self) -> bool:
        """Whether nothing is being compiled behind the steps. Local."""
        return self._compiled and self._engine.kernels.warm

    @property
    def plan(self) -> Plan:
        """What a step does, as data."""
        return self._plan

    def explain(self) -> str:
        """The plan in words: segments, messages with their bytes, hooks, slots; with the driver's lines."""
        shards = [lane.length for lane in self._data.lanes] if isinstance(self._data, Shards) else []
        return explain(self._plan, self._engine.layouts, self._sizes.current, shards)

    # --- running ------------------------------------------------------------------------------------------------------

    def run(
        self, *, epochs: int | None = None, steps: int | None = None, record: str | Path | None = None
    ) -> Iterator[Report]:
        """Run steps, and report each.

        Args:
          epochs: until so many more epoch ends have been passed. A batch may span an epoch's end, so the last step may
            reach into the epoch behind.
          steps: at most so many more steps.
          record: a file to which rank 0 adds a line of JSON per step: what hooks were shown and what they decided,
            to be replayed by `python -m controllers.simulate`. If it cannot be written, the run goes on without it; a
            warning in the log "adaptive" and a note in rank 0's report say so.

        Yields:
          A `Report` per step; ends early when a hook calls `control.stop()`. With neither argument, only then.
        """
        last_epoch = None if epochs is None else self.epoch + _count("epochs", epochs)
        last_step = None if steps is None else self._step + _count("steps", steps)
        self._stopped = False
        if record is not None:
            self._recorder = Recorder(record, writes=self.world.rank == 0)
            self._recorder.header(self._barrier, self._sizes, seed=self._seed)
        try:
            while not self._stopped:
                if last_epoch is not None and self.epoch >= last_epoch:
                    break
                if last_step is not None and self._step >= last_step:
                    break
                yield self.step()
        finally:
            if self._recorder is not None:
                self._recorder.close()
                self._recorder = None
        self._check_update(together="the end of run()")
        self._close_step()

    def step(self) -> Report:
        """Run one step.

        Returns:
          Its report. The hooks that were due have run; what they asked for holds from the next step on, or from the
          first one for which every worker has its kernels.

        Raises:
          NonFiniteError: what `all_reduce` brought is not finite, and `nonfinite` is "raise", or "skip" and too many
            steps were skipped: the state is that of the step before. Or the update of the step before made NaNs: it is
            that, with them. On every process.
          WorkerError: another process failed, in this step or elsewhere. On every other process.
          DisagreementError: hooks decided differently on some workers, or some process is not in this step but in
            another collective. On every process.
          DriverError: a step of this program is under way.
        """
        if not self._alone.acquire(blocking=False):
            raise DriverError(
                f"{self._name} is in a step already, in another thread, or because a hook has called step(). Two steps "
                "at once would take one state. A program is for one thread; hooks ask by their control."
            )
        try:
            return self._take_step()
        finally:
            self._alone.release()

    @as_made
    def _take_step(self) -> Report:
        began = time.perf_counter()
        self._compile_first()
        try:
            self._engine.kernels.check()
            share = self._stream.take(self._sizes.current)
            outcome = self._run_engine(share, began)
            if outcome.trouble is not None:
                self._skip(outcome.trouble)
        except (NonFiniteError, WorkerError, DisagreementError) as error:  # all processes raise it
            error.add_note(f"The state of {self._name} is that of step {self._step}.")
            raise
        except Exception as error:
            error.add_note(f"in step {self._step + 1}, on {self._who()}")
            tell(self.world, f"in step {self._step + 1} of {self._name}", error)
            raise
        return self._finish(outcome, began)

    def _compile_first(self) -> None:
        if not self._compiled:
            self._compile_for(self._local(self._sizes.current))

    def _compile_for(self, sizes: Sequence[int]) -> None:
        """Have what a step of these sizes, of this process's workers, needs."""
        if self._compiled:
            self._engine.kernels.require(sizes)
        else:
            self._engine.compile(sizes)
            self._compiled = True

    def _run_engine(self, share, began: float) -> Outcome:
        since = began - self._started_at
        self._notes = []
        self._started_at, sizes = began, self._sizes.current
        readings = [
            Reading(
                step=self._step,
                seed=self._seed,
                worker=w,
                global_batch=sum(sizes),
                batch_size=sizes[w],
                examples=sizes[w],
                calls=1,
                offset=share.offsets[local],
                compute_seconds=self._compute_seconds[local],
                iteration_seconds=since,
            )
            for local, w in enumerate(self.world.workers)
        ]

        def meanwhile() -> None:
            self._stream.prefetch(sizes)
            self._check_update(in_step=True)

        search = self._skipped == self._max_skipped or self._nonfinite == "raise"
        more = self._last_decision()
        return self._engine.step(share, readings, self._speak, self._listen, meanwhile, search=search, more=more)

    def _skip(self, trouble: Trouble) -> None:
        """Leave a step out, or raise."""
        if self._nonfinite == "raise":
            raise not_finite(trouble, self._step + 1)
        if self._skipped == self._max_skipped:
            raise skipped_too_often(trouble, self._step + 1, self._max_skipped)
        self._notes += [f"skipped: {cause}" for cause in trouble.causes]

    def _check_update(self, *, in_step: bool = False, together: str = "") -> None:
        """Raise if the last update made NaNs.

        Of replicated state every process finds that by itself; of local state, the others have to be told.

        Args:
          together: where all processes come here: what for.
        """
        found, new_nans = self._engine.made_nans(), self._engine.new_nans
        if together and new_nans is not None and new_nans.may_differ:
            found = share_found(self.world, found, f"{together} of {self._name} behind step {self._step}")
        if found:
            self._told = True
            error = made_nans(self._plan, found, self._step)
            if in_step and not found.replicated:
                tell(self.world, f"in step {self._step + 1} of {self._name}", error, known=False)
            raise error

    def _finish(self, outcome: Outcome, began: float) -> Report:
        sizes = self._sizes.current
        self._step += 1
        self._skipped = 0 if outcome.committed else self._skipped + 1
        self._stream.advance(sizes)
        self._compute_seconds = self._undisturbed(outcome.compute_seconds)
        notes = list(self._notes)
        previous = self._sizes.previous
        self._sizes.step_done(apply=self._agreed_to_apply())
        if self._sizes.pending is not None and self._sizes.current != sizes:  # one waited behind the one taken up
            self._prepare()
        epoch = self._stream.consumed / len(self._data)
        decision = self._run_hooks(outcome, epoch, (sizes, previous), notes) if outcome.committed else None
        counters = self._engine.kernels.counters
        report = Report(
            step=self._step,
            epoch=self.epoch,
            examples=self._stream.consumed,
            metrics=self._metrics(outcome),
            batch_sizes=sizes,
            global_batch=sum(sizes),
            messages=outcome.messages,
            message_bytes=outcome.message_bytes,
            seconds=time.perf_counter() - began,
            compute_seconds=tuple(outcome.compute_seconds),
            pieces=tuple(outcome.pieces),
            kernels=counters.kernels,
            compile_seconds=counters.compile_seconds,
            waited_seconds=counters.waited_seconds,
            decision=decision,
            skipped=not outcome.committed,
            notes=tuple(notes),
        )
        if self._recorder is not None:
            lost = self._recorder.step(report, previous, epoch, self._barrier, outcome.hooks, self._sizes.limits.call)
            report = replace(report, notes=(*report.notes, lost)) if lost else report
        return report

    def _undisturbed(self, seconds: list[float]) -> list[float]:
        """NaN for a step beside which this process's own compiler took much of its cores, or that tried a kernel where
        others would have been faster: such seconds are not the machine's, and whoever balanced by them would have to
        take it back."""
        before, self._compiling = self._compiling, self._few_cores and not self._engine.kernels.warm
        kernels = self._engine.kernels
        return [
            float("nan") if before or self._compiling or kernels.tried_at_a_loss(local) else s
            for local, s in enumerate(seconds)
        ]

    def _metrics(self, outcome: Outcome) -> Any:
        tree = self._plan.graph.metrics_tree
        if outcome.committed:
            return jax.tree.unflatten(tree, outcome.metrics)
        return jax.tree.unflatten(tree, [np.full(a.aval.shape, np.nan) for a in self._plan.graph.metrics])

    def _who(self) -> str:
        workers = list(self.world.workers)
        return f"worker {workers[0]}" if len(workers) == 1 else f"workers {workers[0]}–{workers[-1]}"

    # --- what rides on every message ----------------------------------------------------------------------------------

    def _speak(self) -> np.ndarray:
        tail = np.zeros(agreement.tail_length(self.world.size))
        tail[self.world.workers.start : self.world.workers.stop] = self._ledger.status
        kernels = self._engine.kernels
        pending = self._sizes.pending
        tail[-3] = kernels.examples_of_a_call() / self.world.processes
        tail[-2] = pending is not None and all(kernels.can_make(i, s) for i, s in enumerate(self._local(pending)))
        tail[-1] = kernels.can_make_all()
        return tail

    def _listen(self, tail: np.ndarray) -> None:
        agreement.judge(tail[:-3], self._ledger, own=self.world.workers)
        self._sizes.limits = self._sizes.limits._replace(call=float(tail[-3]))
        self._ready = tail[-2] == self.world.processes
        self._any_size = self._any_size or tail[-1] == self.world.processes

    _ready = False

    def _agreed_to_apply(self) -> bool:
        return self._sizes.pending is not None and (self._ready or self._any_size)

    def _last_decision(self) -> str:
        return self._ledger.last if self._ledger.step else ""

    def _close_step(self) -> None:
        """The last decision has had no message to be compared in: compare it in one that carries nothing else."""
        if self.world.processes > 1 and self._engine.layouts and self._plan.hooks:
            about = f"the end of run() behind step {self._step} of {self._name}"
            tail = self._engine.signal(self._speak(), about, self._last_decision())
            agreement.judge(tail[:-3], self._ledger, own=self.world.workers)

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _run_hooks(
        self, outcome: Outcome, epoch: float, ran: tuple[tuple[int, ...], tuple[int, ...]], notes: list[str]
    ) -> Decision | None:
        """`ran` are the sizes of this step and of the one before."""
        try:
            decision, names = self._barrier.run(self._step, epoch, outcome.hooks, ran, self._sizes)
            if names and self._unlike:
                decision = decided_by_first(self.world, decision, f"decision {self._step} of {self._name}")
            if names:
                self._ledger.enter(self._step, names, decision)
            if decision is not None:
                self._stopped = decision.stop
                notes += [*decision.notes, *self._ask(decision)]
        except Exception as error:
            error.add_note(f"behind step {self._step}, on {self._who()}")
            tell(self.world, f"at the barrier behind step {self._step} of {self._name}", error)
            raise
        return decision

    def _ask(self, decision: Decision) -> list[str]:
        notes = self._sizes.ask(decision)
        self._update_quantum()
        if self._waits and self._sizes.pending is not None:
            self._sizes.apply()
            self._engine.kernels.require(self._local(self._sizes.current))
        self._prepare()
        if self._any_size:
            self._sizes.apply()
        return notes

    def _prepare(self) -> None:
        """Have kernels compiled for the sizes to come, and for no others."""
        current = self._local(self._sizes.current)
        wanted = current if self._sizes.pending is None else self._local(self._sizes.pending)
        self._engine.kernels.extend(max(wanted))
        self._engine.kernels.ask(wanted, current)

    def _update_quantum(self) -> None:
        if self._auto_quantum:
            quantum = auto_quantum(sum(self._sizes.target), self.world.size, self._sizes.limits.multiple)
            self._sizes.limits = self._sizes.limits._replace(quantum=quantum)

    @as_made
    def rescale(self, *, global_batch: int | None = None, shares: Sequence[float] | None = None) -> None:
        """Change the global batch, its split, or both, between two steps. Call it on every process alike.

        Args:
          global_batch: examples per step over all workers.
          shares: relative sizes, one per worker; whole numbers that sum to the global batch are taken exactly.

        Raises:
          BatchSizeError: they cannot be.
        """
        if global_batch is not None:
            global_batch = self._sizes.check_global(global_batch)
        if shares is not None:
            shares = tuple(check_shares(shares, self.world.size).tolist())
        decision = Decision(global_batch, shares)
        self._ask(decision)
        self._ledger.enter(self._step, (), decision)

    @as_made
    def warm_up(self) -> None:
        """Compile now, and wait for it, what would be compiled behind the first steps. For measurements."""
        self._compile_first()
        self._engine.kernels.finish()

    # --- stopping and going on ----------------------------------------------------------------------------------------

    @as_made
    @heard_by_all("in a checkpoint of")
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
        self._check_update(together="a checkpoint")
        return _checkpoint.save(
            self._engine, self._barrier, self._sizes, self._stream, step=self._step, like=self._state_shapes
        )

    @as_made
    @heard_by_all("in restoring")
    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint of a program with this driver and data, of as many workers or of another number.

        Leaves are found by their names and must have the dtypes and shapes that they have here, so a library that
        gives back dicts and lists for other containers does no harm. Slots and hooks are told apart by their labels
        and by their order in the driver. Every process calls this; what they restore is compared, and where one of
        them fails all do. A program that raises here is as it was before.

        Raises:
          CheckpointError: it is damaged, or of another program, seed or number of examples; or it holds local state,
            or is on shards, of another number of workers.
          WorkerError: another process could not restore its own. On every other process.
          DisagreementError: it is not the same on all processes. On every process.
        """
        prepared: list[tuple[_checkpoint.Parsed, dict[str, str], tuple[Any, Any]]] = []

        def prepare() -> tuple[dict[str, str], None]:
            parsed = _checkpoint.parse(
                checkpoint, self._engine, self._barrier, self._sizes, self._stream, like=self._state_shapes
            )
            digests = parsed.digests() if self.world.processes > 1 else {}
            prepared.append((parsed, digests, _checkpoint.placed(parsed, self._engine)))
            self._compile_for(self._local(parsed.batch_sizes))
            return digests, None

        together(self.world, f"restore of {self._name}", prepare, _SAME_CHECKPOINT)
        ((parsed, digests, (self._engine.states, self._engine.slots)),) = prepared
        self._barrier.restart([parsed.hooks[name] for name in self._barrier.names])
        self._sizes.restart(parsed.batch_sizes, parsed.shares)
        self._update_quantum()
        self._stream.cursors = parsed.cursors
        self._step, self._skipped, self._told, self._ready = parsed.step, 0, False, False
        if self._engine.new_nans is not None:
            self._engine.new_nans.begin(self._engine.states)
        self._ledger.restart(parsed.step, digests)
        self._started_at = float("nan")
        self._compute_seconds = [float("nan")] * len(self._compute_seconds)

    # --- beside training ----------------------------------------------------------------------------------------------

    @heard_by_all("in evaluate of")
    def evaluate(self, fn: Callable[[Any, Any], Any], data: Any, *, batch: int = 256) -> Any:
        """Means of `fn` over a data set: exact, weighted by examples, no example twice, over all workers.

        Args:
          fn: `fn(state, batch) -> means`: a pytree of scalars or arrays, each a mean over the batch's examples.
          data: as for `Program`.
          batch: examples in one call.

        Returns:
          The means as a pytree of numpy arrays. Replicated.

        Raises:
          NonFiniteError: the last update made NaNs.
          DriverError: what `fn` returns is no mean.
          DataError: the data cannot be used.
          BatchSizeError: `batch` is not a positive whole number.
          WorkerError: another process failed in this call. On every other process.
          DisagreementError: `fn`, `data` or `batch` are not the same on all processes. On every process.
        """
        self._check_update(together="evaluate")
        states = [self._as_given(leaves) for leaves in self._engine.states]
        about = f"evaluate of {self._name} behind step {self._step}"
        return evaluate(fn, states, data, self.world, batch, about)

    @as_made
    def check(self, batch: Any = None, *, seed: int = 0, tolerance: float | None = None) -> Invariance:
        """Whether this driver's step is the same however a batch is split.

        Batch norm, summed losses and losses that couple examples are not, and training with them depends on the
        number of workers and on their speeds. Runs some steps on one batch, in equal shares and in random uneven ones
        of several calls, on this process alone, and changes nothing. The state is compared, and metrics and hook
        values, but for what looks at the split on purpose: gathered rows, the noise scale. Half precisions are computed
        in single. State that is marked as local is not compared.

        Args:
          batch: a pytree like the data; by default the next `global_batch` examples.
          seed: of the splits.
          tolerance: the largest difference, relative to what is reduced, that counts as rounding; by default a hundred
            units in its last place, or what moving the inputs by theirs does, if that is more.

        Returns:
          An `Invariance`: true if the step is. Its `verdict` is "yes", "no", or "not known" where it could not be
          compared, which is not true either. Prints as what differs, or why it is not known.
        """
        if batch is None:
            batch = self._stream.peek(self._sizes.current)
        elif jax.tree.structure(batch) != jax.tree.structure(self._data.example):
            raise DataError(
                f"check: batch is built as {jax.tree.structure(batch)}, "
                f"the data as {jax.tree.structure(self._data.example)}."
            )
        return check_invariance(
            self._planner,
            self._engine,
            batch,
            seed=seed,
            tolerance=tolerance,
            step=self._step,
            program_seed=self._seed,
        )

    def close(self) -> None:
        """End the background work. Also done when the process ends."""
        self._engine.close()
        self._stream.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _world_of(world: World | None) -> World:
    """The world that was given, or else the current one, or else this process alone, if it is."""
    alone = None if world is not None else why_not_alone()
    if alone:
        raise DriverError(
            f"ad.Program{at(current_line())} was given no world: {alone}. It would train a model of this process's "
            "own. Write\n"
            "    with comm.world() as world:\n"
            "        program = ad.Program(..., world=world)\n"
            "or, if a model of each process's own is what you want,  world=comm.SoloWorld()"
        )
    return world or current_world.get() or LocalWorld()


_built: WeakKeyDictionary[World, int] = WeakKeyDictionary()  # how many programs all processes have built, by world


def _next_name(world: World, driver: Driver) -> str:
    """What a program is called in errors, and told from others by: equal on all processes, which build alike."""
    return f"program {_built.get(world, 0) + 1} ({getattr(driver, '__name__', type(driver).__name__)!r})"


def auto_quantum(global_batch: int, n_workers: int, multiple: int = 1) -> int:
    """A power of two of about a sixteenth of a worker's batch: rounding costs 3 % at most, and a size is a few pieces.
    Times `multiple`, of which batches are made.
    """
    return multiple << max(0, (global_batch // multiple // n_workers // 16).bit_length() - 1)


def _is_weak(leaf: Any) -> bool:
    """Whether JAX lets arrays decide what is computed with a number, as it does with those of Python."""
    if isinstance(leaf, jax.Array):
        return leaf.ndim == 0 and bool(getattr(leaf, "weak_type", False))
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return on_host(leaf)
    except NotAnArrayError as error:
        raise DriverError(
            f"the state holds {leaf!r}, which is no array of numbers: it {error} Keep only arrays and numbers in the "
            "state."
        ) from error


def _picked(pick: Callable[[Any], Any] | None, tree: jax.tree_util.PyTreeDef) -> frozenset[int]:
    """The numbers of the leaves that `local=` picks."""
    if pick is None:
        return frozenset()
    numbers = jax.tree.leaves(pick(jax.tree.unflatten(tree, range(tree.num_leaves))))
    if not all(isinstance(n, int) for n in numbers):
        raise DriverError("local= must pick parts of the state as they are:  local=lambda state: state['momentum']")
    return frozenset(numbers)


def _count(name: str, value: Any) -> int:
    number = whole(value)
    if number is None:
        raise DriverError(f"{name} must be a whole number; got {value!r}.")
    return number


def _check_microbatch_can_be(plan: Plan, microbatch: int | None) -> None:
    if microbatch is not None and not plan.splittable:
        raise _no_microbatches(microbatch, f"{plan.unsplittable[0]}.")


def _no_microbatches(microbatch: int, why: str) -> DriverError:
    return DriverError(f"microbatch={microbatch}: this driver's batches cannot be split into calls: {why}")
