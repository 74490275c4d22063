"""One step, carried out: segments and messages in the order of the plan, for all workers of this process.

The engine holds the workers' state and knows nothing of hooks, sizes or epochs. Its promise is rule 5: a step commits
whole or not at all. Buffers of the old state are given to XLA only by the final segment, which starts when every
message of the step has arrived and none of them brought bad news: from another worker, or of values that are not
finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from ._birthplace import birthplace
from ._compile import compile_segment
from ._data import Share
from ._finite import Culprit, Look, Trouble, find_together
from ._kernels import Kernels, Stopwatch, Traced
from ._message import Layout, accumulate, lay_out, unpack
from ._pieces import Pieces
from ._plan import Plan, Segment
from ._segment import Feed, segment_function
from ._updates import NONE_FOUND, Found, NewNaNs
from ._world import World
from .operators import CALLS, Reading, source_p

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
    pieces: list[Pieces]  # per worker of this process
    messages: int
    message_bytes: int
    trouble: Trouble | None = None  # why the step was not committed

    @property
    def committed(self) -> bool:
        return self.trouble is None


class Engine:
    """Carries out steps of one plan.

    Args:
      plan_for: traces and plans the driver for a number of examples.
      plan: the plan for some size; all but the call segments is taken from it.
      state: leaves of the initial state, on the host or any device. Copied.
      tail: elements of each message that are the caller's.
      kernels: how to compile and choose call kernels; see `Kernels`.
      finite: whether what is not finite keeps a step from being committed.
      name: the program's, to tell its messages from those of others in this world.
    """

    def __init__(
        self,
        plan_for: Callable[[int], Plan],
        plan: Plan,
        state: Sequence[Any],
        world: World,
        *,
        tail: int,
        kernels: dict[str, Any],
        finite: bool = False,
        name: str = "",
    ):
        self.plan, self.world, self._plan_for = plan, world, plan_for
        self.feed = Feed.of(plan)
        self.layouts: list[Layout] = [lay_out(m, workers=world.size, tail=tail) for m in plan.messages]
        self._bytes = np.cumsum([0, *(layout.nbytes for layout in self.layouts)]).tolist()  # of the first messages
        self.looks = [Look(layout, world.devices[0].platform) for layout in self.layouts] if finite else []
        # A noise scale needs two groups of examples at least; a lone worker makes them by splitting its batch.
        self.least_calls = 2 if world.size == 1 and any(s.name == CALLS.name for s in plan.sources) else 1
        self.kernels = Kernels(
            self._trace_calls, world.devices, splittable=plan.splittable, least_calls=self.least_calls, **kernels
        )
        self.states: PerWorker = [[copied(leaf, d) for leaf in state] for d in world.devices]
        self.slots: PerWorker = [[[copied(a, d) for a in s.init] for s in plan.slots] for d in world.devices]
        self.new_nans = NewNaNs(plan, self.states) if finite else None
        self._waiters = ThreadPoolExecutor(len(world.devices)) if len(world.devices) > 1 else None
        self._committed: list[jax.Array] = []  # one result of the last step's final segment, per worker of this process
        self._compiled: dict[tuple[str, int, int], Callable] = {}
        self.name = name
        self._channels = [(name, level) for level in range(len(self.layouts))]
        # What the driver closed over, on each device, for the segments that are compiled once.
        values = list(plan.graph.consts.values())
        self.consts = {
            (s.kind, s.level, local): [self.kernels.constants.on(device, values[i]) for i in s.reads("const")]
            for s in (*plan.onces.values(), plan.final)
            for local, device in enumerate(world.devices)
        }

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compile(self, sizes: Sequence[int], pieces: Sequence[Pieces] | None = None) -> None:
        """Compile what every step needs, and the call kernels for the first sizes of this process's workers.

        Args:
          pieces: compile the kernels of these calls, and none else.
        """
        start = time.perf_counter()
        for local, device in enumerate(self.world.devices):
            if ("final", 0, local) in self._compiled:
                continue
            twin = self.world.devices.index(device)
            if twin < local:  # stand-ins on one device share their programs
                of_twin = {key: run for key, run in self._compiled.items() if key[2] == twin}
                self._compiled.update({(kind, level, local): run for (kind, level, _), run in of_twin.items()})
                continue
            for level, segment in self.plan.onces.items():
                writes = self.layouts[level] if level < len(self.layouts) and level not in self.plan.calls else None
                function = segment_function(self.plan, segment, segment.outputs, self.feed, self.layouts, writes)
                self._compiled["once", level, local] = compile_segment(
                    function, (self._shapes(self.plan, segment),), device, name=f"once_{level}"
                )
            self._compiled["final", 0, local] = self._compile_final(device)
            for level in self.plan.calls:
                if level < len(self.layouts):
                    parts = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self.layouts[level].parts]
                    add = partial(accumulate, self.layouts[level].ops)
                    self._compiled["add", level, local] = compile_segment(
                        add, (parts, parts), device, name=f"add_{level}", donate=True
                    )
        self.kernels.counters.waited_seconds += time.perf_counter() - start
        if pieces is None:
            self.kernels.require(sizes)
        else:
            self.kernels.require_calls(pieces)

    def _compile_final(self, device: jax.Device) -> Callable:
        final, changed = self.plan.final, set(self.plan.changed_state)
        wanted, n = self.plan.final_outputs, len(self.plan.final_outputs)
        if self.new_nans is not None:
            wanted = (*wanted, *self.new_nans.carriers)
        function = segment_function(self.plan, final, wanted, self.feed, self.layouts, None)
        shapes = self._shapes(self.plan, final)
        # Only what the step replaces may be overwritten.
        self._given_up = [i in changed for i in final.reads("state")]
        self._kept = [not gone for gone in self._given_up]

        def run(given_up: tuple[list[Any], list[Any]], given: dict[str, Any]) -> Any:
            old, kept = iter(given_up[0]), iter(given["state"])
            state = [next(old) if gone else next(kept) for gone in self._given_up]
            outputs = function({**given, "state": state, "slot": given_up[1]})["outputs"]
            return outputs if self.new_nans is None else [*outputs[:n], self.new_nans.flags(outputs, outputs[n:])]

        return compile_segment(run, self._split_final(shapes), device, name="final", donate=True)

    def _split_final(self, given: dict[str, Any]) -> tuple[tuple[list[Any], list[Any]], dict[str, Any]]:
        """What the final segment may overwrite, in the order of its results, and what it may not.

        JAX pairs results with given-up memory of their shape in turn: in another order a result would take the memory
        of an operand that is still to be read, and XLA would copy that first.
        """
        given_up = (list(compress(given["state"], self._given_up)), given["slot"])
        return given_up, {**given, "state": list(compress(given["state"], self._kept)), "slot": []}

    def _trace_calls(self, size: int) -> Traced:
        plan = self._plan_for(size)
        layouts = [
            lay_out(m, workers=old.workers, tail=old.tail) for m, old in zip(plan.messages, self.layouts, strict=True)
        ]
        traced: Traced = {}
        for level, segment in plan.calls.items():
            writes = layouts[level] if level < len(layouts) else None
            function = segment_function(plan, segment, segment.outputs, self.feed, layouts, writes)
            values = list(plan.graph.consts.values())
            traced[level] = (function, self._shapes(plan, segment), tuple(values[i] for i in segment.reads("const")))
        return traced

    def _shapes(self, plan: Plan, segment: Segment) -> dict[str, Any]:
        """The shapes of a segment's inputs, in the form that it takes them."""
        shapes: dict[str, Any] = {kind: [] for kind in ("state", "slot", "const", "batch", "once", "call")}
        for var, origin in segment.inputs:
            if origin.kind in shapes:
                shapes[origin.kind].append(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
        shapes["floats"] = jax.ShapeDtypeStruct((1 + len(self.feed.floats),), np.float32)
        shapes["ints"] = jax.ShapeDtypeStruct((len(self.feed.ints),), np.int32)
        shapes["message"] = [
            [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self.layouts[level].parts]
            for level in segment.message_levels
        ]
        return shapes

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(
        self,
        share: Share,
        readings: Sequence[Reading],
        speak: Callable[[], np.ndarray],
        listen: Callable[[np.ndarray], None],
        meanwhile: Callable[[], None] = lambda: None,
        pieces: Sequence[Pieces] | None = None,
        search: bool = True,
        more: str = "",
    ) -> Outcome:
        """Compute, exchange, and commit.

        Args:
          share: the batches of this process's workers.
          readings: what sources pick from, per worker of this process.
          speak: makes this process's tail.
          listen: takes the reduced tail; raises what ends the run.
          meanwhile: called once, when the first calls are under way.
          pieces: each worker's calls; by default those that are cheapest.
          search: whether to find out where values were made that are not finite: it takes seconds.
          more: what to say where processes are in different collectives.
        """
        if pieces is None:
            pieces = [self.kernels.pieces(i, r.batch_size, self.least_calls) for i, r in enumerate(readings)]
        run = _Step(self, share, readings, pieces)
        last = len(self.layouts)
        for level in range(last + 1):
            run.once(level)
            run.calls(level)
            if level == 0:
                meanwhile()
            if level == last:
                break
            parts = run.wait(level)
            # What the step before has read must be done with before it is written again.
            for result in self._committed:
                result.block_until_ready()
            own = speak().astype(parts[0][0].dtype)
            about = f"message {level + 1} of step {readings[0].step + 1} of {self.name}"
            results, tail = self.world.exchange(parts, self.layouts[level].ops, own, self._channels[level], about, more)
            listen(tail)
            if self.looks and not self.looks[level].passes(results[0]):
                return run.given_up(level, results[0], search)
            run.messages[level] = results
        hooks, metrics = run.commit()
        return Outcome(hooks, metrics, run.messages, run.seconds, run.pieces, last, self._bytes[last])

    def made_nans(self) -> Found:
        """Which leaves of the state the last step has filled with NaNs; waits for it."""
        return NONE_FOUND if self.new_nans is None else self.new_nans.read(self.states, self.world.workers)

    def signal(self, tail: np.ndarray, about: str, more: str) -> np.ndarray:
        """Exchange nothing but a tail."""
        parts = [[jax.device_put(np.zeros(len(tail), np.float32), d)] for d in self.world.devices]
        return self.world.exchange(parts, ["sum"], tail.astype(np.float32), self._channels[0], about, more)[1]

    def close(self) -> None:
        self.kernels.close()
        if self._waiters:
            self._waiters.shutdown()


def copied(value: Any, device: jax.Device) -> jax.Array:
    """On the device, in memory of its own. Of numpy arrays `device_put` may take the memory, even if told not to."""
    return jax.device_put(np.array(value) if isinstance(value, np.ndarray) else value, device, may_alias=False)


class _Step:
    """What is known in the course of one step."""

    def __init__(self, engine: Engine, share: Share, readings: Sequence[Reading], pieces: Sequence[Pieces]):
        self.engine, self.plan, self.share, self.readings = engine, engine.plan, share, readings
        self.locals = range(len(readings))
        self.pieces = list(pieces)
        self.timed = [engine.kernels.wants_each_timed(i, p) for i, p in zip(self.locals, self.pieces, strict=True)]
        self.vectors = [
            engine.feed.measure(r if len(p) == 1 else r._replace(calls=len(p)))
            for r, p in zip(readings, self.pieces, strict=True)
        ]
        self.messages: dict[int, list[list[jax.Array]]] = {}
        self.kept_once: dict[int, PerWorker] = {}
        self.kept_calls: dict[int, PerWorker] = {}  # per worker, per call
        self.packed: PerWorker = [[] for _ in readings]  # the parts of the message in the making
        self.seconds = [0.0 for _ in readings]
        self._started = 0.0
        self._watch = Stopwatch(engine.world.devices[0])
        self._undisturbed = 0.0
        self._one_by_one: list[dict[int, list[float]]] = [{} for _ in readings]

    def _given(self, local: int, segment: Segment, call: int = 0) -> dict[str, Any]:
        """A segment's inputs, but for the two vectors, the constants and the batch."""
        state, slots, wiring = self.engine.states[local], self.engine.slots[local], segment.wiring
        return {
            "state": [state[i] for i, _ in wiring["state"]],
            "slot": [slots[k][leaf] for k, leaf in wiring["slot"]],
            "once": [self.kept_once[level][local][i] for level, i in wiring["once"]],
            "call": [self.kept_calls[level][local][call][i] for level, i in wiring["call"]],
            "message": [self.messages[level][local] for level in segment.message_levels],
        }

    def _whole(self, local: int, segment: Segment) -> dict[str, Any]:
        """All inputs of a segment that does not touch the batch."""
        floats, ints = self.vectors[local]
        consts = self.engine.consts[segment.kind, segment.level, local]
        return {**self._given(local, segment), "floats": floats, "ints": ints, "batch": [], "const": consts}

    def once(self, level: int) -> None:
        segment = self.plan.onces.get(level)
        if segment is None:
            return
        self._start()
        self.kept_once[level] = []
        for local in self.locals:
            given = self._whole(local, segment)
            out = self.engine._compiled["once", level, local](given)
            self.kept_once[level].append(out["outputs"])
            if "parts" in out:
                self.packed[local] = out["parts"]

    def _start(self) -> None:
        self._started, self._watch = time.perf_counter(), Stopwatch(self.engine.world.devices[0])

    def calls(self, level: int) -> None:
        segment = self.plan.calls.get(level)
        if segment is None:
            return
        if level not in self.plan.onces:
            self._start()
        self.kept_calls[level] = [self._calls_of(local, level, segment) for local in self.locals]

    def _calls_of(self, local: int, level: int, segment: Segment) -> list[list[jax.Array]]:
        engine, start, kept, parts = self.engine, 0, [], None
        leaves = jax.tree.leaves(self.share.batches[local])
        wanted = [leaves[i] for i in segment.reads("batch")]
        fixed = None if self.kept_calls else self._given(local, segment)
        for number, size in enumerate(self.pieces[local]):
            watch = Stopwatch(engine.world.devices[local])
            given = dict(fixed) if fixed is not None else self._given(local, segment, number)
            alone = len(self.pieces[local]) == 1
            given["batch"] = wanted if alone else [leaf[start : start + size] for leaf in wanted]
            given["floats"], given["ints"] = (
                self.vectors[local] if alone else self._for_call(local, number, start, size)
            )
            kernel = engine.kernels.kernel(local, size, level)
            given["const"] = list(kernel.consts)
            out = kernel.run(given)
            kept.append(out["outputs"])
            if "parts" in out:
                new = out["parts"]
                parts = new if parts is None else engine._compiled["add", level, local](parts, new)
            if self.timed[local]:
                jax.block_until_ready((parts, out["outputs"]))
                self._one_by_one[local].setdefault(size, []).append(watch.seconds)
            start += size
        self.packed[local] = parts
        return kept

    def _for_call(self, local: int, number: int, start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The two vectors, as one of several calls sees them."""
        reading = self.readings[local]
        reading = reading._replace(examples=size, calls=1, offset=reading.offset + start)
        return self.engine.feed.for_call(self.vectors[local], reading, first=number == 0)

    def wait(self, level: int) -> list[list[jax.Array]]:
        """Until every worker's parts are computed: the parts."""
        if self.engine._waiters is None:
            done = [self._wait_for(0)]
        else:
            done = list(self.engine._waiters.map(self._wait_for, self.locals))
        for local in self.locals:
            self.seconds[local] += done[local] - self._started
        self._undisturbed += self._watch.seconds
        if level == max((n for n in self.plan.calls if n < len(self.plan.messages)), default=-1):
            self._record()
        return list(self.packed)

    def _wait_for(self, local: int) -> float:
        self.packed[local][0].block_until_ready()
        return time.perf_counter()

    def _record(self) -> None:
        for local, pieces in enumerate(self.pieces):
            if len(set(pieces)) == 1:
                self.engine.kernels.record(local, pieces[0], min(self.seconds[local], self._undisturbed) / len(pieces))
            elif len(self.plan.calls) == 1:
                for size, times in self._one_by_one[local].items():
                    self.engine.kernels.record(local, size, min(times))

    def given_up(self, level: int, reduced: Sequence[jax.Array], search: bool) -> Outcome:
        """The end of a step whose message `level` is not finite. All processes come here: they saw the same."""
        engine, message = self.engine, self.engine.plan.messages[level]
        look = engine.looks[level]
        own: list[Culprit] = []
        for local, worker in enumerate(engine.world.workers):
            numbers = look.of_worker(self.packed[local])
            if numbers:
                origin = self._origin(local, level, numbers) if search and not own else ""
                own.append(Culprit(worker, tuple(numbers), origin))
        trouble = find_together(engine.world, message, look.of_all(reduced), own)
        seconds = self.seconds if level == len(engine.layouts) - 1 else [float("nan")] * len(self.seconds)
        return Outcome([], [], {}, seconds, self.pieces, level + 1, engine._bytes[level + 1], trouble)

    def _origin(self, local: int, level: int, numbers: Sequence[int]) -> str:
        """Where the values of a worker were made that are not finite, as far as that can be found."""
        start = 0
        try:
            for call, size in enumerate(self.pieces[local]):
                plan = self.engine._plan_for(size)
                ends = [a for i in numbers for a in (plan.messages[level][i].value, plan.messages[level][i].weight)]
                known = self._known(plan, local, level, call, start)
                found = birthplace(plan, known, [a for a in ends if a is not None])
                if found:
                    return found
                start += size
        except Exception as error:  # the others wait to hear whose values they are
            return f"it could not be found out where they come from: {type(error).__name__}: {error}".rstrip(".")
        return "each is finite, but its product with the weight, or the sum over kernel calls, is not"

    def _known(self, plan: Plan, local: int, level: int, call: int, start: int) -> dict[Var, Any]:
        """What a kernel call was given, by the variables of its graph."""
        engine, graph, size = self.engine, plan.graph, self.pieces[local][call]
        alone = len(self.pieces[local]) == 1
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
        for earlier in range(level):
            results = [c.result for c in plan.messages[earlier]]
            parts = self.messages[earlier][local]
            known.update(zip(results, unpack(engine.layouts[earlier], parts, range(len(results))), strict=True))
        return known

    def commit(self) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        """Run the final segment and take its results as the workers' state."""
        engine, plan = self.engine, self.plan
        results = []
        for local in self.locals:
            given = self._whole(local, plan.final)
            results.append(engine._compiled["final", 0, local](*engine._split_final(given)))
        engine._committed = [outputs[0] for outputs in results if outputs]
        for local, outputs in enumerate(results):
            take, state = iter(outputs), engine.states[local]
            for i in plan.changed_state:
                state[i] = next(take)
            engine.slots[local] = [list(islice(take, len(s.new))) for s in plan.slots]
            if local == 0:
                hooks = [list(islice(take, len(h.values))) for h in plan.hooks]
                metrics = list(islice(take, len(plan.graph.metrics)))
        if engine.new_nans is not None:
            engine.new_nans.committed([outputs[-1] for outputs in results])
        return hooks, metrics
