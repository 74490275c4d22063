"""Segments of the plan as JAX functions of named inputs.

Scalars are passed in two vectors, of floats and of integers: a step has a dozen of them, and each argument of a
compiled program costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.values.jaxprs import JaxprEqn, Literal, Var, bind
from adaptive.graph.plan import Plan, Segment
from adaptive.graph.trace import Atom, evaluate
from adaptive.operators.collectives import collective_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import ALONE, EXAMPLES, MICROBATCHES, OFFSET, WORKER, Reading, Source

from .message import LARGE_BYTES, Layout, counts_once, lay_out_all, pack, unpack

# Where a value of a worker's step is: its kind, an index and an item, as in `Origin`. Further kinds are "floats" and
# "ints" (`Feed`), and "start"; "part", a message's own part as the worker has packed it, and "message", the reduced
# one, by number and part; "hook", by number and leaf; and "metric".
Address = tuple[str, Any, int]
FLOATS: Address = ("floats", 0, 0)
INTS: Address = ("ints", 0, 0)
START: Address = ("start", 0, 0)  # of a microbatch: the index of its first example in the worker's batch


@dataclass(frozen=True)
class Feed:
    """The layout of sources in the two vectors of floats and integers that segments receive.

    The integers begin with the worker's number, and end with whether each worker has examples in the step.
    """

    floats: tuple[Source, ...]
    ints: tuple[Source, ...]
    capacity: int

    @staticmethod
    def of(plan: Plan) -> Feed:
        floats = tuple(s for s in plan.sources if np.dtype(s.dtype).kind == "f")
        ints = (WORKER, *(s for s in plan.sources if s not in floats and s.name != WORKER.name))
        return Feed(floats, ints, plan.graph.capacity)

    def measure(self, reading: Reading, n_microbatches: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return both vectors, floats and integers, for a worker's step of `n_microbatches` microbatches."""
        reading = reading._replace(microbatches=n_microbatches)
        floats, ints = ([source.read(reading) for source in sources] for sources in (self.floats, self.ints))
        return np.array(floats, np.float32), np.array([*ints, *reading.taking_part], np.int32)

    def values(self, floats: jax.Array, ints: jax.Array) -> dict[str, jax.Array]:
        """Return the sources of a worker's step, by name."""
        named = {s.name: ints[i] for i, s in enumerate(self.ints)}
        named.update((s.name, floats[i]) for i, s in enumerate(self.floats))
        return named

    def values_of_microbatch(self, floats: jax.Array, ints: jax.Array, examples: int, start: Any) -> dict[str, Any]:
        """Return the sources of the microbatch that begins at example `start` of the worker's batch, by name."""
        named = self.values(floats, ints)
        # Behind a barrier XLA does not know the number, and computes the same for a batch of any size.
        named[EXAMPLES.name] = jax.lax.optimization_barrier(jnp.asarray(examples, EXAMPLES.dtype))
        named[MICROBATCHES.name] = jnp.ones((), MICROBATCHES.dtype)
        if OFFSET.name in named:
            named[OFFSET.name] += start
        return named

    def taking_part(self, ints: jax.Array) -> jax.Array:
        """Return whether each worker has examples in the step; boolean, shape=(capacity,)."""
        return ints[len(self.ints) :] > 0


class SegmentFunction(NamedTuple):
    """A segment as a JAX function of arrays."""

    run: Callable[..., list[Any]]
    arguments: tuple[Address, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the arguments
    results: tuple[Address, ...]
    donated: int = 0  # the number of arguments, from the first on, whose memory results may take
    consts: Mapping[Address, Any] = MappingProxyType({})  # the arrays of the driver's closure that it reads
    result_shapes: tuple[tuple[int, ...], ...] = ()


def segment_function(
    plan: Plan,
    segment: Segment,
    feed: Feed,
    layouts: Sequence[Layout],
    *,
    taken_as: Callable[[Var, Any], Any] = lambda var, value: value,
    as_one: Set[Var] = frozenset(),
) -> SegmentFunction:
    """Return a segment of a plan as a function.

    Args:
      layouts: of the plan's messages.
      taken_as: maps a variable and its computed value to the value that the rest of the segment uses; traced.
      as_one: weights of means that are equal on all workers, so that 1 is used in their place.
    """
    outputs = plan.final_outputs if segment.kind == "final" else segment.outputs
    sent = _sends_of(plan, segment)
    results = final_results(plan) if segment.kind == "final" else _results(segment, len(outputs), layouts, sent)
    shapes = _arguments(segment, feed, layouts, results, sent)
    arguments, donated = tuple(shapes), len(shapes.keys() & set(results))

    def run(*values: Any) -> list[Any]:
        given = dict(zip(arguments, values, strict=True))
        floats, ints = given[FLOATS], given[INTS]
        env = _Values()
        start, taking_part = given.get(START, 0), feed.taking_part(ints)
        if segment.kind == "microbatch":
            scalars = feed.values_of_microbatch(floats, ints, plan.graph.examples, start)
        else:
            scalars = feed.values(floats, ints)
        arrived: dict[int, Callable[[int], jax.Array]] = {}
        for number in segment.read_messages:
            parts = [given["message", number, part] for part in range(len(layouts[number].parts))]
            arrived[number] = unpack(layouts[number], parts, worker=ints[0], taking_part=taking_part)
        for var, origin in segment.inputs:
            if origin.kind == "source":
                env[var] = scalars[origin.index].astype(var.aval.dtype)
            elif origin.kind != "message":
                env[var] = given[origin]
            elif var.aval.size * var.aval.dtype.itemsize >= LARGE_BYTES:
                env.anew[var] = partial(arrived[origin.index], origin.item)
            else:
                env[var] = arrived[origin.index](origin.item)

        def compute(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            return [taken_as(v, x) for v, x in zip(eqn.outvars, apply(eqn, operands, taking_part), strict=True)]

        def value_of(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        def weight_of(atom: Atom) -> Any:
            return np.ones((), atom.aval.dtype) if isinstance(atom, Var) and atom in as_one else value_of(atom)

        evaluate(segment.eqns, env, compute)
        out = [jnp.asarray(value_of(a)) for a in outputs]
        for layout in [layouts[number] for number in sent]:
            contributed = [value_of(c.value) for c in layout.contributions]
            weights = [c.weight if c.weight is None else weight_of(c.weight) for c in layout.contributions]
            out += pack(layout, contributed, weights, worker=ints[0], first=start == 0)
        return out

    result_shapes = [a.aval.shape for a in outputs] + [part.shape for number in sent for part in layouts[number].parts]
    values = list(plan.graph.consts.values())
    consts: dict[Address, Any] = {("const", i, 0): values[i] for i in segment.reads("const")}
    return SegmentFunction(run, arguments, tuple(shapes.values()), results, donated, consts, tuple(result_shapes))


def microbatch_functions(
    plan: Plan, feed: Feed, status: int, *, as_one: Set[Var] = frozenset()
) -> dict[int, SegmentFunction]:
    """Return the segments of a plan that run for each microbatch, by level. `status`: its number of elements."""
    layouts = lay_out_all(plan.messages, capacity=plan.graph.capacity, status=status)
    each = plan.microbatches.items()
    return {level: segment_function(plan, segment, feed, layouts, as_one=as_one) for level, segment in each}


def _sends_of(plan: Plan, segment: Segment) -> Sequence[int]:
    """Return the numbers of the messages that a segment packs."""
    if segment.kind == "final" or (segment.kind == "prologue" and segment.level in plan.microbatches):
        return ()
    return plan.sent_at(segment.level)


def _arguments(
    segment: Segment, feed: Feed, layouts: Sequence[Layout], results: Sequence[Address], sent: Sequence[int]
) -> dict[Address, jax.ShapeDtypeStruct]:
    """Return the addresses and shapes of a segment's arguments: first those that the results replace, in their order.

    JAX assigns donated memory to results of the same shape in order. In another order a result would get the memory of
    an operand that is read later, and XLA would copy that operand first.
    """
    found: dict[Address, jax.ShapeDtypeStruct] = {
        FLOATS: jax.ShapeDtypeStruct((len(feed.floats),), np.float32),
        INTS: jax.ShapeDtypeStruct((len(feed.ints) + feed.capacity,), np.int32),
    }
    once = any(counts_once(c) for number in sent for c in layouts[number].contributions)
    if segment.kind == "microbatch" and (once or any(o[:2] == ("source", OFFSET.name) for _, o in segment.inputs)):
        found[START] = jax.ShapeDtypeStruct((), np.int32)
    for var, origin in segment.inputs:
        if origin.kind not in ("source", "message"):
            found[tuple(origin)] = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
    for number in segment.read_messages:
        for i, part in enumerate(layouts[number].parts):
            found["message", number, i] = jax.ShapeDtypeStruct(part.shape, part.dtype)
    order = {address: n for n, address in enumerate(results)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _results(segment: Segment, count: int, layouts: Sequence[Layout], sent: Sequence[int]) -> tuple[Address, ...]:
    outputs = [(segment.kind, segment.level, i) for i in range(count)]
    return (*outputs, *(("part", number, i) for number in sent for i in range(len(layouts[number].parts))))


def final_results(plan: Plan) -> tuple[Address, ...]:
    """Return the addresses of `Plan.final_outputs`."""
    return (
        *(("state", i, 0) for i in plan.changed_state),
        *(("op_state", k, leaf) for k, s in enumerate(plan.op_states) for leaf in range(len(s.new))),
        *(("hook", n, leaf) for n, hook in enumerate(plan.hooks) for leaf in range(len(hook.values))),
        *(("metric", 0, i) for i in range(len(plan.graph.metrics))),
    )


class _Values(dict[Var, Any]):
    """Values of variables. Large results of messages are computed anew for each use: see `unpack`."""

    def __init__(self) -> None:
        super().__init__()
        self.anew: dict[Var, Callable[[], jax.Array]] = {}

    def __getitem__(self, var: Var) -> Any:
        return self.anew[var]() if var in self.anew else super().__getitem__(var)


def apply(eqn: JaxprEqn, operands: list[Any], taking_part: jax.Array) -> list[Any]:
    """Return an equation's results: traced, or computed if the operands are concrete. See `Feed.taking_part`."""
    if eqn.primitive is assert_scope_p:
        return operands
    if eqn.primitive is collective_p:  # of replicated values: every worker knows the result already
        how = eqn.params["how"]
        values = operands[:-1] if eqn.params["gated"] else operands
        results = [how.of_replicated(jnp.asarray(v), taking_part) for v in values]
        if eqn.params["gated"]:
            alone = [how.of_replicated(jnp.asarray(v), ALONE) for v in values]
            results = [jnp.where(operands[-1], x, own) for x, own in zip(results, alone, strict=True)]
        return results
    return bind(eqn, operands)
