"""The engine: compiles a plan's programs, keeps the workers' state, and runs steps, without hooks or epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from adaptive.base.activity import COMPUTING
from adaptive.base.process.cores import n_cores
from adaptive.data.stream import Share
from adaptive.operators.sources import Reading

from .fused_program import can_be_fused
from .fused_step import FusedStep, mesh_for
from .host_step import HostStep
from .kernels.compile import side_by_side
from .kernels.memory_bound import check_memory
from .kernels.microbatches import Microbatches
from .step_context import Outcome, Prefetch, StepContext
from .worker_state import OpStates, States


class Engine:
    """Runs the steps of one plan on this process's workers.

    Attributes:
      fused: runs steps as one program; `None` where the host takes part in reductions.
    """

    def __init__(self, ctx: StepContext):
        self.context, self.plan, self.plans, self.world, self.name = ctx, ctx.plan, ctx.plans, ctx.world, ctx.name
        self.layouts, self.kernels, self.workers = ctx.layouts, ctx.kernels, ctx.workers
        self.fused: FusedStep | None = None
        mesh = mesh_for(ctx.world)
        if mesh is not None and can_be_fused(ctx.plan, mesh):
            self.fused = self.workers.held_by = FusedStep(ctx, mesh)
            self.kernels.compiled.compile_step = self.fused.compile
        self._host_step = HostStep(ctx)

    @property
    def states(self) -> States:
        """See `WorkerState`."""
        return self.workers.states

    @property
    def op_states(self) -> OpStates:
        """See `WorkerState`."""
        return self.workers.op_states

    @property
    def lost_state(self) -> bool:
        """Whether the state was lost in a step that failed. Local."""
        return self.fused is not None and self.fused.lost_state

    @property
    def has_status(self) -> bool:
        """Whether each step has a message that carries the status."""
        return self.context.status_message >= 0

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compile(self, sizes: Sequence[int], of_all: Sequence[int] = ()) -> None:
        """Compile the programs of every step, and the kernels for the first sizes of this process's workers, by local
        index. `of_all`: the first sizes of all workers; required with several processes.
        """
        start, fused = time.perf_counter(), self.fused
        of_all = sizes if self.world.processes == 1 else of_all
        whole = Microbatches() if fused is None or not of_all else fused.microbatches_of(of_all)
        jobs: list[Callable[[], object]] = [*self.context.programs.jobs(), partial(self.kernels.require_first, sizes)]
        if fused is not None and whole and fused.waits:
            jobs.append(partial(fused.compile, whole))
        side_by_side(jobs, most=n_cores())
        self.kernels.compiled.counters.waited_seconds += time.perf_counter() - start
        if whole:
            self.kernels.ask_for_step(whole)
        self.kernels.extend(max(sizes))

    def compile_microbatches(self, microbatches: Sequence[Microbatches]) -> None:
        """Compile the programs of every step, and the kernels for exactly these microbatches, by local index."""
        self.context.programs.compile()
        self.kernels.require_microbatches(microbatches)

    def expect(self, sizes: Sequence[int]) -> None:
        """Set the minimum number of microbatches for these sizes of all workers. Precedes questions about kernels."""
        self.kernels.min_microbatches = self.context.min_microbatches_of(max(sizes), sum(sizes))

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(
        self,
        share: Share,
        readings: Sequence[Reading],
        prefetch: Prefetch = lambda sizes: None,
        microbatches: Sequence[Microbatches] | None = None,
        search: bool = True,
        more: str = "",
        wait: bool = True,
    ) -> Outcome | None:
        """Compute, exchange, and commit.

        Args:
          share: the batches of this process's workers.
          readings: the values of sources, by local index.
          prefetch: starts to fetch the next step's examples; called once, when the first kernels are dispatched.
          microbatches: sizes, by local index; by default those of the rule (`runtime/kernels/microbatches.py`).
          search: whether to determine where values that are not finite were computed, which takes seconds.
          more: added to the error if processes are in different collectives.
          wait: whether to wait until the step is known to be finite. A fused step that is not waited for may turn out
            not to be in a later one.

        Returns:
          `None` if this step or an earlier one was fused and is not finite. None from that one on has changed anything;
          `take_back` returns its number.
        """
        fused, activity = self.fused, self.context.activity
        activity.now = COMPUTING
        activity.marks.append((COMPUTING, time.perf_counter(), self.world.waited))
        if fused is not None:
            if microbatches is None and fused.fits(share.sizes, readings):
                return fused(share, readings, prefetch, more, wait=wait)
            if not fused.settle():
                return None
        try:
            return self._host_step(share, readings, prefetch, microbatches, search, more)
        except jax.errors.JaxRuntimeError as error:
            check_memory(self.context, error, self._host_step.microbatches)
            raise

    def settle(self) -> bool:
        """Wait until it is known whether all steps were finite. Returns whether they were."""
        return self.fused is None or self.fused.settle()

    def take_back(self) -> int:
        """Return the number of steps before the first one that was not finite; the next step is that one, as a host
        step.
        """
        assert self.fused is not None, "other steps are not taken back"
        return self.fused.take_back()

    def exchange_status(self, about: str, more: str) -> None:
        """Exchange the status in a separate message. Communicates."""
        status = self.context.status
        sent = self.world.all_gather_bytes(status.encode().tobytes(), about, more)
        status.decode(np.sum([np.frombuffer(of_process) for of_process in sent], axis=0))

    def close(self) -> None:
        """End the background threads."""
        self.kernels.close()
        if self.context.waiters:
            self.context.waiters.shutdown()
            self.context.waiters = None  # further steps wait in one thread
