"""`Program`: a driver and its data, trained step by step. The public class of this package.

The file is long because of the methods' documentation, which the API pages are built from; the work is done elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.activity import EVALUATING, RESTORING, SAVING
from adaptive.base.errors import CheckpointError, DataError, DriverError
from adaptive.base.process.failure import fails_together
from adaptive.base.roster import with_same_members
from adaptive.base.values.ambient import AmbientContext, with_build_settings, without_debug_checks
from adaptive.base.world import World
from adaptive.data.example import taken
from adaptive.observe.events import Listener, Subscription, numbers_by_name
from adaptive.observe.report import Metrics, Report
from adaptive.observe.sinks import Sink
from adaptive.operators.sources import GLOBAL_BATCH

from .arguments import Options, next_name, world_of
from .members import AllLeave
from .parts import ProgramParts
from .run_loop import RunLoop
from .runs import preempted, steps_of_run

# Modules that most runs do not need, or not before the first step, are imported on use.
if TYPE_CHECKING:
    from adaptive.check.means import MeanCheck
    from adaptive.check.verdict import Invariance

    from .checkpoints import Checkpoints

State = TypeVar("State")


class Program(Generic[State, Metrics]):
    """A training program: a driver, its state and its data, on the workers of a world.

    The driver is an ordinary JAX function of a local batch, `driver(state, batch) -> (state, metrics)`. It is traced
    once per kernel size, partitioned at its collectives, checked for replication, and compiled.

    Args:
      driver: the training step. `state` and `metrics` are pytrees of arrays; `batch` is a pytree like `data`, with any
        number of examples.
      state: the initial state: a pytree of arrays and numbers, equal on all processes; copied to each worker's device.
        Where a worker is a mesh, arrays may be sharded over it. Or a function of no arguments that returns the state:
        each array is then freed as soon as it is copied, so that a large state is never held twice.
      data: the data set: equal on all processes, and unchanged while the program runs. One of

        * a pytree of arrays with one leading axis;
        * an object with `__len__` and `__getitem__` whose items are pytrees, equal whenever they are read;
        * the result of a function of `ad.data`, to transform examples, or to read them in other processes or from an
          iterator;
        * `Shards`: separate data for each worker.
      global_batch: examples per step, over all workers.
      world: where to run. Default: the world that this thread has entered last, or one worker on the first device.
      seed: seed of the order of examples, and of `step_key()`.
      shares: relative sizes of the workers' first batches; shape=(capacity,). A worker with share 0 takes no examples.
        Default: equal.
      microbatch: the most examples in one microbatch, to limit memory. A larger local batch runs as several.
      max_local_batch: the most examples that a worker may take: one number for all, or one per worker. Or "auto":
        larger batches run as microbatches whose kernels fit into memory, as XLA reports it.
      nonfinite: what happens when a reduced value is not finite: because a worker's contribution is not, because the
        sum overflows its type, or because all weights of a mean are zero.

        * "raise": raise a NonFiniteError;
        * "skip": skip the step. Its examples are consumed, and the state is unchanged. After 25 such steps in a row
          one more raises;
        * "allow": check nothing, for drivers that test the reduced values themselves, such as for loss scaling.

        An update that computes NaNs from finite values (an optimizer's 0 / 0) has overwritten the state: the next
        step's error says so. Unless "allow", a state with NaNs does not become a checkpoint.
      per_worker_state: selects the part of the state that may differ between workers, such as a local optimizer's:
        `lambda state: state["momentum"]`. The rest must be replicated.
      deterministic: whether two runs with the same decisions are bitwise equal: new sizes take effect at once, after
        waiting for their kernels.
      resizable: whether batch sizes may change during the run. If not, no kernels are compiled in the background, and a
        request for other sizes is an error; `restore` may still bring some.

    Attributes:
      world: where the program runs.

    Raises:
      DriverError: the driver or an argument is invalid; or there is no world, and there are several processes.
      DataError: the data cannot be used.
      BatchSizeError: `global_batch` or `shares` is impossible.
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
        driver: Callable[[State, Any], tuple[State, Metrics]],
        state: Any,  # not `State`: numbers and numpy arrays become JAX arrays
        data: Any,
        *,
        global_batch: int,
        world: World | None = None,
        seed: int = 0,
        shares: Sequence[float] | None = None,
        microbatch: int | None = None,
        max_local_batch: int | Sequence[int] | Literal["auto"] | None = None,
        nonfinite: Literal["raise", "skip", "allow"] = "raise",
        per_worker_state: Callable[[Any], Any] | None = None,
        deterministic: bool = False,
        resizable: bool = True,
    ):
        self._ambient = AmbientContext()
        self._means: MeanCheck | None = None
        self.world = world_of(world)
        self._name = next_name(self.world, driver)
        options = Options(
            *(global_batch, seed, shares, microbatch, max_local_batch),
            *(nonfinite, per_worker_state, deterministic, resizable),
        )
        self._parts = ProgramParts(driver, state, data, options, self.world, self._name, self._ambient)
        self._loop = RunLoop(self._parts)

    def _settled(self) -> ProgramParts:
        """Return the parts, when it is known that all steps so far were finite."""
        self._loop.settle()
        return self._parts

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """A copy of the state after the last step; a pytree as given. Replicated, except the per-worker part, which is
        that of this process's first worker. To change it, `restore` a changed `checkpoint()`.
        """
        parts, workers = self._settled(), self._parts.engine.workers
        return parts.state_as_given([jnp.copy(leaf) for leaf in workers.states[workers.some_present]])

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples per worker in the next step; length capacity. Replicated."""
        return self._parts.sizes.current

    @property
    def global_batch(self) -> int:
        """Examples in the next step, over all workers. Replicated."""
        return sum(self._parts.sizes.current)

    @property
    def members(self) -> tuple[int, ...]:
        """The worker slots that were occupied in the last step. Replicated."""
        return self._parts.sizes.members

    @property
    def target_workers(self) -> int:
        """The number of workers that was requested last. Replicated."""
        return self._parts.membership.target

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The driver's `ad.hyperparameter`s in the next step, by name: numbers, or nested lists. Replicated."""
        return self._parts.hyperparameters.values

    @property
    def steps(self) -> int:
        """The number of steps done. Replicated."""
        return self._settled().run.step

    @property
    def run_id(self) -> str:
        """The id of the run in logs and checkpoints; `restore` continues with the checkpoint's. Replicated."""
        return self._parts.run.run_id

    @property
    def epoch(self) -> int:
        """The number of whole epochs of data consumed. Replicated."""
        return self._settled().stream.epoch

    @property
    def reads_global_batch(self) -> bool:
        """Whether the driver reads `ad.global_batch()`, as learning-rate rules that follow the batch do. Replicated."""
        return any(source.name == GLOBAL_BATCH.name for source in self._parts.plan.sources)

    def explain(self) -> str:
        """Return a description of the plan, with the driver's lines: segments, messages, hooks and operator states; and
        of the memory that a worker needs in a step.
        """
        from .explain import explain

        p = self._parts
        return explain(p.engine, p.sizes, p.data, p.world)

    # --- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        until_epoch: int | None = None,
        until_step: int | None = None,
        progress: bool = False,
        log: Sequence[Sink] = (),
        record: str | Path | None = None,
        checkpoint: Checkpoints | None = None,
    ) -> Iterator[Report[Metrics]]:
        """Run steps, and yield a report of each. Call it on every process.

        Args:
          epochs, steps: stop after this number of further epochs or steps. A batch that spans the end of an epoch may
            hold one example twice.
          until_epoch, until_step: stop when this number is done since the beginning of the training, those before a
            `restore` included: for scripts that are started again.
          progress: show the run's progress on rank 0, on stderr, and the reason when a step takes long.
          log: sinks to which rank 0 writes each step, in a background thread:
            `[ad.log.TensorBoard("runs/a"), ad.log.CSV("run.csv")]`, or your own (see `ad.log.Sink`). A sink that raises
            is disabled, with a warning in the log "adaptive".
          record: a file for `ad.log.JSONL`, a further sink: what hooks received and decided, for `ad.log.read`,
            `adaptive report` and `adaptive replay`.
          checkpoint: where and how often to save checkpoints: `ad.Checkpoints("run/", every="1 epoch")`. The last state
            is saved when the run ends, also when all processes are terminated; not after `break` or an error: call
            `stop()` instead of `break`, or `save()` before it.

        Yields:
          A `Report` per step. Ends early after `stop()`, or a hook's `control.stop()`; without a limit, only then.
          Where the host does not wait for steps (docs/design_runtime.md), a step that is not finite is found up to two
          steps late, and reported again, as are those after it.

        Raises:
          Preempted: this process received SIGTERM or SIGUSR1 and has left; or all processes have received one, and the
            last state is on disk. See docs/elastic.md.
          CheckpointError: no checkpoint can be written as `checkpoint` says. On rank 0, before the first step.
          DriverError: an argument is invalid, such as a limit that is given in both ways.
          DataError: epochs are given, and these data have none.
        """
        limits = {"epochs": epochs, "steps": steps, "until_epoch": until_epoch, "until_step": until_step}
        return steps_of_run(self._parts, self._loop, limits, progress, log, record, checkpoint)

    def subscribe(self, listener: Listener) -> Subscription:
        """Call `listener(event)` with a `StepEvent` after every step of this process.

        Args:
          listener: must not communicate with other processes. One that raises is disabled, with a warning in the log
            "adaptive" and a note in this process's report.

        Returns:
          A subscription, to be ended by its `close()` or used as a context manager.
        """
        return self._parts.listeners.add(listener)

    def step(self) -> Report[Metrics]:
        """Run one step. Call it on every process.

        Returns:
          The report. Hooks that were due have run; their requests take effect in the next step, or in the first one for
          which every worker has its kernels.

        Raises:
          NonFiniteError: a reduced value is not finite, and `nonfinite` is "raise", or too many steps were skipped: the
            state is that of the step before. On every process.
          WorkerError: another process failed; on every other process. Or too few workers are left.
          DisagreementError: hooks decided differently on some workers, or a process is in another collective. On every
            process.
          DriverError: a step of this program is already running; or this process is a forked child of the program's.
          Preempted: this process received SIGTERM or SIGUSR1 and has left; or all have received one, before this step.
          KeyboardInterrupt: Ctrl-C in the step, which is done as a whole or not at all: further steps continue.
        """
        try:
            return self._loop.step()
        except AllLeave as why:
            raise preempted(self._parts, why) from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # without the frames of a step

    # --- between steps ------------------------------------------------------------------------------------------------

    @with_build_settings
    def rescale(
        self,
        *,
        global_batch: int | None = None,
        shares: Sequence[float] | None = None,
        workers: int | None = None,
    ) -> None:
        """Change the global batch, its split, or the number of workers, between two steps. Call it on every process,
        with the same values.

        Args:
          global_batch: examples per step, over all workers.
          shares: relative sizes; shape=(capacity,). Whole numbers that sum to the global batch are taken exactly. A
            worker with share 0 takes no examples; one that joins later begins with the mean share.
          workers: the number of workers. Surplus workers, on the highest slots, return to the reserve before the next
            step. Missing workers prepare in the background and join together; until then the global batch is limited to
            what the present workers can hold.

        Raises:
          BatchSizeError: the sizes are impossible, or fixed (`resizable=False`).
          WorkerCountError: this number of workers is impossible.
        """
        self._parts.decisions.by_hand(self._settled().run.step, global_batch, shares, workers)

    @with_build_settings
    def set_hyperparameters(self, **values: Any) -> None:
        """Set hyperparameters of the driver, from the next step on. Call it on every process, with the same values.

        Args:
          **values: by name: `program.set_hyperparameters(lr=0.05)`.

        Raises:
          DriverError: the driver has no `ad.hyperparameter` of this name, or the value does not fit it.
        """
        self._parts.decisions.set_by_hand(self._settled().run.step, values)

    def stop(self) -> None:
        """End `run` after the step that it has yielded last, as at its limit. Call it in the body of the loop, on every
        process: decide by replicated values, such as the report's metrics, or all raise a DisagreementError.

        Raises:
          DriverError: no `run` is under way.
        """
        self._loop.check_process()
        run = self._parts.run
        if not run.under_way:
            raise DriverError(
                "stop() ends  for report in program.run(…)  and is called in its body; no run is under way. A hook "
                "calls control.stop()."
            )
        self._parts.decisions.stop_by_hand(run.step)

    @with_build_settings
    def warm_up(self) -> None:
        """Compile all kernels that would be compiled in the background, and wait for them. For benchmarks."""
        self._loop.compile_first()
        self._parts.engine.kernels.finish()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @with_build_settings
    @fails_together("in a checkpoint of")
    def checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint of the program between two steps: state, operator states, states of hooks, position in
        the data, batch sizes. If the program has per-worker state, every process must call it.

        Returns:
          A pytree of numpy arrays and numbers, for any library that stores pytrees. Replicated.

        Raises:
          NonFiniteError: the state holds NaNs, and `nonfinite` is not "allow". On every process.
          CheckpointError: two leaves of the state have the same name.
          DriverError: the structure of a policy's state has changed.
        """
        from .checkpoint import refuse_nans, snapshot

        self._loop.check_process()
        parts = self._settled()
        parts.run.flush_logs()
        with parts.activity.doing(SAVING):
            saved = with_same_members(self.world, lambda: snapshot(parts))
            if parts.skipped.checks:
                refuse_nans(saved)
        return saved

    def save(self) -> None:
        """Save a checkpoint of the run now, besides those that are due, and wait until it is on the disk. Call it in
        the body of the loop over `run`, on every process. If it cannot be written, the next report has a note.

        Raises:
          CheckpointError: no `run` with `checkpoint=` is under way. For a checkpoint in memory: `checkpoint()`.
          WorkerError: another process failed in this call. On every other process.
          DisagreementError: another process is in another collective, such as its next step. On every process.
        """
        self._loop.check_process()
        checkpointer = self._settled().run.checkpointer
        if checkpointer is None:
            raise CheckpointError(
                "save() needs a run with checkpoints, and is called in its loop:  for report in program.run(…, "
                'checkpoint=ad.Checkpoints("run/")). For a checkpoint in memory:  program.checkpoint()'
            )
        with self._parts.activity.doing(SAVING):
            checkpointer.save_and_wait(again=True)

    @with_build_settings
    @fails_together("in restoring")
    def restore(
        self,
        checkpoint: dict[str, Any] | str | os.PathLike[str] | Checkpoints,
        *,
        missing_ok: bool = False,
        other_workers_ok: bool = False,
    ) -> None:
        """Restore a checkpoint of a program with the same driver and data, and any number of workers. Call it on every
        process. If it raises, the program is unchanged.

        Leaves are matched by name, whatever their containers; operator states and hooks by label and order.

        Args:
          checkpoint: a result of `checkpoint()`; or a directory of `ad.Checkpoints`, of which rank 0 selects the newest
            complete checkpoint (the next report notes those that are skipped); or one checkpoint in such a directory.
          missing_ok: whether to do nothing if the directory holds no checkpoint: for scripts that are started again.
          other_workers_ok: whether per-worker state may be that of another number of workers: missing ones count as
            lost, and further ones as joining, with the initial state.

        Raises:
          CheckpointError: the checkpoint is damaged, or of another program, seed or number of examples; or its shards,
            or without `other_workers_ok` its per-worker state, are of another number of workers; or there is none, or
            none that this process sees.
          WorkerError: another process could not restore its own. On every other process.
          DisagreementError: processes restore different checkpoints. On every process.
        """
        from .restore import restore

        self._loop.check_process()
        with self._parts.activity.doing(RESTORING):
            restore(self._parts, self._loop, checkpoint, missing_ok=missing_ok, other_workers_ok=other_workers_ok)

    @contextmanager
    def branch(self, *, global_batch: int | None = None, **hyperparameters: Any) -> Iterator[None]:
        """Take steps on trial: after the block the program is as before it. Call it on every process, alike.

            with program.branch(global_batch=256, lr=0.2):
                for _ in range(50):
                    program.step()
                loss = program.evaluate(loss_fn, test)

        All that a checkpoint has is restored, also when the block raises. In the block no hook runs, and no listener or
        sink is called. Requested sizes are in force after it. A worker that is lost in the block is gone after it; none
        may join in it.

        Args:
          global_batch: examples per step in the block; by default as now.
          **hyperparameters: by name, values in the block; by default as now.

        Raises:
          BatchSizeError: the global batch is impossible.
          DriverError: the driver has no `ad.hyperparameter` of a name, a value does not fit it, or workers are joining.
          NonFiniteError: the last update made NaNs.
        """
        restore = self._begin_branch(global_batch, hyperparameters)
        try:
            yield
        finally:
            with self._ambient.settings():
                restore()

    @with_build_settings
    @fails_together("in beginning a branch of")
    def _begin_branch(self, global_batch: int | None, hyperparameters: Mapping[str, Any]) -> Callable[[], None]:
        from .restore import begin_branch

        return begin_branch(self._settled(), self._loop, global_batch, hyperparameters)

    # --- evaluation and checks ----------------------------------------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Add values to the last step: the record, all sinks, the progress display and the report have them.

            program.log(val={"loss": 0.31, "accuracy": 0.9})

        Call it between two steps of `run`, or after them. Values before the first step of a run go with that step. Rank
        0 writes its own values; other processes may call it, too.

        Args:
          **values: numbers, pytrees of numbers, or metrics with `compute()`. Dots join the names: "val.loss".

        Raises:
          DriverError: a value has no single number, or a name is one of the step's own values, such as a metric.
        """
        numbers = {name: numbers_by_name({name: value}) for name, value in values.items()}
        if empty := [name for name, found in numbers.items() if not found]:
            raise DriverError(f"log: {empty[0]} has no single number; got {values[empty[0]]!r}.")
        self._settled().run.log({name: x for found in numbers.values() for name, x in found.items()})

    @fails_together("in evaluate of")
    def evaluate(
        self,
        fn: Callable[[Any, Any], Any],
        data: Any,
        *,
        batch: int = 256,
        op: Literal["mean", "sum", "rows"] = "mean",
        log: str | None = None,
    ) -> Any:
        """Return exact means (or sums, rows, or merged metrics) of `fn` over a data set, computed by all workers. Every
        example counts once. Call it on every process.

        Args:
          fn: `fn(state, batch) -> values`: a pytree of arrays, each a mean over the batch's examples, or as `op` says a
            sum, or a row for each example; and of metrics with `merge(other)`, such as those of clu and google-metrax.
            Compiled once per function object.
          data: as for `Program`.
          batch: examples per execution of `fn`.
          op: "mean", "sum", or "rows": those of all examples, in the order of the data.
          log: a name for `program.log` of the result's single numbers: with "val" a value `loss` becomes "val.loss".

        Returns:
          A pytree of numpy arrays, and of merged metrics, on which `compute()` is still to be called. Replicated.

        Raises:
          DriverError: a value of `fn` is not a mean over examples (or a sum, or rows, as `op` says) and would depend on
            `batch`, as a few examples show; or is a metric that cannot be merged. Or this is a forked child.
          DataError: the data cannot be used.
          BatchSizeError: `batch` is not a positive whole number.
          WorkerError: another process failed in this call. On every other process.
          DisagreementError: `fn`, `data` or `batch` differ between processes. On every process.
        """
        from adaptive.check.means import MeanCheck

        from .evaluate import evaluate

        if log is not None and not (isinstance(log, str) and log):
            raise DriverError(f'evaluate: log= is a name for the result, such as "val"; got {log!r}.')
        self._loop.check_process()
        p, step = self._settled(), self._parts.run.step
        self._means = self._means or MeanCheck()
        states = [p.state_as_given(leaves) for leaves in p.engine.states]
        about, members = f"evaluate of {self._name} after step {step}", p.sizes.members
        with p.activity.doing(EVALUATING):
            found = evaluate(fn, states, data, self.world, batch, about, members, op, self._means)
        if log is not None:
            p.run.log(numbers_by_name({log: found}))
        return found

    @with_build_settings
    def check(self, batch: Any = None, *, seed: int = 0, tolerance: float | None = None) -> Invariance:
        """Check whether this driver's step is independent of how a batch is split, as it is not with batch norm, summed
        losses, and losses that couple examples.

        Runs some steps on one batch, in equal shares, in random uneven ones of several microbatches and over fewer
        workers, on this process alone, and changes nothing. Compares state, metrics and hook values by element, in
        double precision; not per-worker state, and values that depend on the split by design (gathered rows, the noise
        scale). "no" without a comparison if workers average over their own examples, with some others, or in some steps
        only.

        Args:
          batch: a pytree like the data. Default: the next `global_batch` examples.
          seed: seed of the splits.
          tolerance: the largest difference that counts as rounding, relative to each element. Default: 100 units in its
            last place, or the effect of perturbing the inputs, if that is larger.

        Returns:
          An `Invariance`, with the `verdict` "yes", "no", or "not known" where not everything could be compared. True
          for "yes" only. Prints as the differences, or as the reason why nothing is known.

        Raises:
          DataError: `batch` has another structure than the data.
        """
        from adaptive.check.invariance import check_invariance

        self._loop.check_process()
        p = self._settled()
        batch = p.stream.peek(p.sizes.current) if batch is None else taken(batch, "batch")
        if jax.tree.structure(batch) != jax.tree.structure(p.data.example):
            raise DataError(
                f"check: the structure of batch is {jax.tree.structure(batch)}, "
                f"that of the data {jax.tree.structure(p.data.example)}."
            )
        return check_invariance(p.engine, batch, seed=seed, tolerance=tolerance, step=p.run.step, program_seed=p.seed)

    def close(self) -> None:
        """End the background threads. Also done when the process ends."""
        self._parts.engine.close()
        self._parts.stream.close()

    def __repr__(self) -> str:
        p = self._parts
        sizes = f"global_batch={sum(p.sizes.current)}, workers={len(p.sizes.members)}"
        return f"Program({p.plan.graph.name!r}, step={p.run.step}, {sizes})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
