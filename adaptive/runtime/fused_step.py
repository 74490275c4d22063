"""Steps of equal batches as one XLA program each (`fused_program.py`), for which the host never waits.

Between such steps the state is kept as arrays over the mesh. `WorkerState.fetch` returns each worker's leaves, the
devices' shards of the same memory; the next such step joins them again.

Whether a step was finite, its *verdict*, is read when a later step is dispatched. If it was not, the host takes that
step again as a host step, which says why. Processes of `jax.distributed` wait for each step: all must read a verdict in
the same step, and an error of the program means that a process was lost.

A single program cannot measure the computing time of each worker. So some steps run as host steps, which can: the
second, the fourth … after a change of sizes, and later ones at equal intervals.

All processes run a step in the same form. They decide by values that are equal on all of them: sizes, the number of
steps, and an exchange of which processes have compiled the program. Everything that can fail on a single process is
done before `World.run_on_mesh`, in which all processes wait for each other.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import proxy

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, EXCHANGING
from adaptive.base.errors import OutOfMemoryError, WorkerError
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.base.world import World
from adaptive.data.stream import Share
from adaptive.operators.sources import FIXED, STEP, Reading

from .fused_program import NO_FAULT, FusedProgram, Given, Results
from .kernels.memory_bound import bytes_of, check_update
from .kernels.microbatches import Microbatches
from .mesh_arrays import MeshArrays
from .step_context import Outcome

if TYPE_CHECKING:
    from .step_context import Prefetch, StepContext

UNDER_WAY = 2  # maximum number of steps whose verdicts are not read
_APART = 64  # maximum number of steps between timed ones, if the driver reads the workers' seconds
_FAR_APART = 512  # the same if only reports use them
_SAMPLES = 3  # number of timings whose median is reported, so that a single disturbed one does not matter
_SETTLED = 3  # steps of a size before its program is compiled
_PROGRAMS = 4  # sizes whose programs are kept
_UNROLLED = 4  # maximum number of microbatches in one program
_NO_STATUS = np.zeros(0, np.float32)
_log = logging.getLogger("adaptive")


def mesh_for(world: World) -> WorkerMesh | None:
    """Return the mesh over which a world's steps can be fused; `None` if they cannot.

    A lone worker on a CPU has none: no launch is hidden there, and the choice of the new state by a flag keeps XLA from
    fusing the update into the backward pass, up to 2.6 times the time.
    """
    if world.capacity > 1:
        return world.worker_mesh()
    device = world.devices[0]
    return None if device.platform == "cpu" or world.local_mesh is not None else WorkerMesh([device])


class FusedStep:
    """Runs steps in which all workers of a mesh run the same microbatches. The plan `can_be_fused`.

    Attributes:
      fault: the number of steps before the first one that was not finite; `NO_FAULT` if none is known. Replicated.
      failed: whether a program could not be compiled on some process, so that none is used. Replicated.
      lost_state: whether the state was lost in a program that failed. Local.
      waits: whether steps wait for a program that is still being compiled.
    """

    def __init__(self, ctx: StepContext, mesh: WorkerMesh):
        self._ctx: StepContext = proxy(ctx)  # weak, because its worker state refers to this object
        self._mesh, plan = mesh, ctx.plan
        self._several = ctx.world.processes > 1
        self._arrays = MeshArrays(mesh, ctx.world.devices)
        self.failed = self.lost_state = False
        self.waits = ctx.kernels.deterministic
        self._programs: dict[Microbatches, FusedProgram | str] = {}  # those of this process, or why they failed
        self._program: FusedProgram | None = None  # of the current sizes
        self._sizes, self._microbatches = tuple[int, ...](), Microbatches()
        self._held: list[jax.Array] | None = None  # changed leaves, and operator states
        self._kept: list[jax.Array] = []  # leaves that no step changes
        self._sent = [number for number, message in enumerate(plan.messages) if message.travels]
        self._bytes = sum(ctx.layouts[number].nbytes for number in self._sent)
        self._has_status = ctx.status_message >= 0
        status = ctx.layouts[ctx.status_message].parts[0].dtype if self._has_status else np.dtype(np.float32)
        self._status_dtype = status
        self._measured = [s for s in (*ctx.feed.floats, *ctx.feed.ints) if s not in FIXED and s != STEP]
        self._vectors: tuple[Any, Any] = (None, None), ()  # those of the sources, on the devices, and what they hold
        self._step: Any = None  # the number of steps done, on the devices
        self._next = -1  # the step for which `_step` is valid
        self.fault = NO_FAULT
        self._again = NO_FAULT  # the step that is taken again, as a host step
        self._no_fault = self._last_fault = self._arrays.repeated(np.int32(NO_FAULT))
        self._verdicts: deque[Any] = deque()  # those that are not read
        reads_seconds = any(source.name == "compute_seconds" for source in plan.sources)
        self._apart = _APART if reads_seconds else _FAR_APART
        self._since = 0  # steps of these sizes
        self._samples: list[deque[float]] = [deque(maxlen=_SAMPLES) for _ in ctx.world.devices]
        self._seconds: list[float] = []  # as they are reported

    # --- programs -----------------------------------------------------------------------------------------------------

    def microbatches_of(self, sizes: Sequence[int]) -> Microbatches:
        """Return the microbatches of each worker in the program for steps of these sizes; none if there is no program.
        Replicated if `sizes` are.
        """
        size = sizes[0]
        if self.failed or not size or any(s != size for s in sizes):
            return ()
        # With several processes by settings alone, as memory is local.
        microbatches = self._ctx.kernels.fixed_microbatches(size, by_memory=not self._several)
        return microbatches if len(microbatches) <= _UNROLLED else ()

    def compile(self, microbatches: Microbatches) -> None:
        """Compile the program for these microbatches of each worker, and wait for it."""
        if microbatches in self._programs:
            return
        try:
            for number in [] if self._programs else self._sent:  # a first host step may come much later
                parts = self._ctx.layouts[number].parts
                self._mesh.prepare([jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts], [p.op for p in parts])
            self._programs[microbatches] = self._fitting(FusedProgram(self._ctx, self._arrays, microbatches))
        except ReferenceError:  # the program was closed and freed meanwhile
            return
        except Exception as error:
            self._programs[microbatches] = why = f"{type(error).__name__}: {error}".splitlines()[0]
            _log.debug("compiling one program for all devices failed:", exc_info=True)
            if not self._several:  # with several processes, all must agree to give up
                self._give_up(f"it could not be compiled: {why}")
        for old in list(self._programs)[:-_PROGRAMS]:
            if old != self._microbatches:
                del self._programs[old]

    def _fitting(self, program: FusedProgram) -> FusedProgram:
        """Return the program. Raises an OutOfMemoryError if it would not fit the memory."""
        memory = self._ctx.kernels.memory
        nbytes = 0 if memory is None else bytes_of([program.run], 0) or 0
        if memory is not None and not memory.fits(nbytes):
            raise OutOfMemoryError(f"it needs {nbytes >> 20} MiB, more than is left")
        return program

    def _give_up(self, why: str) -> None:
        """Take all further steps as host steps. Replicated."""
        self.failed = True
        _log.warning(
            "Steps of %s do not run as one program over all devices: %s. Steps continue with separate programs for "
            "each device and message: the results are the same, but steps take longer. If memory ran out, a smaller "
            "local batch may help; the log 'adaptive' has the traceback at level DEBUG.",
            self._ctx.name or "the program",
            why,
        )

    # --- selection of steps -------------------------------------------------------------------------------------------

    def fits(self, sizes: tuple[int, ...], readings: Sequence[Reading]) -> bool:
        """Return whether a step of these sizes of all workers runs as one program. Must be called once in each step.
        Replicated.
        """
        ctx = self._ctx
        if self.failed or readings[0].step == self._again:
            return False
        if sizes != self._sizes:
            self._sizes, self._microbatches = sizes, self.microbatches_of(sizes)
            self._program, self._since, self._seconds = None, 0, [r.compute_seconds for r in readings]
            for samples in self._samples:
                samples.clear()
        if not self._microbatches:
            return False
        self._since = since = self._since + 1
        is_sample = since % self._apart == 0 or (1 < since < self._apart and not since & (since - 1))
        if self._program is None and not self._there(is_sample):
            return False
        return not is_sample and len(ctx.workers.present) == len(ctx.world.devices)

    def _there(self, is_sample: bool) -> bool:
        """Return whether all processes have the program for the current size. If not, it is compiled, and checked again
        in later host steps.
        """
        microbatches = self._microbatches
        if self.waits:
            self.compile(microbatches)
        elif self._since == _SETTLED:
            self._ctx.kernels.ask_for_step(microbatches)
        found = self._programs.get(microbatches)
        if self._several and not ((self.waits or is_sample) and self._everywhere(microbatches, found)):
            found = None
        self._program = None if isinstance(found, str) else found
        return self._program is not None

    def _everywhere(self, microbatches: Microbatches, found: FusedProgram | str | None) -> bool:
        """Return whether all processes have the program for these microbatches. Communicates."""
        about = (
            f"which processes have one program for {sum(microbatches)} examples per worker, before a step of "
            f"{self._ctx.name}"
        )
        said = f"?{found}" if isinstance(found, str) else "yes" * (found is not None)
        everyone = [told.decode() for told in self._ctx.world.all_gather_bytes(said.encode(), about)]
        failed = {rank: told[1:] for rank, told in enumerate(everyone) if told.startswith("?")}
        if failed:
            rank, error = next(iter(failed.items()))
            self._give_up(f"it could not be compiled on rank {rank}: {error}")
        return all(told == "yes" for told in everyone)

    # --- state --------------------------------------------------------------------------------------------------------

    def _join(self) -> list[jax.Array]:
        """Return the workers' state and operator states as arrays over the mesh."""
        workers = self._ctx.workers
        each = zip(*(values[: len(workers.places)] for values in workers.fetch()), strict=True)
        joined = list(map(self._arrays.joined, each))
        self._kept = joined[workers.replaced :]
        return joined[: workers.replaced]

    def give_back(self, values: list[list[Any]]) -> None:
        """Write the state to the first values of each worker, if this object holds it. Raises a WorkerError if it is
        lost.
        """
        if self.lost_state:
            raise WorkerError(
                "the state is lost: its memory was given to one program over all devices, which has failed. Start from "
                "a checkpoint: program.restore(checkpoint)."
            )
        held, self._held = self._held or [], None
        for place, array in enumerate(held):
            for of_worker, leaf in zip(values, self._arrays.apart(array), strict=True):
                of_worker[place] = leaf

    def forget(self) -> None:
        """Drop the held state, because it was replaced."""
        self._held, self.lost_state, self._again = None, False, NO_FAULT
        self._clear_faults()

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Wait for the verdicts of all steps. Returns whether all were finite; if not, `fault` is set."""
        self._read(0)
        return self.fault == NO_FAULT

    def take_back(self) -> int:
        """Return `fault`, and forget it: the next step has this number, and is a host step."""
        self._again = fault = self.fault
        self._clear_faults()
        return fault

    def _clear_faults(self) -> None:
        self.fault, self._last_fault, self._next = NO_FAULT, self._no_fault, -1
        self._verdicts.clear()

    def _read(self, most: int) -> None:
        """Read verdicts, until `most` are left; further ones only if they are there."""
        verdicts = self._verdicts
        while verdicts and (len(verdicts) > most or verdicts[0].is_ready()):
            try:
                self.fault = int(np.asarray(verdicts[0]))  # not taken out before: Ctrl-C may end the wait
                verdicts.popleft()
            except Exception as error:
                self._held, self.lost_state = None, True
                verdicts.clear()
                check_update(error, "a step as one program over all devices")
                raise
            if self.fault != NO_FAULT:  # of the later ones too
                verdicts.clear()

    # --- a step -------------------------------------------------------------------------------------------------------

    def __call__(
        self, share: Share, readings: Sequence[Reading], prefetch: Prefetch, more: str, *, wait: bool
    ) -> Outcome | None:
        """Run a step that `fits`: see `Engine.step`. Returns `None` if it or one before it was not finite (`fault`)."""
        ctx, program, arrays = self._ctx, self._program, self._arrays
        assert program is not None, "it fits"
        measured = [r.compute_seconds for r in readings]
        if measured != self._seconds and not any(map(math.isnan, measured)):  # by a host step
            for samples, sample in zip(self._samples, measured, strict=True):
                samples.append(sample)
            self._seconds = [median(samples) for samples in self._samples]
        held = self._held = self._held or self._join()
        given = self._given(program, share, readings)
        prefetch(share.sizes)  # may raise, so it runs before the state's memory is donated
        seconds = self._seconds
        own = _NO_STATUS
        if self._has_status:
            ctx.activity.turn(COMPUTING)
            ctx.status.own_seconds = ctx.activity.of_workers(seconds)
            own = ctx.status.encode().astype(self._status_dtype)
        about = f"step {readings[0].step + 1} of {self._ctx.name} as one program"
        if self._several:
            ctx.activity.turn(EXCHANGING)
        most = 0 if wait or self._several else UNDER_WAY
        run = partial(self._run, program, held, given, most)
        results = run(own) if ctx.world.capacity == 1 else ctx.world.run_on_mesh(run, own, about, more)
        if self.fault != NO_FAULT:
            return None
        unknown = [None] * ctx.workers.replaced  # the state is held as arrays over the mesh
        microbatches = [self._microbatches] * len(seconds)
        shown = map(arrays.of_first, results.shown)
        return Outcome(ctx.shown, [*unknown, *shown], list(seconds), microbatches, len(self._sent), self._bytes)

    def _run(self, program: FusedProgram, held: list[jax.Array], given: Given, most: int, heard: np.ndarray) -> Results:
        """Dispatch the program, after all processes have reached it, and read verdicts. `heard`: the summed status."""
        ctx = self._ctx
        if self._several:
            ctx.activity.turn(COMPUTING)
        if self._has_status:  # before the state's memory is donated, because it may raise
            ctx.status.decode(heard)
        ctx.workers.committed = []  # they are overwritten, after they were read
        ctx.interrupts.hold()
        try:
            results: Results = program.run(held, given)
        except Exception as error:
            self._held, self.lost_state = None, True
            check_update(error, "a step as one program over all devices")
            raise
        self._held, self._step, self._next = results.replaced, results.step, self._next + 1
        self._last_fault = results.fault
        results.fault.copy_to_host_async()
        self._verdicts.append(results.fault)
        self._read(most)
        return results

    def _given(self, program: FusedProgram, share: Share, readings: Sequence[Reading]) -> Given:
        """Return the program's inputs, except the state that it replaces."""
        (floats, ints), known = self._vectors
        measured = [[source.read(reading) for source in self._measured] for reading in readings]
        now = share.sizes, readings[0].seed, program.microbatches, measured
        if now != known:
            vectors = zip(*(self._ctx.feed.measure(r, len(program.microbatches)) for r in readings), strict=True)
            floats, ints = self._arrays.rows([[vector[None] for vector in of_all] for of_all in vectors])
            self._vectors = (floats, ints), now
        step = readings[0].step
        if step != self._next:
            self._step, self._next = self._arrays.repeated(np.int32(step)), step
        if share.whole is not None and not self._several:
            batch = jax.tree.leaves(share.whole)
        else:
            batch = self._arrays.rows(list(zip(*map(jax.tree.leaves, share.batches), strict=True)))
        return Given(self._kept, floats, ints, self._step, self._last_fault, program.consts, batch)
