"""The schedule of a step: a list of operations, each bound to the places of its arguments and results.

A schedule belongs to one choice of microbatches and members. It is built when one of these changes, and executed in
each step (`host_step.py`). Each worker has one list of values (`WorkerState.values`): first its state, then what the
schedule needs. An operation takes its arguments from places of that list, and puts its results there.

    vectors, constants, neutral values     set when the schedule is built; vectors also when a source changes
    the batch of each microbatch           set when the step begins
    kept values, parts, messages           results of operations; freed when no later operation reads them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from adaptive.base.channel import SentMessage
from adaptive.base.values.arrays import is_key
from adaptive.graph.flow import Scope
from adaptive.operators.sources import FIXED, Reading

from .kernels import Kernel
from .kernels.microbatches import Microbatches
from .message import neutral_parts
from .segment import FLOATS, INTS, START, Address

if TYPE_CHECKING:
    from .step_context import StepContext

Values = list[Any]


def taking(places: Sequence[int]) -> Callable[[Values], Sequence[Any]]:
    """Return a function that returns the values at some places, without a call in Python."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class Range:
    """Adjacent places of one worker's values."""

    def __init__(self, values: Values, start: int, count: int):
        self.values, self.places, self.nothing = values, slice(start, start + count), [None] * count


class BoundProgram(NamedTuple):
    """A compiled program, and the places of its arguments and results."""

    run: Callable[..., list[Any]]
    values: Values
    arguments: Callable[[Values], Sequence[Any]]  # returns the arguments, from the worker's values
    results: slice
    frees: Range | None  # dropped afterwards


class Sent(NamedTuple):
    """A message of a level."""

    number: int
    sent: SentMessage  # filled in each step
    travels: bool  # if not, each worker's own parts are its results
    gate: tuple[Values, int] | None  # where the condition is for sending it; `None` if it is sent in every step
    parts: tuple[list[Values], list[slice]]  # the places of its own parts, by local index
    arrives: tuple[list[Values], list[slice]]  # and of the reduced ones


class Stage(NamedTuple):
    """The operations before the messages of one level, and the messages."""

    operations: list[BoundProgram]
    messages: list[Sent]
    waits: list[tuple[Values, int]]  # the place of a value of each worker that is ready when its parts are
    frees: list[Range]  # the parts, which are dropped when all messages have arrived


class Batch(NamedTuple):
    """Where the examples of one microbatch go."""

    local_index: int
    leaves_of: Callable[[Any], list[Any]]  # returns all leaves of the worker's batch
    takes: Callable[[list[Any]], Sequence[Any]]  # returns the leaves that kernels read, of all
    rows: slice | None  # those of the worker's batch; `None`: all
    place: Range


class Fed(NamedTuple):
    """Where the two vectors of sources of a worker's step go, and what they held when the schedule was built."""

    local_index: int
    values: Values
    place: int  # of the floats; the integers are at the next one
    host: Sequence[np.ndarray]
    device: Sequence[jax.Array]


class Schedule:
    """The operations of a step, in order.

    Args:
      microbatches: sizes, by local index; none for a worker without examples.
      readings, batches: those of the first step, by local index.

    Attributes:
      levels: the operations of each level; the last one has no messages.
      commits: of each present worker the final operation, of whose results the first ones replace the state, and the
        places of local leaves, which a worker without examples keeps.
      seconds: by local index, 0; NaN for a worker without examples.
      frees: everything of the step but the state; dropped when it ends.
    """

    def __init__(
        self,
        ctx: StepContext,
        microbatches: Sequence[Microbatches],
        readings: Sequence[Reading],
        batches: Sequence[Any],
    ):
        self.microbatches, plan, feed = list(microbatches), ctx.plan, ctx.feed
        workers = [_WorkerPlaces(ctx, i, *of) for i, of in enumerate(zip(microbatches, readings, batches, strict=True))]
        self.seconds = [0.0 if of_worker else float("nan") for of_worker in microbatches]
        self.levels = [_level(ctx, level, workers) for level in range(plan.levels + 1)]
        self.commits = [worker.commit() for worker in workers if worker.present]
        self._batches = [batch for worker in workers for batch in worker.batches]
        self._fed = [fed for worker in workers for fed in worker.fed]
        self.frees = [place for worker in workers for place in worker.frees]
        self._is_new = True  # its vectors are those of the first step
        # Sources that change from step to step, and their places in the vectors.
        self._changing = [
            (vector, place, source)
            for vector, sources in enumerate((feed.floats, feed.ints))
            for place, source in enumerate(sources)
            if source not in FIXED
        ]

    def begin(self, readings: Sequence[Reading], batches: Sequence[Any]) -> None:
        """Put a step's examples and changing sources in their places."""
        for local_index, leaves_of, takes, rows, into in self._batches:
            leaves = takes(leaves_of(batches[local_index]))
            into.values[into.places] = leaves if rows is None else [leaf[rows] for leaf in leaves]
        if not self._changing or self._is_new:
            self._is_new = False
            return
        for local_index, values, place, host, device in self._fed:
            vectors = list[Any](device)
            for vector, index, source in self._changing:
                if vectors[vector] is device[vector]:
                    vectors[vector] = host[vector].copy()  # a kernel may still read the old one
                vectors[vector][index] = source.read(readings[local_index])
            values[place : place + 2] = vectors


def _level(ctx: StepContext, level: int, workers: Sequence[_WorkerPlaces]) -> Stage:
    plan, layouts = ctx.plan, ctx.layouts
    operations = [op for worker in workers for op in worker.prologue(level)]
    operations += [op for worker in workers for op in worker.kernels(level)]
    messages, frees, first = list[Sent](), list[Range](), workers[ctx.workers.some_present]
    waits: list[tuple[Values, int]] = []
    for number in plan.sent_at(level):
        message, count = plan.messages[number], len(layouts[number].parts)
        gate = None if message.gate is None else (first.values, first.places["prologue", 0, message.gate])
        parts = [worker.parts_of(number, count) for worker in workers]
        arrives = [worker.temporary([("message", number, i) for i in range(count)]) for worker in workers]
        sent = SentMessage((), np.zeros(0, layouts[number].parts[0].dtype))
        messages.append(Sent(number, sent, message.travels, gate, _apart(parts), _apart(arrives)))
        waits = waits or [(place.values, place.places.start) for place in parts]
        frees += [place for place, worker in zip(parts, workers, strict=True) if worker.microbatches]
    return Stage(operations, messages, waits, frees)


def _apart(places: Sequence[Range]) -> tuple[list[Values], list[slice]]:
    return [place.values for place in places], [place.places for place in places]


class _WorkerPlaces:
    """The places and operations of one worker, while a schedule is built."""

    def __init__(self, ctx: StepContext, local_index: int, microbatches: Microbatches, reading: Reading, batch: Any):
        self._ctx, self._plan = ctx, ctx.plan
        self._local_index, self.microbatches = local_index, microbatches
        self._target = ctx.placements[local_index].target
        self.present = local_index in ctx.workers.present
        self.values: Values = ctx.workers.values[local_index]
        # Of the values of the whole step. Those of several microbatches hide them.
        self.places: dict[Address, int] = dict(ctx.workers.places)
        del self.values[len(self.places) :]
        self.batches: list[Batch] = []
        self.fed: list[Fed] = []
        self.frees: list[Range] = []
        self._own: list[dict[Address, int]] = [{} for _ in microbatches]  # places of each microbatch
        if self.present:
            self._feed(reading)
        if microbatches:
            self._take_batch(batch)

    # --- places -------------------------------------------------------------------------------------------------------

    def _new(self, addresses: Sequence[Address], places: dict[Address, int]) -> Range:
        """Return new places for these addresses, next to each other."""
        start, count = len(self.values), len(addresses)
        places.update(zip(addresses, range(start, start + count), strict=True))
        self.values += [None] * count
        return Range(self.values, start, count)

    def _fixed(self, values: Mapping[Address, Any], places: dict[Address, int]) -> None:
        """Put values in new places, where they stay."""
        place = self._new(list(values), places)
        self.values[place.places] = values.values()

    def _put(self, host: Mapping[Address, Any], places: dict[Address, int]) -> None:
        """Put arrays where the worker computes, and in new places, where they stay."""
        sharding = self._ctx.placements[self._local_index].sharding
        device = jax.device_put(list(host.values()), [sharding(address, x.shape) for address, x in host.items()])
        self._fixed(dict(zip(host, device, strict=True)), places)

    def temporary(self, addresses: Sequence[Address], places: dict[Address, int] | None = None) -> Range:
        """Return new places that are freed at the end of each step."""
        place = self._new(addresses, self.places if places is None else places)
        self.frees.append(place)
        return place

    def parts_of(self, number: int, count: int) -> Range:
        """Return the places of a message's own parts; neutral ones for a worker without examples."""
        if not self.microbatches:
            neutral = neutral_parts(self._ctx.layouts[number])
            self._put({("part", number, i): part for i, part in enumerate(neutral)}, self.places)
        return Range(self.values, self.places["part", number, 0], count)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _feed(self, reading: Reading) -> None:
        """Put the vectors of sources in their places."""
        host = self._ctx.feed.measure(reading, len(self.microbatches))
        device = jax.device_put(list(host), self._target)
        self._fixed(dict(zip((FLOATS, INTS), device, strict=True)), self.places)
        self.fed.append(Fed(self._local_index, self.values, self.places[FLOATS], host, device))

    def _take_batch(self, batch: Any) -> None:
        wanted = sorted({i for segment in self._plan.microbatches.values() for i in segment.reads("batch")})
        addresses: list[Address] = [("batch", i, 0) for i in wanted]
        leaves_of, takes = jax.tree.structure(batch).flatten_up_to, taking(wanted)
        alone, start = len(self.microbatches) == 1, 0
        for size, own in zip(self.microbatches, self._own, strict=True):
            rows = None if alone else slice(start, start + size)
            self.batches.append(Batch(self._local_index, leaves_of, takes, rows, self.temporary(addresses, own)))
            self._fixed({START: jax.device_put(np.int32(start), self._target)}, own)
            start += size

    # --- operations ---------------------------------------------------------------------------------------------------

    def _operation(self, kernel: Kernel, own: dict[Address, int], results: slice) -> BoundProgram:
        places = {**self.places, **own}
        if kernel.call.consts:
            self._fixed(kernel.call.consts, places)
        arguments = taking([places[address] for address in kernel.call.arguments])
        return BoundProgram(kernel.run, self.values, arguments, results, None)

    def prologue(self, level: int) -> Iterator[BoundProgram]:
        """Yield the operation that runs once before the messages of a level, if there is one."""
        if level in self._plan.prologues and self.present:
            kernel = self._ctx.programs["prologue", level, self._local_index]
            yield self._operation(kernel, {}, self.temporary(kernel.call.results).places)

    def kernels(self, level: int) -> Iterator[BoundProgram]:
        """Yield the operations of the microbatches at a level. The parts of further ones are added to the first's."""
        if level not in self._plan.microbatches:
            return
        if self.present and not self.microbatches:
            # In place of a kernel's outputs. Results computed from them are discarded.
            kept = [a.aval for a in self._plan.microbatches[level].outputs]
            # Keys have no numpy dtype.
            zeros = [(jax.lax.full if is_key(aval) else np.full)(aval.shape, 0, aval.dtype) for aval in kept]
            self._put({("microbatch", level, i): value for i, value in enumerate(zeros)}, self.places)
        parts: list[Address] = []
        for n, (size, own) in enumerate(zip(self.microbatches, self._own, strict=True)):
            kernel = self._ctx.kernels.kernel(self._local_index, size, level)
            results = self.temporary(kernel.call.results, own if n else None)
            yield self._operation(kernel, own, results.places)
            parts = [address for address in kernel.call.results if address[0] == "part"]
            if n and parts:
                added = [places[address] for places in (self.places, own) for address in parts]
                into = slice(added[0], added[0] + len(parts))
                frees = Range(self.values, added[len(parts)], len(parts))
                run = self._ctx.programs["add", level, self._local_index].run
                yield BoundProgram(run, self.values, taking(added), into, frees)

    def commit(self) -> tuple[BoundProgram, list[int]]:
        """Return the final operation, and the places of the leaves that the worker keeps."""
        kernel, plan, keeps = self._ctx.programs["final", 0, self._local_index], self._plan, []
        if not self.microbatches:
            local: list[Address] = [("state", i, 0) for i in plan.changed_state if i in plan.local_state]
            local += [a for a in kernel.call.results if a[0] == "op_state" and plan.op_states[a[1]].scope != Scope.ALL]
            keeps = [self.places[address] for address in local]
        return self._operation(kernel, {}, slice(0, self._ctx.workers.replaced)), keeps
