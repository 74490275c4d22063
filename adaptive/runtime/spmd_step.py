"""Steps of equal batches on the devices of one mesh, each as one XLA program (`spmd_program.py`).

Between such steps the state is kept as arrays over the mesh. `Engine.states` returns each worker's leaves (for
checkpoints, `evaluate` and general steps): the devices' shards of the same memory. The next such step joins them again.
Neither copies.

A single program cannot measure the computing time of each worker. So some steps run in the general form, which can: the
second, the fourth … after a change of sizes, and later ones at equal intervals. They depend on the number of steps
only, so they are the same in every run, and on every process.

All processes run a step in the same form. They decide by values that are equal on all of them: sizes, the number of
steps, and an exchange of which processes have compiled the program. Everything that can fail on a single process is
done before `World.run_on_mesh`, in which all processes wait for each other.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import proxy

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, EXCHANGING, OTHER
from adaptive.base.errors import OutOfMemoryError, WorkerError
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.base.world import World
from adaptive.data.stream import Share
from adaptive.operators.sources import Reading

from .kernels.memory_bound import bytes_of
from .mesh_arrays import MeshArrays
from .mesh_vectors import MeshVectors
from .microbatches import Microbatches
from .out_of_memory import check_update
from .outcome import Outcome
from .spmd_program import Given, Results, SPMDProgram

if TYPE_CHECKING:
    from .step_plan import Prefetch, StepContext

_APART = 64  # maximum number of steps between timed ones, if the driver reads the workers' seconds
_FAR_APART = 512  # the same if only reports use them
_SAMPLES = 3  # number of timings whose median is reported, so that a single disturbed one does not matter
_SETTLED = 3  # steps of a size before its program is compiled
_PROGRAMS = 4  # sizes whose programs are kept
_NO_STATUS = np.zeros(0, np.float32)
_log = logging.getLogger("adaptive")


class SPMDStep:
    """Runs steps in which all workers of a mesh run one microbatch of the same size.

    Args:
      ctx: the parts that the engine's steps share; `why_not` must be "" for its plan.
      mesh, world: the mesh of the world's workers, and the world.
    """

    def __init__(self, ctx: StepContext, mesh: WorkerMesh, world: World):
        self._ctx: StepContext = proxy(ctx)  # weak, because its worker state refers to this object
        self._steps = steps = ctx.step_plan
        self._mesh, self._world, plan = mesh, world, steps.plan
        self._several = ctx.world.processes > 1
        self._arrays = MeshArrays(mesh, ctx.world.devices)
        on_mesh = list(mesh.mesh.devices.flat)
        assert [on_mesh.index(device) for device in ctx.world.devices] == list(ctx.world.workers)
        self._programs: dict[int, SPMDProgram] = {}
        self._program: SPMDProgram | None = None  # of the current size
        self._size, self._failed = 0, False
        self._errors: dict[int, str] = {}  # by size: the error of its compilation on this process
        self._held: tuple[list[jax.Array], list[jax.Array]] | None = None  # changed leaves, and operator states
        self._lost = False  # whether the state was lost in a program that failed
        self._kept: list[jax.Array] = []  # leaves that no step changes
        self._changed = plan.changed_state
        self._read_only = [i for i in range(len(plan.graph.state_vars)) if i not in set(self._changed)]
        self._replaced = len(plan.changed_state) + sum(len(s.values) for s in plan.op_states)
        self._sent = [number for number, message in enumerate(plan.messages) if message.travels]
        self._bytes = sum(steps.layouts[number].nbytes for number in self._sent)
        self._has_status = steps.status_message >= 0
        status = steps.layouts[steps.status_message].parts[0].dtype if self._has_status else np.dtype(np.float32)
        self._status_dtype = status
        self._fed = MeshVectors(steps.feed, self._arrays)
        self._step: Any = None  # the number of steps done, on the devices
        self._next = -1  # the step for which `_step` is valid
        reads_seconds = any(source.name == "compute_seconds" for source in plan.sources)
        self._apart = _APART if reads_seconds else _FAR_APART
        self._since = 0  # steps of this size
        self._timed = False  # whether the last step ran in the general form
        self._samples: list[deque[float]] = [deque(maxlen=_SAMPLES) for _ in ctx.world.devices]
        self._seconds: list[float] = []  # as they are told

    # --- programs -----------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether steps wait for a program that is still being compiled: in deterministic programs."""
        return self._ctx.kernels.deterministic

    @property
    def failed(self) -> bool:
        """Whether a program could not be compiled on some process, so that none is used. Replicated."""
        return self._failed

    @property
    def lost_state(self) -> bool:
        """Whether the state was lost in a program that failed. Local."""
        return self._lost

    def size_of(self, sizes: Sequence[int]) -> int:
        """Return the size of the program for steps of these sizes; 0 if there is none. Replicated if `sizes` are."""
        size = sizes[0]
        alone = size and not self._failed and self._may_be_one(size)
        return size if alone and all(s == size for s in sizes) else 0

    def _may_be_one(self, size: int) -> bool:
        """Return whether a batch may run as one microbatch: with several processes by settings, as memory is local."""
        kernels = self._ctx.kernels
        return kernels.may_be_one_microbatch(size) if self._several else kernels.is_one_microbatch(size)

    def compile(self, size: int) -> None:
        """Compile the program for batches of `size` examples per worker, and wait for it."""
        if size in self._errors or size in self._programs:
            return
        try:
            if not self._programs:  # a first general step may come much later
                self._prepare_messages()
            self._programs[size] = self._checked(SPMDProgram(self._ctx, self._mesh, size))
        except Exception as error:
            if isinstance(error, ReferenceError) and self._engine_is_gone():
                return
            self._errors[size] = f"{type(error).__name__}: {error}".splitlines()[0]
            _log.debug("compiling one program for all devices failed:", exc_info=True)
            if not self._several:  # with several processes, all must agree to give up
                self._give_up(f"it could not be compiled: {self._errors[size]}")
        for old in list(self._programs)[:-_PROGRAMS]:
            if old != self._size:
                del self._programs[old]

    def _engine_is_gone(self) -> bool:
        """Return whether the program was closed and freed, perhaps while its compiler was at work."""
        try:
            return not self._ctx.kernels
        except ReferenceError:
            return True

    def _checked(self, program: SPMDProgram) -> SPMDProgram:
        """Return the program. Raises an OutOfMemoryError if it would not fit the memory."""
        memory = self._ctx.kernels.memory
        nbytes = None if memory is None else bytes_of([program.run], 0)
        if memory is not None and nbytes is not None and not memory.fits(nbytes):
            raise OutOfMemoryError(f"it needs {nbytes >> 20} MiB, more than is left")
        return program

    def _give_up(self, why: str) -> None:
        """Take all further steps in the general form. Replicated."""
        self._failed = True
        _log.warning(
            "Steps of %s do not run as one program over all devices: %s. Steps continue with separate programs for "
            "each device and message: the results are the same, but steps take longer. If memory ran out, a smaller "
            "local batch may help; the log 'adaptive' has the traceback at level DEBUG.",
            self._steps.name or "the program",
            why,
        )

    def _prepare_messages(self) -> None:
        for number in self._sent:
            parts = self._steps.layouts[number].parts
            self._mesh.prepare([jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts], [p.op for p in parts])

    # --- selection of steps -------------------------------------------------------------------------------------------

    def _change_size(self, size: int) -> None:
        self._size, self._program, self._since, self._seconds = size, None, 0, []
        for samples in self._samples:
            samples.clear()

    def fits(self, sizes: Sequence[int], microbatches: Sequence[Microbatches] | None) -> bool:
        """Return whether a step runs as one program. Must be called once in each step. Replicated.

        Args:
          sizes: sizes of all workers.
          microbatches: the microbatches of this process's workers in the general form. Ignored with several processes,
            which may choose different ones.
        """
        ctx, size = self._ctx, sizes[0]
        if (
            self._failed
            or not size
            or sizes.count(size) < len(sizes)
            or not self._is_one_microbatch(size, microbatches)
        ):
            self._size = 0
            return False
        if size != self._size:
            self._change_size(size)
        self._since = since = self._since + 1
        is_sample = since % self._apart == 0 or (1 < since < self._apart and not since & (since - 1))
        if self._program is None and not self._there(is_sample):
            return False
        if is_sample or ctx.timeline is not None or len(ctx.workers.present) < len(ctx.world.devices):
            self._timed = True  # until the next step as one program has taken over the seconds
            return False
        return True

    def _is_one_microbatch(self, size: int, microbatches: Sequence[Microbatches] | None) -> bool:
        if microbatches is not None and not self._several:
            return len(microbatches[0]) == 1 and microbatches.count(microbatches[0]) == len(microbatches)
        return size == self._size or self._may_be_one(size)

    def _there(self, is_sample: bool) -> bool:
        """Return whether all processes have the program for the current size.

        If not, it is compiled in the background, and checked again in later general steps.
        """
        size = self._size
        if self.waits:
            self.compile(size)
        elif self._since == _SETTLED:
            self._ctx.kernels.ask_for_step(size)
        there = size in self._programs
        if self._several and (self.waits or is_sample):
            there = self._everywhere(size)
        elif self._several:
            there = False
        self._program = self._programs[size] if there else None
        self._timed = not there
        return there

    def _everywhere(self, size: int) -> bool:
        """Return whether all processes have the program for a size. Communicates."""
        about = f"which processes have one program for {size} examples per worker, before a step of {self._steps.name}"
        said = f"?{self._errors[size]}" if size in self._errors else "yes" * (size in self._programs)
        everyone = [told.decode() for told in self._ctx.world.all_gather_bytes(said.encode(), about)]
        failed = {rank: told[1:] for rank, told in enumerate(everyone) if told.startswith("?")}
        if failed:
            rank, error = next(iter(failed.items()))
            self._give_up(f"it could not be compiled on rank {rank}: {error}")
        return all(told == "yes" for told in everyone)

    # --- state --------------------------------------------------------------------------------------------------------

    def _join(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the workers' state and operator states as arrays over the mesh."""
        workers, joined = self._ctx.workers, self._arrays.joined
        values, places, changed = workers.fetch(), workers.places, len(self._changed)
        self._kept = [joined([of_worker[places["state", i, 0]] for of_worker in values]) for i in self._read_only]
        replaced = [joined([of_worker[place] for of_worker in values]) for place in range(self._replaced)]
        return replaced[:changed], replaced[changed:]

    def give_back(self, values: list[list[Any]]) -> None:
        """Write the state to the first values of each worker, if this object holds it.

        Raises:
          WorkerError: the state is lost.
        """
        if self._lost:
            raise WorkerError(
                "the state is lost: its memory was given to one program over all devices, which has failed. Start from "
                "a checkpoint: program.restore(checkpoint)."
            )
        if self._held is None:
            return
        (changed, op_states), self._held = self._held, None
        for place, array in enumerate((*changed, *op_states)):
            for of_worker, leaf in zip(values, self._arrays.apart(array), strict=True):
                of_worker[place] = leaf

    def forget(self) -> None:
        """Drop the held state, because it was replaced."""
        self._held, self._lost = None, False

    # --- a step -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        share: Share,
        readings: Sequence[Reading],
        prefetch: Prefetch,
        more: str = "",
    ) -> Outcome | None:
        """Run a step that `fits`. Arguments and result as for `Engine.step`.

        Returns:
          `None` if a reduced value is not finite: nothing is committed, the status was decoded, and the caller repeats
          the step in the general form, which determines the reason.
        """
        ctx, program, arrays = self._ctx, self._program, self._arrays
        assert program is not None, "it fits"
        activity, began = ctx.activity, time.perf_counter()
        if self._timed:
            self._take_sample(readings)
        held = self._held = self._held or self._join()
        given = self._given(program, share, readings)
        prefetch(share.sizes)  # may raise, so it runs before the state's memory is donated
        own = _NO_STATUS
        if self._has_status:
            ctx.status.own_seconds = activity.of_workers(self._seconds or [r.compute_seconds for r in readings])
            own = ctx.status.encode().astype(self._status_dtype)
        about = f"step {readings[0].step + 1} of {self._steps.name} as one program"
        if self._several:
            activity.turn(EXCHANGING)
        results = self._world.run_on_mesh(partial(self._run, program, held, given), own, about, more)
        seconds = self._seconds or [time.perf_counter() - began] * len(ctx.world.devices)
        if results.ok is not None and not np.asarray(arrays.of_first(results.ok)):
            self._next = -1
            return None
        shown = list(map(arrays.of_first, results.shown))
        activity.turn(OTHER)
        unknown = [None] * self._replaced  # the state is held as arrays over the mesh
        microbatches: list[Microbatches] = [(self._size,)] * len(seconds)
        return Outcome(self._steps, [*unknown, *shown], list(seconds), microbatches, len(self._sent), self._bytes)

    def _run(
        self, program: SPMDProgram, held: tuple[list[jax.Array], list[jax.Array]], given: Given, heard: np.ndarray
    ) -> Results:
        """Run the program, after all processes have reached it.

        Args:
          heard: the status, summed over all processes.
        """
        ctx = self._ctx
        if self._several:
            ctx.activity.turn(COMPUTING)
        if self._has_status:  # before the state's memory is donated, because it may raise
            ctx.status.decode(heard)
        ctx.workers.committed = []  # the old results are overwritten; this function waits for the new ones
        try:
            results: Results = program.run(*held, given)
            self._held, self._step, self._next = (results.state, results.op_states), results.step, self._next + 1
            jax.block_until_ready(results.step if results.ok is None else results.ok)
        except Exception as error:
            self._held, self._lost = None, True
            check_update(error, "a step as one program over all devices")
            raise
        return results

    def _take_sample(self, readings: Sequence[Reading]) -> None:
        """Record the seconds of the previous step, which was a general one."""
        self._timed = False
        if any(math.isnan(r.compute_seconds) for r in readings):
            return
        for samples, reading in zip(self._samples, readings, strict=True):
            samples.append(reading.compute_seconds)
        self._seconds = [median(samples) for samples in self._samples]

    def _given(self, program: SPMDProgram, share: Share, readings: Sequence[Reading]) -> Given:
        """Return the program's inputs, except the state that it replaces."""
        floats, ints = self._fed.vectors(share.sizes, readings)
        step = readings[0].step
        if step != self._next:
            self._step, self._next = self._arrays.repeated(np.int32(step)), step
        if share.whole is not None and not self._several:
            batch = jax.tree.leaves(share.whole)
        else:
            batch = self._arrays.rows(list(zip(*map(jax.tree.leaves, share.batches), strict=True)))
        return Given(self._kept, floats, ints, self._step, program.consts, batch)
