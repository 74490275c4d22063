"""Steps of equal batches on the devices of one mesh, each as one XLA program (`spmd_program.py`).

Between such steps the state is kept as arrays over the mesh. `Engine.states` gives each worker's own leaves (for a
checkpoint, `evaluate`, a step by the general path): the devices' shards of the same memory. The next such step joins
them again; neither copies.

In one program nobody can tell for how long each worker has computed. A step now and then goes by the general path,
which can: the first, the second, the fourth … after a change of sizes, and then at an even distance. Which ones depends
on the number of steps alone, so the path of a step is the same in every run, and on every process.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import proxy

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive.base.activity import OTHER
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.data.stream import Share
from adaptive.operators import sources
from adaptive.operators.sources import Reading

from .microbatches import Microbatches
from .segment import Feed
from .spmd_program import Given, SPMDProgram
from .step import Outcome

if TYPE_CHECKING:
    from .engine import Engine

_FIXED = {  # sources that do not change while the sizes stay; the step number is counted on the devices
    *(sources.EXAMPLES, sources.CALLS, sources.OFFSET, sources.SEED, sources.GLOBAL_BATCH, sources.BATCH_SIZE),
    *(sources.WORKER, sources.WORKERS, sources.STEP),
}
_APART = 64  # steps between two by which workers are timed, at most, where the driver reads their seconds
_FAR_APART = 512  # where it does not, and they are for reports alone
_SAMPLES = 3  # timings of a worker whose median is told: one that a neighbour disturbed moves nothing
_SETTLED = 3  # steps of a size before its program is compiled
_PROGRAMS = 4  # sizes whose programs are kept
_log = logging.getLogger("adaptive")


class SPMDStep:
    """Takes steps in which all workers of a mesh make one kernel call of the same size.

    Args:
      engine: whose steps; `why_not` knows nothing against its plan.
      mesh: of its world's workers.
    """

    def __init__(self, engine: Engine, mesh: WorkerMesh):
        self._engine: Engine = proxy(engine)  # not kept alive: the engine has this
        self._mesh, plan = mesh, engine.plan
        self._everywhere = NamedSharding(mesh.mesh, P())
        self._split = NamedSharding(mesh.mesh, P(mesh.axis))
        on_mesh = list(mesh.mesh.devices.flat)
        order = [shard.device for shard in jax.device_put(np.zeros(()), self._everywhere).addressable_shards]
        self._place = [order.index(device) for device in engine.world.devices]  # of each worker, among the shards
        assert [on_mesh.index(device) for device in engine.world.devices] == list(engine.world.workers)
        self._programs: dict[int, SPMDProgram] = {}
        self._program: SPMDProgram | None = None  # of the current size
        self._size, self._failed = 0, False
        self._held: tuple[list[jax.Array], list[jax.Array]] | None = None  # changed leaves, and slots
        self._kept: list[jax.Array] = []  # leaves that no step changes
        self._changed = plan.changed_state
        self._read_only = [i for i in range(len(plan.graph.state_vars)) if i not in set(self._changed)]
        self._slot_places = [(k, leaf) for k, slot in enumerate(plan.slots) for leaf in range(len(slot.values))]
        found = engine._results
        counts = [len(hook.values) for hook in plan.hooks]
        ends = np.cumsum([0, *counts]).tolist()
        self._hooks = [slice(start, end) for start, end in pairwise(ends)]
        self._metrics = slice(ends[-1], ends[-1] + found.metrics.stop - found.metrics.start)
        self._sent = [number for number, message in enumerate(plan.messages) if message.travels]
        self._bytes = sum(engine.layouts[number].nbytes for number in self._sent)
        self._status_dtype = engine.layouts[engine._last].parts[0].dtype if engine.tells else np.dtype(np.float32)
        self._fed = _Fed(engine.feed, self._split)
        self._step: Any = None  # the number of steps done, on the devices
        self._next = -1  # the same, as far as it is known to be right
        reads_seconds = any(source.name == "compute_seconds" for source in plan.sources)
        self._apart = _APART if reads_seconds else _FAR_APART
        self._since = 0  # steps of this size
        self._timed = False  # whether the step before went by the general path
        self._samples: list[deque[float]] = [deque(maxlen=_SAMPLES) for _ in engine.world.devices]
        self._seconds: list[float] = []  # as they are told

    # --- programs -----------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether steps wait for a program that is not compiled yet: where the bits must not depend on when it is, and
        where all processes have to use it from the same step on.
        """
        return not self._engine.kernels.timed or self._engine.world.processes > 1

    def size_of(self, sizes: Sequence[int]) -> int:
        """Return the size of the program for steps of these sizes, of this process's workers; 0 if there is none."""
        size = sizes[0]
        alone = size and self._engine.kernels.is_one_call(size) and not self._failed
        return size if alone and all(s == size for s in sizes) else 0

    def compile(self, size: int) -> None:
        """Have the program for batches of `size` examples for each worker, waiting for it."""
        if self._failed or size in self._programs:
            return
        try:
            if not self._programs:  # a first step by the general path may come after many
                self._prepare_messages()
            self._programs[size] = SPMDProgram(self._engine, self._mesh, size)
        except Exception as error:  # steps go on as they did
            self._failed = True
            _log.info("steps are not one program over all devices: %s: %s", type(error).__name__, error)
        for old in list(self._programs)[:-_PROGRAMS]:
            if old != self._size:
                del self._programs[old]

    def _prepare_messages(self) -> None:
        for number in self._sent:
            parts = self._engine.layouts[number].parts
            self._mesh.prepare([jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts], [p.op for p in parts])

    def _change_size(self, size: int) -> None:
        self._size, self._program, self._since, self._seconds = size, self._programs.get(size), 0, []
        for samples in self._samples:
            samples.clear()

    def fits(self, microbatches: Sequence[Microbatches]) -> bool:
        """Return whether a step of these calls is to be taken by one program. To be called once in each step."""
        engine, first = self._engine, microbatches[0]
        if self._failed or len(first) != 1 or microbatches.count(first) < len(microbatches):
            self._size = 0
            return False
        if first[0] != self._size:
            self._change_size(first[0])
        self._since = since = self._since + 1
        if self._program is None and not self._there():
            return False
        is_sample = since % self._apart == 0 or (1 < since < self._apart and not since & (since - 1))
        if is_sample or engine.timeline is not None or len(engine.present) < len(self._place):
            self._timed = True
            return False
        return engine.new_nans is None or not engine.made_nans()

    def _there(self) -> bool:
        """Whether the program for the current size is there. If not, it is compiled in the background."""
        if self.waits:
            self.compile(self._size)
        elif self._since == _SETTLED:
            self._engine.kernels.ask_for_step(self._size)
        self._program = self._programs.get(self._size)
        self._timed = self._program is None
        return self._program is not None

    # --- state --------------------------------------------------------------------------------------------------------

    def _join(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Take the workers' state and slots as arrays over the mesh."""
        states, slots = self._engine.states, self._engine.slots
        self._kept = [self._joined([state[i] for state in states]) for i in self._read_only]
        return (
            [self._joined([state[i] for state in states]) for i in self._changed],
            [self._joined([of_worker[k][leaf] for of_worker in slots]) for k, leaf in self._slot_places],
        )

    def _joined(self, leaves: list[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(leaves[0].shape, self._everywhere, leaves)

    def _apart_again(self, array: jax.Array) -> list[jax.Array]:
        """Each worker's own, of an array over the mesh."""
        shards = array.addressable_shards
        return [shards[place].data for place in self._place]

    def give_back(self, states: list[list[jax.Array]], slots: list[list[list[jax.Array]]]) -> None:
        """Put each worker's leaves where other steps keep them, if this one has them."""
        if self._held is None:
            return
        (changed, of_slots), self._held = self._held, None
        for i, array in zip(self._changed, changed, strict=True):
            for state, leaf in zip(states, self._apart_again(array), strict=True):
                state[i] = leaf
        for (k, number), array in zip(self._slot_places, of_slots, strict=True):
            for of_worker, leaf in zip(slots, self._apart_again(array), strict=True):
                of_worker[k][number] = leaf

    def forget(self) -> None:
        """The engine's state is another from now on."""
        self._held = None

    # --- a step -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        share: Share,
        readings: Sequence[Reading],
        microbatches: Sequence[Microbatches],
        meanwhile: Callable[[], None],
    ) -> Outcome | None:
        """Take a step: the arguments and the result of `Engine.step`.

        Returns:
          `None` if what has arrived is not finite: nothing is committed, and the general path finds out why.
        """
        engine, program = self._engine, self._program
        assert program is not None, "it fits"
        activity, began = engine.activity, time.perf_counter()
        if self._timed:
            self._take_sample(readings)
        held = self._held = self._held or self._join()
        given = self._given(program, share, readings)
        engine.world.barrier()  # among the processes of this world, of which there is one: raises if it is closed
        meanwhile()  # before the old state is given up: it may raise, and then the step has not been taken
        with self._mesh.one_at_a_time:
            results = program.run(*held, given)
            engine._committed = []  # what they were is overwritten, and what they are now is waited for here
            self._held, self._step, self._next = (results.state, results.slots), results.step, self._next + 1
            jax.block_until_ready(results.step if results.flags is None else results.flags)
        seconds = self._seconds or [time.perf_counter() - began] * len(self._place)
        if results.flags is not None and not self._committed(results.flags):
            self._next = -1
            return None
        if engine.tells:
            engine.status.told = activity.of_workers(seconds)
            engine.status.decode(engine.status.encode().astype(self._status_dtype))
        first = self._place[0]
        shown = [array.addressable_data(first) for array in results.shown]
        activity.turn(OTHER)
        return Outcome(
            [shown[place] for place in self._hooks],
            shown[self._metrics],
            {},
            list(seconds),
            list(microbatches),
            len(self._sent),
            self._bytes,
        )

    def _committed(self, flags: jax.Array) -> bool:
        """Whether the step is committed. Hands on what else the flags say."""
        new_nans = self._engine.new_nans
        assert new_nans is not None, "there are flags"
        found = list(map(np.asarray, self._apart_again(flags))) if new_nans.may_differ else [np.asarray(flags)]
        if not found[0][0]:
            return False
        new_nans.committed([of_worker[1:] for of_worker in found])
        return True

    def _take_sample(self, readings: Sequence[Reading]) -> None:
        """Take the seconds of the step before, which went by the general path."""
        self._timed = False
        if any(math.isnan(r.compute_seconds) for r in readings):
            return
        for samples, reading in zip(self._samples, readings, strict=True):
            samples.append(reading.compute_seconds)
        self._seconds = [median(samples) for samples in self._samples]

    def _given(self, program: SPMDProgram, share: Share, readings: Sequence[Reading]) -> Given:
        """The program's inputs but for the state that it replaces."""
        floats, ints = self._fed.vectors(share.sizes, readings)
        step = readings[0].step
        if step != self._next:
            self._step, self._next = jax.device_put(np.int32(step), self._everywhere), step
        if share.whole is not None:
            batch = jax.tree.leaves(share.whole)
        else:
            columns = zip(*map(jax.tree.leaves, share.batches), strict=True)
            batch = [np.concatenate(column) for column in columns]
        return Given(self._kept, floats, ints, self._step, program.consts, batch)


class _Fed:
    """The vectors of sources of all workers, on the devices; sent again when they change.

    Args:
      sharding: a row for each worker.
    """

    def __init__(self, feed: Feed, sharding: NamedSharding):
        self._feed, self._sharding = feed, sharding
        self._measured = [(1, i, s) for i, s in enumerate(feed.floats, 1) if s not in _FIXED]
        self._measured += [(2, i, s) for i, s in enumerate(feed.ints) if s not in _FIXED]
        self._said: list[list[float]] = []
        self._known: tuple[Any, ...] = ()  # sizes and seed; the vectors of the host
        self._there: Any = None

    def vectors(self, sizes: tuple[int, ...], readings: Sequence[Reading]) -> tuple[Any, Any]:
        """Return floats and integers for the next step; shape=(workers, elements) each."""
        key = sizes, readings[0].seed
        if not self._known or key != self._known[0]:
            vectors = [self._feed.measure(reading) for reading in readings]
            self._known = key, np.stack([floats for floats, _ in vectors]), np.stack([ints for _, ints in vectors])
            self._said = []
            self._there = jax.device_put(self._known[1:], self._sharding)
        elif self._measured:
            said = [[source.read(reading) for _, _, source in self._measured] for reading in readings]
            if said != self._said:
                self._said = said
                for row, values in enumerate(said):
                    for (kind, place, _), value in zip(self._measured, values, strict=True):
                        self._known[kind][row, place] = value
                self._there = jax.device_put((self._known[1].copy(), self._known[2].copy()), self._sharding)
        return self._there
