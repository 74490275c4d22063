"""Segments of the plan as JAX functions of named inputs.

Scalars are passed in two vectors, of floats and of integers: a step has a dozen of them, and each argument of a
compiled program costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from adaptive.base.jaxprs import bind
from adaptive.graph.plan import Plan, Segment
from adaptive.graph.trace import Atom, operands_of
from adaptive.operators.collectives import collective_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import ALONE, WORKER, Reading, Source

from .message import LARGE_BYTES, Layout, pack, unpack_per_use

# Elementwise operations and reductions of optimizers and monitors, which are cheap to fuse with a preceding division.
_FUSED = {"abs", "add", "add_any", "convert_element_type", "div", "integer_pow", "is_finite", "max", "min", "mul"}
_FUSED |= {"assert_scope", "neg", "pow", "reduce_sum", "select_n", "sign", "sqrt", "square", "sub"}


@dataclass(frozen=True)
class Feed:
    """The layout of sources in the two vectors of floats and integers that segments receive.

    The vectors always include `first` (1 in the first microbatch of a worker's step, else 0), the worker's number, and,
    at the end of the integers, whether each worker has examples in the step, which collectives of replicated values
    need.
    """

    floats: tuple[Source, ...]
    ints: tuple[Source, ...]
    capacity: int

    @staticmethod
    def of(plan: Plan) -> Feed:
        floats = tuple(s for s in plan.sources if np.dtype(s.dtype).kind == "f")
        ints = (WORKER, *(s for s in plan.sources if s not in floats and s.name != WORKER.name))
        return Feed(floats, ints, plan.graph.capacity)

    def measure(self, reading: Reading) -> tuple[np.ndarray, np.ndarray]:
        """Return both vectors, floats and integers, at the start of a worker's step."""
        floats, ints = np.empty(len(self.floats) + 1, np.float32), np.empty(len(self.ints) + self.capacity, np.int32)
        floats[0] = 1.0
        for i, source in enumerate(self.floats, 1):
            floats[i] = source.read(reading)
        for i, source in enumerate(self.ints):
            ints[i] = source.read(reading)
        ints[len(self.ints) :] = reading.taking_part
        return floats, ints

    def measure_step(self, reading: Reading, n_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Return both vectors for a worker's step of `n_microbatches` microbatches."""
        return self.measure(reading if n_microbatches == 1 else reading._replace(microbatches=n_microbatches))

    def for_microbatch(
        self, vectors: Sequence[np.ndarray], reading: Reading, start: int, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both vectors for one of several microbatches. Sources of scope "microbatch" are read again.

        Args:
          vectors, reading: the vectors and the reading of the worker's step.
          start: index of the microbatch's first example in the worker's batch.
        """
        reading = reading._replace(examples=size, microbatches=1, offset=reading.offset + start)
        floats, ints = vectors[0].copy(), vectors[1].copy()
        floats[0] = not start
        for vector, sources, start in ((floats, self.floats, 1), (ints, self.ints, 0)):
            for i, source in enumerate(sources, start):
                if source.scope == "microbatch":
                    vector[i] = source.read(reading)
        return floats, ints

    def values(self, floats: jax.Array, ints: jax.Array) -> dict[str, jax.Array]:
        named = {s.name: ints[i] for i, s in enumerate(self.ints)}
        named.update((s.name, floats[i]) for i, s in enumerate(self.floats, 1))
        return named

    def taking_part(self, ints: jax.Array) -> jax.Array:
        """Return whether each worker has examples in the step; boolean, shape=(capacity,)."""
        return ints[len(self.ints) :] > 0


def segment_function(
    segment: Segment,
    outputs: Sequence[Atom],
    feed: Feed,
    layouts: Sequence[Layout],
    writes: Sequence[Layout],
    taken_as: Callable[[Var, Any], Any] = lambda var, value: value,
    as_one: Set[Var] = frozenset(),
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a segment as a JAX function of one dict: lists by kind of input ("state", "op_state", "const", "batch",
    "message", "prologue", "microbatch"), each in the order of the segment's inputs; and the vectors "floats" and
    "ints".
    "message" holds the parts of the messages that the segment reads (`Segment.read_messages`).

    The function returns `{"outputs": […]}`, and "parts" if it writes messages: those of all messages, concatenated.

    Args:
      taken_as: maps a variable and its computed value to the value that the rest of the segment uses; traced.
      as_one: weights of means that are equal on all workers, so that 1 is used in their place.
    """
    eqns, uses = segment.eqns, _separate_uses(segment, outputs)

    def run(given: dict[str, Any]) -> dict[str, Any]:
        env: dict[Var, Any] = {}
        per_use: dict[Var, list[jax.Array]] = {}  # values for the remaining uses of a message's result
        scalars, taking_part = feed.values(given["floats"], given["ints"]), feed.taking_part(given["ints"])
        at = dict.fromkeys(given, 0)
        results: dict[int, Iterator[list[jax.Array]]] = {}
        for number, parts in zip(segment.read_messages, given["message"], strict=True):
            read = [(o.item, uses.get(var, 1)) for var, o in segment.inputs if o[:2] == ("message", number)]
            items, counts = [item for item, _ in read], [count for _, count in read]
            results[number] = iter(unpack_per_use(layouts[number], parts, items, counts, worker=given["ints"][0]))
        for var, origin in segment.inputs:
            if origin.kind == "source":
                env[var] = scalars[origin.index].astype(var.aval.dtype)
            elif origin.kind == "message":
                env[var], *again = next(results[origin.index])
                per_use[var] = again
            else:
                env[var] = given[origin.kind][at[origin.kind]]
                at[origin.kind] += 1

        def value_of(atom: Atom) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            again = per_use.get(atom)
            return again.pop() if again else env[atom]

        def weight_of(atom: Atom) -> Any:
            return np.ones((), atom.aval.dtype) if isinstance(atom, Var) and atom in as_one else value_of(atom)

        for eqn in eqns:
            results_of = evaluate(eqn, [value_of(a) for a in operands_of(eqn)], taking_part)
            env.update((v, taken_as(v, x)) for v, x in zip(eqn.outvars, results_of, strict=True))
        out: dict[str, Any] = {"outputs": [jnp.asarray(value_of(a)) for a in outputs]}
        for layout in writes:
            values = [value_of(c.value) for c in layout.contributions]
            weights = [c.weight if c.weight is None else weight_of(c.weight) for c in layout.contributions]
            parts = pack(layout, values, weights, worker=given["ints"][0], first=given["floats"][0])
            out["parts"] = [*out.get("parts", ()), *parts]
        return out

    return run


def _separate_uses(segment: Segment, outputs: Sequence[Atom]) -> dict[Var, int]:
    """Return the number of uses of each large result of a message whose uses can all be fused with its division."""
    large = {
        var: 0
        for var, origin in segment.inputs
        if origin.kind == "message" and var.aval.size * var.aval.dtype.itemsize >= LARGE_BYTES
    }
    for eqn in segment.eqns:
        for atom in operands_of(eqn):
            if isinstance(atom, Var) and atom in large:
                large[atom] += 1
                if eqn.primitive.name not in _FUSED:
                    del large[atom]
    return {var: count for var, count in large.items() if count > 1 and var not in outputs}


def evaluate(eqn: JaxprEqn, operands: list[Any], taking_part: jax.Array) -> list[Any]:
    """Return an equation's results: traced, or computed if the operands are concrete.

    Args:
      taking_part: see `Feed.taking_part`.
    """
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
