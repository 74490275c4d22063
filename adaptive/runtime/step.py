"""What is known in the course of one step, and what comes of it: calls, their stages, and the final segment.

Whoever conducts it is the engine. A stage may be done while the thread of the steps is in an exchange, so its end is
noted by another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from adaptive.data.stream import Share
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Plan, Segment
from adaptive.operators.sources import Reading, source_p

from .birthplace import birthplace
from .finite import Culprit, Trouble, find_together
from .message import unpack
from .microbatches import Microbatches
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from .engine import Engine

PerWorker = list  # one entry per worker of this process


@dataclass
class Outcome:
    """What a step brought. Hook values and metrics are replicated, on the first worker's device."""

    hooks: list[list[jax.Array]]
    metrics: list[jax.Array]
    reduced: dict[
        int, list[list[jax.Array]]
    ]  # by message and worker of this process: the parts; valid until the next step
    compute_seconds: list[float]  # per worker of this process; NaN where the step ended before its last message
    microbatches: list[Microbatches]  # per worker of this process
    messages: int
    message_bytes: int
    trouble: Trouble | None = None  # why the step was not committed

    @property
    def committed(self) -> bool:
        return self.trouble is None


def add(stage: int) -> str:
    """What the program is called that adds up the parts that a stage writes."""
    return f"add_{stage + 1}" if stage else "add"


class _End(NamedTuple):
    """When a stage was done."""

    at: float
    undisturbed: float  # seconds since the level began, as if nobody else ran there


class Step:
    """What is known in the course of one step."""

    def __init__(self, engine: Engine, share: Share, readings: Sequence[Reading], microbatches: Sequence[Microbatches]):
        # A step is timed from here on: what it takes to make several calls is part of their price.
        self._watch, self._began = Stopwatch(engine.world.devices[0]), time.perf_counter()
        self.engine, self.plan, self.share, self.readings = engine, engine.plan, share, readings
        self.locals = range(len(readings))
        self.microbatches = list(microbatches)  # none for a worker without examples
        choices = [engine.kernels.choice(local) for local in self.locals]
        self._chosen = [c.timed and c.microbatches is p for c, p in zip(choices, self.microbatches, strict=True)]
        self.one_by_one = [t and c.one_by_one for t, c in zip(self._chosen, choices, strict=True)]
        self.vectors: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for local in engine.present:
            r, p = readings[local], self.microbatches[local]
            self.vectors[local] = engine.feed.measure(r if len(p) == 1 else r._replace(calls=len(p)))
        self.messages: dict[int, list[list[jax.Array]]] = {}
        self._sent: list[int] = []  # their numbers
        self.kept_once: dict[int, dict[int, Any]] = {}  # by level, and worker that is there
        self.kept_calls: dict[int, dict[int, list[Any]]] = {}  # by level, and worker that is there; per call
        self.packed: PerWorker = [[] for _ in readings]  # the parts of the messages in the making, in their order
        self.seconds = [0.0 if p else float("nan") for p in self.microbatches]
        self._ends: list[list[Future[_End]]] = []  # of a level's stages, by stage and worker
        self._started = 0.0
        self._before = 0.0  # seconds before the first call
        self._undisturbed = 0.0  # seconds of all of them together, as if nobody else ran there
        # By worker of this process: seconds of its calls, by their size and level.
        self._call_seconds: list[dict[tuple[int, int], list[float]]] = [{} for _ in readings]

    def _given(self, local: int, segment: Segment, call: int = 0) -> dict[str, Any]:
        """A segment's inputs, but for the two vectors, the constants and the batch."""
        engine, inputs = self.engine, self.engine._inputs[segment.kind, segment.level]
        given = inputs.of_state(engine.states[local], engine.slots[local])
        if inputs.in_step:
            given["once"] = [self.kept_once[level][local][i] for level, i in inputs.once]
            given["call"] = [self.kept_calls[level][local][call][i] for level, i in inputs.call]
            given["message"] = [self.messages[number][local] for number in inputs.messages]
        return given

    def _whole(self, local: int, segment: Segment) -> dict[str, Any]:
        """All inputs of a segment that does not touch the batch."""
        given = self._given(local, segment)
        given["floats"], given["ints"] = self.vectors[local]
        given["const"] = self.engine.consts[segment.kind, segment.level, local]
        given["batch"] = []
        return given

    def once(self, level: int) -> None:
        segment = self.plan.onces.get(level)
        if segment is None:
            return
        self._start()
        self.kept_once[level] = {}
        for local in self.engine.present:
            given, began = self._whole(local, segment), time.perf_counter()
            out = self.engine._compiled["once", level, local](given)
            self._trace(local, f"once, before message {level + 1}", began, out)
            self.kept_once[level][local] = out["outputs"]
            if "parts" in out:
                self.packed[local] = out["parts"]

    def _trace(self, local: int, name: str, began: float, results: Any, **details: Any) -> None:
        """Where a timeline is kept, wait for what was begun, and note how long it took."""
        if self.engine.timeline is not None:
            jax.block_until_ready(results)
            self.engine.timeline.add(local, name, began, **details)

    def _start(self) -> None:
        now = time.perf_counter()
        if self._started:
            self._watch = Stopwatch(self.engine.world.devices[0])
        else:
            self._before = now - self._began
        self._started = now

    def calls(self, level: int) -> None:
        segment = self.plan.calls.get(level)
        if segment is None:
            return
        if level not in self.plan.onces:
            self._start()
        self.kept_calls[level] = {
            local: self._calls_of(local, level, segment)
            if self.microbatches[local]
            else [self.engine.nothing.kept(level, local)]
            for local in self.engine.present
        }

    def _calls_of(self, local: int, level: int, segment: Segment) -> list[list[jax.Array]]:
        engine, microbatches, start, kept = self.engine, self.microbatches[local], 0, []
        alone, timed = len(microbatches) == 1, self.one_by_one[local]
        leaves = jax.tree.leaves(self.share.batches[local])
        wanted = [leaves[i] for i in engine._inputs["call", level].batch]
        fixed = None if self.kept_calls else self._given(local, segment)
        parts: dict[int, list[jax.Array]] = {}  # by stage
        for number, size in enumerate(microbatches):
            watch = Stopwatch(engine.world.devices[local]) if timed else None
            given = self._given(local, segment, number) if fixed is None else fixed  # what follows is set in each call
            given["batch"] = wanted if alone else [leaf[start : start + size] for leaf in wanted]
            given["floats"], given["ints"] = (
                self.vectors[local] if alone else self._for_call(local, number, start, size)
            )
            kernel = engine.kernels.kernel(local, size, level)
            given["const"] = list(kernel.consts)
            began, brought = time.perf_counter(), []
            for stage, out in enumerate(kernel.stages(given)):
                brought.append(out)
                if "parts" in out:  # added before the next stage is dispatched: devices carry out one after another
                    old, new = parts.get(stage), out.pop("parts")
                    parts[stage] = new if old is None else engine._compiled[add(stage), level, local](old, new)
                    del old, new  # so that the next call's parts can take that memory
            if engine._waiters is None:  # else calls are under way on several devices, or stages of one
                self._trace(local, f"{size} examples", began, (parts, brought), level=level)
            kept.append(kernel.outputs(brought))
            if watch is not None:
                jax.block_until_ready((parts, kept[-1]))
                self._call_seconds[local].setdefault((size, level), []).append(watch.seconds)
            start += size
        self.packed[local] = [part for stage in sorted(parts) for part in parts[stage]]
        return kept

    def _for_call(self, local: int, number: int, start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The two vectors, as one of several calls sees them."""
        reading = self.readings[local]
        reading = reading._replace(examples=size, calls=1, offset=reading.offset + start)
        return self.engine.feed.for_call(self.vectors[local], reading, first=number == 0)

    def wait(self, level: int, stage: int = 0) -> dict[int, list[list[jax.Array]]]:
        """Until every worker's parts are computed that a stage of this level writes: those of each message, by its
        number.
        """
        sent = self.plan.sent_by_stage(level)
        if stage == 0:
            for local, microbatches in enumerate(self.microbatches):
                if not microbatches:
                    self.packed[local] = self.engine.nothing.parts(level, local)
            self._ends = self._wait_beside(sent)
        for done in self._ends[stage]:
            done.result()
        if stage == len(sent) - 1:
            self.finish(level)
        return {number: [self._of_message(number, local) for local in self.locals] for number in sent[stage]}

    def _wait_beside(self, sent: Sequence[Sequence[int]]) -> list[list[Future[_End]]]:
        """Have it noted when each stage is done on each worker: in other threads, as this one may be in an exchange."""
        firsts = [self.engine._places[numbers[0]].start for numbers in sent]
        if self.engine._waiters is not None:
            return [[self.engine._waiters.submit(self._wait_for, i, first) for i in self.locals] for first in firsts]
        done: Future[_End] = Future()
        done.set_result(self._wait_for(0, firsts[0]))
        return [[done]]

    def _wait_for(self, local: int, part: int) -> _End:
        self.packed[local][part].block_until_ready()
        return _End(time.perf_counter(), self._watch.seconds)

    def beside(self, stage: int) -> Callable[[], bool] | None:
        """For what is sent behind a stage: whether this process still computes a later one; `None` behind the last."""
        if not self._ends[stage + 1 :]:
            return None
        last = self._ends[-1]
        return lambda: not all(end.done() for end in last)

    def finish(self, level: int) -> None:
        """Wait for all stages of a level, and take down, once, how long they took."""
        ends, self._ends = [[end.result() for end in of_workers] for of_workers in self._ends], []
        if not ends:
            return
        for local in self.locals:
            self.seconds[local] += ends[-1][local].at - self._started
            if self.engine._waiters is not None and self.microbatches[local]:
                self._trace_stages(local, level, [of_workers[local].at for of_workers in ends])
        self._undisturbed += max(end.undisturbed for end in ends[-1])
        if level == self.engine._last_call:
            self._record()

    def _trace_stages(self, local: int, level: int, ends: Sequence[float]) -> None:
        timeline, began = self.engine.timeline, self._started
        if timeline is None:
            return
        name = f"{' + '.join(map(str, self.microbatches[local]))} examples"
        for number, end in enumerate(ends, 1):
            which = f", stage {number} of {len(ends)}" if len(ends) > 1 else ""
            timeline.add(local, name + which, began, max(began, end), level=level)
            began = max(began, end)

    def travels(self, number: int) -> bool:
        """Whether a message is sent in this step. What is not stays as each worker has it: its results, too."""
        message = self.plan.messages[number]
        goes = message.travels
        if goes and message.gate is not None:
            goes = bool(self.kept_once[0][self.engine.some_present][message.gate])
        if goes:
            self._sent.append(number)
        else:
            self.messages[number] = [self._of_message(number, local) for local in self.locals]
        return goes

    def sent(self) -> tuple[int, int]:
        """How many messages this step has sent so far, and their bytes."""
        return len(self._sent), sum(self.engine.layouts[number].nbytes for number in self._sent)

    def _of_message(self, number: int, local: int) -> list[jax.Array]:
        """The parts of one message that a worker has packed, of those of the level."""
        return self.packed[local][self.engine._places[number]]

    def _record(self) -> None:
        kernels = self.engine.kernels
        for local in self.locals:
            if self.one_by_one[local]:
                at_best: dict[int, float] = {}
                for (size, _level), times in self._call_seconds[local].items():
                    at_best[size] = at_best.get(size, 0.0) + min(times)
                for size, seconds in at_best.items():
                    kernels.record(local, size, seconds)
            elif self._chosen[local]:
                kernels.record_step(local, min(self._before + self.seconds[local], self._undisturbed))

    def take_over(
        self, packed: list[jax.Array], messages: dict[int, list[list[jax.Array]]], sent: Sequence[int], seconds: float
    ) -> None:
        """Take over a step of one worker that a `SteadyStep` has begun, and that is to be `given_up`.

        Args:
          packed: the parts of all messages.
          messages: what has arrived, by message.
          sent: the numbers of the messages that were sent.
          seconds: of the kernel call.
        """
        self.packed, self.messages, self._sent, self.seconds = [packed], messages, list(sent), [seconds]

    def given_up(self, number: int, reduced: Sequence[jax.Array], search: bool) -> Outcome:
        """The end of a step whose message `number` is not finite. All processes come here: they saw the same."""
        engine, message = self.engine, self.engine.plan.messages[number]
        look = engine.looks[number]
        own: list[Culprit] = []
        for local, worker in enumerate(engine.world.workers):
            found = look.of_worker(self._of_message(number, local)) if self.microbatches[local] else []
            if found:
                origin = self._origin(local, number, found) if search and not own else ""
                own.append(Culprit(worker, tuple(found), origin))
        trouble = find_together(engine.world, message.contributions, look.of_all(reduced), own)
        seconds = self.seconds if message.level == self.plan.levels - 1 else [float("nan")] * len(self.seconds)
        return Outcome([], [], {}, seconds, self.microbatches, *self.sent(), trouble)

    def _origin(self, local: int, message: int, numbers: Sequence[int]) -> str:
        """Where the values of a worker were made that are not finite, as far as that can be found."""
        start, taking_part = 0, jnp.asarray(self.readings[local].taking_part)
        try:
            for call, size in enumerate(self.microbatches[local]):
                plan = self.engine.plans(size)
                sent = [plan.messages[message][i] for i in numbers]
                ends = [a for c in sent for a in (c.value, c.weight)]
                known = self._known(plan, local, plan.messages[message].level, call, start)
                found = birthplace(plan, known, [a for a in ends if a is not None], taking_part)
                if found:
                    return found
                start += size
        except Exception as error:  # the others wait to hear whose values they are
            return f"it could not be found out where they come from: {type(error).__name__}: {error}".rstrip(".")
        return "each is finite, but its product with the weight, or the sum over kernel calls, is not"

    def _known(self, plan: Plan, local: int, level: int, call: int, start: int) -> dict[Var, Any]:
        """What a kernel call was given, by the variables of its graph."""
        engine, graph, size = self.engine, plan.graph, self.microbatches[local][call]
        alone = len(self.microbatches[local]) == 1
        vectors = self.vectors[local] if alone else self._for_call(local, call, start, size)
        scalars = engine.feed.values(*map(jnp.asarray, vectors))
        known = dict(zip(graph.state_vars, engine.states[local], strict=True)) | graph.consts
        leaves = [leaf[start : start + size] for leaf in jax.tree.leaves(self.share.batches[local])]
        known.update(zip(graph.batch_vars, leaves, strict=True))
        for slot, values in zip(plan.slots, engine.slots[local], strict=True):
            known.update(zip(slot.values, values, strict=True))
        for eqn in graph.eqns:
            if eqn.primitive is source_p and eqn.params["source"].name in scalars:
                known[eqn.outvars[0]] = scalars[eqn.params["source"].name].astype(eqn.outvars[0].aval.dtype)
        for earlier in (number for number, m in enumerate(plan.messages) if m.level < level):
            results = [c.result for c in plan.messages[earlier]]
            parts = self.messages[earlier][local]
            arrived = unpack(engine.layouts[earlier], parts, range(len(results)), worker=vectors[1][0])
            known.update(zip(results, arrived, strict=True))
        return known

    def _own(self, local: int) -> tuple[dict[int, jax.Array], dict[int, list[jax.Array]]]:
        """Copies of what is this worker's own, in state and slots: it stays where the worker computes nothing."""
        engine, plan = self.engine, self.plan
        return (
            {i: jnp.copy(engine.states[local][i]) for i in plan.changed_state if i in plan.local_state},
            {
                k: [jnp.copy(a) for a in engine.slots[local][k]]
                for k, slot in enumerate(plan.slots)
                if slot.scope != Scope.ALL
            },
        )

    def commit(self) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        """Run the final segment and take its results as the workers' state."""
        engine, final, found = self.engine, self.plan.final, self.engine._results
        self.packed = []  # what was sent is as large as the gradient: its memory is free for the final segment
        own = {local: self._own(local) for local in engine.present if not self.microbatches[local]}
        results = []
        for local in engine.present:
            given, state = self._whole(local, final), engine.states[local]
            given_up = [state[i] for i in found.overwritten], given["slot"]
            given["state"], given["slot"] = [state[i] for i in found.read_only], []
            began = time.perf_counter()
            results.append(engine._compiled["final", 0, local](given_up, given))
            self._trace(local, "final", began, results[-1])
        engine._committed = [outputs[0] for outputs in results if outputs]
        for local, outputs in zip(engine.present, results, strict=True):
            state, slots = engine.states[local], [outputs[place] for place in found.slots]
            for i, new in zip(self.plan.changed_state, outputs, strict=False):  # first come the state's
                state[i] = new
            engine.slots[local] = slots
            if local in own:
                own_leaves, own_slots = own[local]
                for i, leaf in own_leaves.items():
                    state[i] = leaf
                for k, values in own_slots.items():
                    slots[k] = values
        if engine.new_nans is not None:
            engine.new_nans.committed([outputs[-1] for outputs in results])
        first = results[0]
        return [first[place] for place in found.hooks], first[found.metrics]
