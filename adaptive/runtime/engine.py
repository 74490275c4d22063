"""One step, carried out: segments and messages in the order of the plan, for all workers of this process.

The engine holds the workers' state and knows nothing of hooks, sizes or epochs. Its promise is rule 5: a step commits
whole or not at all. Buffers of the old state are given to XLA only by the final segment, which starts when every
message of the step has arrived and none of them brought bad news: from another worker, or of values that are not
finite.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, EXCHANGING, OTHER, Activity
from adaptive.base.channel import Arrived, Arriving, LookAtPiece, PartSpec
from adaptive.base.cores import n_cores
from adaptive.base.timeline import STEPS, Timeline
from adaptive.base.worker_mesh import OffersMesh
from adaptive.base.world import World, retry_on_members_changed
from adaptive.data.stream import Share
from adaptive.graph.flow import Scope
from adaptive.operators.sources import CALLS, Reading

from .calls import Calls, Plans, segment_shapes
from .compile import side_by_side
from .finite import Look
from .kernels import KernelOptions, Kernels
from .message import accumulate, lay_out_all
from .microbatches import Microbatches
from .nothing import Nothing
from .programs import Compilable, Programs
from .segment import Feed, segment_function
from .spmd_program import why_not
from .spmd_step import SPMDStep
from .steady_step import SteadyStep, is_flat
from .step import Outcome, PerWorker, Step, add
from .updates import NONE_FOUND, Found, NewNaNs
from .wiring import FinalResults, Inputs, bytes_of_a_call, places_in_level

_NO_STATUS = np.zeros(0)


class StatusLike(Protocol):
    """What this process says of itself in each step, with its last message, and what it takes of the others'."""

    length: int  # elements of the message
    told: tuple[float, Sequence[float], Sequence[float]]  # seconds of this process: see `Activity.of_workers`

    def encode(self) -> np.ndarray:
        """This process's part of a sum over all processes; shape=(length,)."""
        ...

    def encode_one(self, input_: float, computing: float, busy: float) -> np.ndarray:
        """The same, with the seconds of this process's only worker."""
        ...

    def decode(self, elements: np.ndarray) -> None:
        """Take the sum; raises what ends the run."""
        ...


class NoStatus:
    """Of a process that says nothing, and hears nothing."""

    length = 0
    told: tuple[float, Sequence[float], Sequence[float]] = 0.0, (), ()

    def encode(self) -> np.ndarray:
        return np.zeros(0)

    def encode_one(self, input_: float, computing: float, busy: float) -> np.ndarray:
        del input_, computing, busy
        return np.zeros(0)

    def decode(self, elements: np.ndarray) -> None:
        del elements


class Engine:
    """Carries out steps of one plan.

    Args:
      plans: of the driver, for any number of examples; all but the call segments is taken from their reference.
      state: leaves of the initial state, on the host or any device. Copied, and taken out of the list one by one, so
        that those that nothing else refers to are freed meanwhile.
      kernels: how to compile and choose call kernels; see `Kernels`.
      status: what rides on the last message of each step.
      finite: whether what is not finite keeps a step from being committed.
      name: the program's, to tell its messages from those of others in this world.
      activity: to be told what this process does.
    """

    def __init__(
        self,
        plans: Plans,
        state: list[Any],
        world: World,
        *,
        kernels: KernelOptions = KernelOptions(),  # noqa: B008  (it is frozen)
        status: StatusLike | None = None,
        finite: bool = False,
        name: str = "",
        activity: Activity | None = None,
    ):
        self.plan, self.world, self.plans = plans.reference, world, plans
        plan = self.plan
        self._label = re.sub(r"\W+", "_", plan.graph.name).strip("_") + "_"  # what names in profiles begin with
        self.feed = Feed.of(plan)
        self.status = status or NoStatus()
        self.layouts = lay_out_all(plan.messages, capacity=world.capacity, status=self.status.length)
        self.looks = [Look(layout, world.devices[0].platform) for layout in self.layouts] if finite else []
        # A noise scale needs two groups of examples at least; a lone worker makes them by splitting its batch.
        self._compares_groups = any(s.name == CALLS.name for s in plan.sources)
        self.least_calls = 2 if world.capacity == 1 and self._compares_groups else 1
        calls = Calls(plans, self.feed, self.layouts)
        self.kernels = Kernels(
            calls,
            world.devices,
            splittable=plan.splittable,
            least_calls=self.least_calls,
            call_bytes=bytes_of_a_call(plan, self.layouts),
            options=kernels,
            name=self._label,
        )
        self._first_local = {i: copied(state[i], world.devices[0]) for i in plan.local_state}
        self._states: PerWorker = [[] for _ in world.devices]
        while state:
            leaf = state.pop(0)
            copies = jax.block_until_ready([copied(leaf, device) for device in world.devices])
            for own, copy in zip(self._states, copies, strict=True):
                own.append(copy)
            del leaf, copies, copy
        self._slots: PerWorker = [[[copied(a, d) for a in s.init] for s in plan.slots] for d in world.devices]
        self._spmd: SPMDStep | None = None  # which keeps states and slots, while it takes the steps
        self.present = list(range(len(world.devices)))  # the workers of this process that are there, by place
        self.nothing = Nothing(plan, self.layouts, world)
        self.new_nans = NewNaNs(plan, self.states) if finite else None
        # Where one thread cannot say when each was done: calls on several devices, or stages while messages travel.
        waits = len(world.devices) * max(map(len, plan.stages.values()), default=1)
        self._waiters = ThreadPoolExecutor(waits) if waits > 1 else None
        self._committed: list[jax.Array] = []  # one result of the last step's final segment, per worker of this process
        self._compiled = Programs(self._label, world.devices, self._sums())
        self.name = name
        self.activity = activity or Activity(world)
        self.timeline: Timeline | None = None  # while one is kept, what it is about is waited for
        self._channels = [
            world.channel([PartSpec(p.shape, p.dtype, p.op) for p in layout.parts], layout.status, (name, number))
            for number, layout in enumerate(self.layouts)
        ]
        # The message with the status.
        self._last = next((n for n, layout in enumerate(self.layouts) if layout.status), -1)
        self._places = places_in_level(plan, self.layouts)
        self._inputs = {(s.kind, s.level): Inputs(s) for s in (*plan.onces.values(), *plan.calls.values(), plan.final)}
        self._results = FinalResults(plan)
        self._last_call = max((level for level in plan.calls if level < plan.levels), default=-1)
        # What the driver closed over, on each device, for the segments that are compiled once.
        values = list(plan.graph.consts.values())
        self.consts = {
            (s.kind, s.level, local): [self.kernels.constants.on(device, values[i]) for i in s.reads("const")]
            for s in (*plan.onces.values(), plan.final)
            for local, device in enumerate(world.devices)
        }
        if isinstance(world, OffersMesh) and world.capacity > 1:
            mesh = world.worker_mesh()
            if mesh is not None and not why_not(plan, mesh):
                self._spmd = SPMDStep(self, mesh, world)
                self.kernels.compile_step = self._spmd.compile
        self.kernels.compile_sums = self._compiled.compile_sums
        self._steady = SteadyStep(self) if is_flat(plan, len(world.devices)) else None

    def steady_step(self, sizes: Sequence[int]) -> SteadyStep | None:
        """Return what takes steps of these sizes, of all workers, in less time than `step`; `None` if nothing does."""
        return None if self._spmd is not None and self._spmd.size_of(sizes) else self._steady

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def lost_state(self) -> bool:
        """Whether the state is gone with a step that has failed. Local."""
        return self._spmd is not None and self._spmd.lost_state

    @property
    def states(self) -> PerWorker:
        """Each worker's leaves of the state, as of the last step."""
        if self._spmd is not None:
            self._spmd.give_back(self._states, self._slots)
        return self._states

    @property
    def slots(self) -> PerWorker:
        """Each worker's values of each slot, as of the last step."""
        if self._spmd is not None:
            self._spmd.give_back(self._states, self._slots)
        return self._slots

    def set_state(self, states: PerWorker, slots: PerWorker) -> None:
        """Go on from another state."""
        if self._spmd is not None:
            self._spmd.forget()
        self._states, self._slots = states, slots

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compile(
        self,
        sizes: Sequence[int],
        microbatches: Sequence[Microbatches] | None = None,
        of_all: Sequence[int] = (),
    ) -> None:
        """Compile what every step needs, and the call kernels for the first sizes of this process's workers.

        Args:
          microbatches: compile the kernels of these calls, and none else.
          of_all: the first sizes of all workers, if there are several processes.
        """
        start = time.perf_counter()
        made = ("final", 0, len(self.world.devices) - 1) in self._compiled
        programs = {} if made else self._programs()  # once, so that JAX traces them once for all devices
        jobs: list[Callable[[], None]] = [
            partial(self._compiled.compile, *which, program) for which, program in programs.items()
        ]
        if self._has_several_calls(sizes, microbatches):
            jobs.append(self._compiled.compile_sums)
        whole, of_all = 0, sizes if self.world.processes == 1 else of_all
        if self._spmd is not None and microbatches is None and of_all:
            whole = self._spmd.size_of(of_all)
        if whole and self._spmd is not None and self._spmd.waits:
            jobs.append(partial(self._spmd.compile, whole))
        if microbatches is None:
            jobs.append(partial(self.kernels.require_first, sizes))
        else:
            jobs.append(partial(self.kernels.require_calls, microbatches))
        first = self.kernels.compile_order[0] % len(jobs)  # ranks that share a cache begin with different ones
        side_by_side([*jobs[first:], *jobs[:first]], most=n_cores())
        if self.world.processes > 1:
            self.nothing.prepare()
        self.kernels.counters.waited_seconds += time.perf_counter() - start
        if whole:
            self.kernels.ask_for_step(whole)
        if microbatches is None:
            self.kernels.ask_for_sums()
            self.kernels.extend(max(sizes))

    def _has_several_calls(self, sizes: Sequence[int], microbatches: Sequence[Microbatches] | None) -> bool:
        if microbatches is None:
            return any(size and not self.kernels.is_one_call(size) for size in sizes)
        return any(len(calls) > 1 for calls in microbatches)

    def missing(self, sizes: Sequence[int]) -> int:
        """How many programs `compile` would have to make."""
        sums = len(self._compiled.sums) if self._has_several_calls(sizes, None) else 0
        once = 0 if self._compiled else len(self.plan.onces) + 1 + sums
        return once * len(self.world.devices) + self.kernels.missing(sizes)

    def compiled(self, local: int) -> list[Callable]:
        """The programs of worker `local` of this process but for its call kernels; none before the first step."""
        return [program for (_, _, of), program in list(self._compiled.items()) if of == local]

    def _programs(self) -> dict[tuple[str, int], Compilable]:
        """Return what every step needs and does not depend on sizes, by kind and level."""
        plan, found = self.plan, {}
        for level, segment in plan.onces.items():
            writes = [] if level in plan.calls else [self.layouts[n] for n in plan.sent_at(level)]
            function = segment_function(plan, segment, segment.outputs, self.feed, self.layouts, writes)
            found["once", level] = Compilable(function, (segment_shapes(segment, self.feed, self.layouts),))
        found["final", 0] = self._final_program()
        return found

    def _sums(self) -> dict[tuple[str, int], Compilable]:
        """Return the programs that add up the parts of several calls, by kind and level."""
        plan, found = self.plan, {}
        for level in plan.calls:
            for stage, numbers in enumerate(plan.sent_by_stage(level)):
                sent = [part for number in numbers for part in self.layouts[number].parts]
                if sent:
                    parts = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in sent]
                    added = partial(accumulate, [p.op for p in sent])
                    found[add(stage), level] = Compilable(added, (parts, parts), donate=True)
        return found

    def _final_program(self) -> Compilable:
        final, changed = self.plan.final, set(self.plan.changed_state)
        wanted, n = self.plan.final_outputs, len(self.plan.final_outputs)
        if self.new_nans is not None:
            wanted = (*wanted, *self.new_nans.carriers)
        function = segment_function(self.plan, final, wanted, self.feed, self.layouts, [])
        shapes = segment_shapes(final, self.feed, self.layouts)
        gone = [i in changed for i in final.reads("state")]

        def run(given_up: tuple[list[Any], list[Any]], given: dict[str, Any]) -> Any:
            old, kept = iter(given_up[0]), iter(given["state"])
            state = [next(old if g else kept) for g in gone]
            outputs = function({**given, "state": state, "slot": given_up[1]})["outputs"]
            return outputs if self.new_nans is None else [*outputs[:n], self.new_nans.flags(outputs, outputs[n:])]

        # Only what the step replaces may be overwritten: the first argument, in the order of the results. JAX pairs
        # results with given-up memory of their shape in turn: in another order a result would take the memory of an
        # operand that is still to be read, and XLA would copy that first.
        old = [shape for shape, g in zip(shapes["state"], gone, strict=True) if g]
        kept = [shape for shape, g in zip(shapes["state"], gone, strict=True) if not g]
        split = (old, shapes["slot"]), {**shapes, "state": kept, "slot": []}
        return Compilable(run, split, donate=True)

    def expect(self, sizes: Sequence[int]) -> None:
        """Kernels are going to be asked about these sizes, of all workers: who takes all examples makes more calls."""
        self.kernels.least_calls = self.least_calls_of(max(sizes), sum(sizes))

    def least_calls_of(self, size: int, global_batch: int) -> int:
        """Return how many kernel calls a worker has to make at least of its local batch."""
        return 2 if size == global_batch and self._compares_groups else 1

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(
        self,
        share: Share,
        readings: Sequence[Reading],
        meanwhile: Callable[[], None] = lambda: None,
        microbatches: Sequence[Microbatches] | None = None,
        search: bool = True,
        more: str = "",
    ) -> Outcome:
        """Compute, exchange, and commit.

        Args:
          share: the batches of this process's workers.
          readings: what sources pick from, per worker of this process.
          meanwhile: called once, when the first calls are under way.
          microbatches: each worker's calls; by default those that are cheapest.
          search: whether to find out where values were made that are not finite: it takes seconds.
          more: what to say where processes are in different collectives.
        """
        activity, spmd, heard = self.activity, self._spmd, False
        activity.turn(COMPUTING)
        if microbatches is None and (spmd is None or self.world.processes == 1):
            microbatches = self._cheapest_calls(readings)
        if spmd is not None and spmd.fits(share.sizes, microbatches):
            outcome = spmd(share, readings, microbatches, meanwhile, more)
            if outcome is not None:
                return outcome
            meanwhile, heard = _nothing, True
        if microbatches is None:
            microbatches = self._cheapest_calls(readings)
        run = Step(self, share, readings, microbatches)
        for level in range(self.plan.levels + 1):
            run.once(level)
            run.calls(level)
            if level == 0:
                meanwhile()
            if level == self.plan.levels:
                break
            for stage in range(len(self.plan.sent_by_stage(level))):
                ended = self._exchange(run, level, stage, more, search, heard=heard)
                if ended is not None:
                    return ended
        hooks, metrics = run.commit()
        activity.turn(OTHER)
        return Outcome(hooks, metrics, run.messages, run.seconds, run.microbatches, *run.sent())

    def _cheapest_calls(self, readings: Sequence[Reading]) -> list[Microbatches]:
        return [
            self.kernels.microbatches(i, r.batch_size, self.least_calls_of(r.batch_size, r.global_batch))
            for i, r in enumerate(readings)
        ]

    def _exchange(self, run: Step, level: int, stage: int, more: str, search: bool, *, heard: bool) -> Outcome | None:
        """Send the messages of one stage and take what they bring. Returns the outcome if that ends the step.

        What was sent is referred to here alone, so that its memory, as large as the gradient, is free for the commit.

        Args:
          heard: whether the status of this step is taken already.
        """
        sent = run.wait(level, stage)
        # What the step before has read must be done with before it is written again.
        for result in self._committed:
            result.block_until_ready()
        if self._last in sent:
            self.status.told = self.activity.of_workers(run.seconds)
        self.activity.turn(EXCHANGING)
        under_way = [
            self._send(number, parts, run.readings[0].step + 1, more, run.beside(stage))
            for number, parts in sent.items()
            if run.travels(number)
        ]
        arrived = [(message, *message.arriving.wait()) for message in under_way]
        self.activity.turn(COMPUTING)
        for message, results, status in arrived:
            if message.number == self._last and not heard:
                self.status.decode(status)
            if message.look is not None and not message.look.passes(results[0]):
                run.finish(level)
                return run.given_up(message.number, results[0], search)
            run.messages[message.number] = results
        return None

    def _send(
        self,
        number: int,
        parts: Sequence[Sequence[jax.Array]],
        step: int,
        more: str,
        beside: Callable[[], bool] | None,
    ) -> _UnderWay:
        """Send a message; the step's last one carries the status."""
        own = (self.status.encode() if number == self._last else _NO_STATUS).astype(parts[0][0].dtype)
        about = f"message {number + 1} of step {step} of {self.name}"
        parts = self.nothing.with_gaps(number, parts)
        look = self.looks[number] if self.looks else None
        shown: LookAtPiece | None = None if look is None else look.begin()
        if self.timeline is not None:
            self.timeline.sends(about)
            shown = pieces_on(self.timeline, shown, self.world)
        self.activity.message = number
        arriving = self._channels[number].start(parts, own, about, more, shown, step, beside)
        return _UnderWay(number, arriving, look)

    def seat(self, present: Sequence[int], joined: Sequence[int]) -> None:
        """From the next step on these workers of this process are there, by their places.

        Args:
          joined: those which were not there, or were others. What is replicated they take from one who is; what is
            local begins with them as it began with the program.
        """
        known, before = self.some_present, self.present
        for local in joined:
            device, local_state = self.world.devices[local], self.plan.local_state
            own = local == known  # it has what is replicated from another process, or from a checkpoint

            def taken(leaf: jax.Array, device: jax.Device = device, own: bool = own) -> jax.Array:
                return leaf if own else copied(leaf, device)

            self.states[local] = [
                copied(self._first_local[i], device) if i in local_state else taken(leaf)
                for i, leaf in enumerate(self.states[known])
            ]
            self.slots[local] = [
                [taken(a) for a in values] if slot.scope == Scope.ALL else [copied(a, device) for a in slot.init]
                for slot, values in zip(self.plan.slots, self.slots[known], strict=True)
            ]
        self.present = list(present)
        if self.new_nans is not None:
            origins = [None if local in joined else before.index(local) for local in present]
            self.new_nans.seat(origins, [self.states[local] for local in present])

    def set_slot(self, number: int, value: np.ndarray) -> None:
        """Have a slot of one leaf, which is equal on all workers, hold this from the next step on."""
        for local, device in enumerate(self.world.devices):
            self.slots[local][number] = [copied(value, device)]

    def slot(self, number: int) -> np.ndarray:
        """What such a slot holds; waits for the last step."""
        return np.asarray(self.slots[self.some_present][number][0])

    @property
    def tells(self) -> bool:
        """Whether each step has a message on which a status can ride."""
        return self._last >= 0

    @property
    def some_present(self) -> int:
        """The place of a worker whose replicated state is that of all; of a process in reserve, any."""
        return self.present[0] if self.present else 0

    def first_local(self, i: int) -> jax.Array:
        """Leaf `i` of the state, which is local, as a worker begins with it."""
        return self._first_local[i]

    def made_nans(self) -> Found:
        """Which leaves of the state the last step has filled with NaNs; waits for it."""
        if self.new_nans is None or self.new_nans.none_flagged():
            return NONE_FOUND
        workers = [self.world.workers[local] for local in self.present]
        return self.new_nans.read([self.states[local] for local in self.present], workers)

    def exchange_status(self, about: str, more: str) -> None:
        """A message that carries the status alone."""
        parts = [[jax.device_put(np.zeros(self.status.length, np.float32), d)] for d in self.world.devices]

        def exchange() -> Arrived:
            own = self.status.encode().astype(np.float32)  # anew each time: it depends on how many processes there are
            return self.world.exchange(parts, ["sum"], own, (self.name, "status"), about, more)

        self.status.decode(retry_on_members_changed(exchange)[1])

    def close(self) -> None:
        self.kernels.close()
        if self._waiters:
            self._waiters.shutdown()


def _nothing() -> None: ...


def copied(value: Any, device: jax.Device) -> jax.Array:
    """On the device, in memory of its own. Of numpy arrays `device_put` may take the memory, even if told not to."""
    return jax.device_put(np.array(value) if isinstance(value, np.ndarray) else value, device, may_alias=False)


def pieces_on(timeline: Timeline, look: LookAtPiece | None, world: World) -> LookAtPiece:
    """Has the pieces of a message on a timeline, as they come, beside what else looks at them."""
    began, waited = time.perf_counter(), world.waited

    def note(part: int, start: int, piece: np.ndarray) -> None:
        nonlocal began, waited
        timeline.add(STEPS, f"part {part}", began + world.waited - waited, elements=piece.size, first=start)
        if look is not None:
            look(part, start, piece)
        began, waited = time.perf_counter(), world.waited

    return note


class _UnderWay(NamedTuple):
    """A message that is being exchanged."""

    number: int
    arriving: Arriving
    look: Look | None
