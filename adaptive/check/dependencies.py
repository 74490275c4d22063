"""What each value of a step is computed from, and in which outputs a difference counts. Read from the graph alone.

One forward pass gives every value a set of tags: what it is computed from. A tag is `DATA`, the result variable of a
contribution to a message, the number of an operator state, the name of a source, or `Counted`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import JaxprEqn, Var
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Contribution, Plan
from adaptive.graph.trace import Atom, Graph
from adaptive.operators.collectives import collective_p
from adaptive.operators.operator_state import state_read_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import EXAMPLES, MICROBATCHES, STEP, WORKERS, source_p

Tags = frozenset[Hashable]
DATA = ("examples",)  # also the number of examples in a microbatch (the batch's shape), and per-worker state
OF_SPLIT = frozenset({EXAMPLES.name, MICROBATCHES.name})
_NOTHING: Tags = frozenset()
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")


class Counted(NamedTuple):
    """A place where the driver reads the number of workers: `ad.num_workers()`, or a sum of equal values."""

    where: str


@dataclass(frozen=True)
class Output:
    """A replicated result of a step."""

    kind: str  # state | op_state | hook | metric
    name: str
    number: int  # of the state leaf or operator state
    atom: Atom


class Dependencies:
    """Dependencies of every value of a plan, and of its outputs.

    Attributes:
      contributions: all contributions to messages, by the variable of their result.
      places: the results of those whose differences count in some output.
      trained_by: the results of the reductions of examples on which the state depends.
    """

    def __init__(self, plan: Plan, outputs: Sequence[Output]):
        self._plan, self._outputs = plan, outputs
        self.contributions: dict[Var, Contribution] = {c.result: c for message in plan.messages for c in message}
        graph = plan.graph
        of_data = {*graph.batch_vars, *(graph.state_vars[i] for i in plan.local_state), *plan.sized}
        self._tags: dict[Var, Tags] = dict.fromkeys(of_data, frozenset({DATA}))
        for k, s in enumerate(plan.op_states):
            local = {DATA} if s.scope > Scope.ALL else set()
            self._tags.update(dict.fromkeys(s.values, frozenset({k, *local})))
        for eqn in graph.eqns:
            if eqn.primitive is not state_read_p:
                self._tags.update(self._of_equation(eqn))
        self.places = [p for p in self.contributions if any(self.counts(p, o) for o in outputs)]
        self.trained_by = [
            p
            for p in self.places
            if self.is_reduced_data(p) and any(self.is_state(o) and self.counts(p, o) for o in outputs)
        ]

    def of(self, atom: Atom | None) -> Tags:
        """Return the tags of a value."""
        return self._tags.get(atom, _NOTHING) if isinstance(atom, Var) else _NOTHING

    def _of_equation(self, eqn: JaxprEqn) -> Iterator[tuple[Var, Tags]]:
        if eqn.primitive in (assert_scope_p, collective_p):  # one result for each value
            for value, result in zip(eqn.invars, eqn.outvars, strict=False):
                sent = self.of(value) if eqn.primitive is assert_scope_p else self._of_collective(eqn, value, result)
                yield result, sent
            return
        if eqn.primitive is source_p:
            name = eqn.params["source"].name
            counted = Counted(f"ad.num_workers(){at(line_of(eqn.source_info))}")
            yield eqn.outvars[0], frozenset({counted if name == WORKERS.name else name})
            return
        tags = _NOTHING.union(*map(self.of, eqn.invars))
        if _asks_if_finite(eqn, self._plan.graph):  # all finite values give the same
            tags = frozenset(tag for tag in tags if not isinstance(tag, Var | Counted))
        yield from ((var, tags | self.of(var)) for var in eqn.outvars)  # a value of the batch's shape has tags already

    def _of_collective(self, eqn: JaxprEqn, value: Atom, result: Var) -> Tags:
        known = self.of(value)
        if result in self.contributions:
            # A source that only weighs a mean does not make it one over microbatches.
            return known | {result} | (self.of(self.contributions[result].weight) - OF_SPLIT)
        if _counts_workers(eqn):
            return known | {Counted(f"{eqn.params['how'].about} of equal values{at(line_of(eqn.source_info))}")}
        return known

    # --- which differences count --------------------------------------------------------------------------------------

    def counts(self, place: Var, output: Output) -> bool:
        """Return whether an output must not depend on a contribution that depends on the split."""
        of = self.of(output.atom)
        if place not in of or (output.kind == "op_state" and output.number not in self._read):
            return False
        as_it_is = self.contributions[place].how.shows_workers and output.atom is place
        over_calls = bool(self.sent(place) & OF_SPLIT) and MICROBATCHES.name in of
        return self.is_state(output) or (DATA in self.sent(place) and not as_it_is and not over_calls)

    def counted(self, output: Output) -> list[str]:
        """Return where the driver reads the numbers of workers that an output depends on, and must not.

        Metrics and hook values may report the number of workers, but not mix it with the examples' values.
        """
        of = self.of(output.atom)
        if not self.is_state(output) and not (DATA in of and MICROBATCHES.name not in of):
            return []
        return sorted(tag.where for tag in of if isinstance(tag, Counted))

    def is_of_count(self, place: Var) -> bool:
        """Return whether a contribution is computed from a number of workers."""
        return any(isinstance(tag, Counted) for tag in self.sent(place))

    def is_reduced_data(self, place: Var) -> bool:
        """Return whether a contribution is a reduction of examples."""
        return self.contributions[place].how.reduces and DATA in self.sent(place)

    def is_state(self, output: Output) -> bool:
        """Return whether an output is state of the driver, or an operator state that such state is computed from."""
        return output.kind == "state" or (output.kind == "op_state" and output.number in self._kept_for_state)

    def sent(self, place: Var) -> Tags:
        """Return the tags of a contribution's value, without its weight."""
        return self.of(self.contributions[place].value)

    def label(self, place: Var) -> str:
        """Return a contribution's name and line, for texts."""
        c = self.contributions[place]
        how = "" if c.how.reduces else f", by {c.how.name}"
        return f"{c.name or 'a value'}{how}{at(c.line)}"

    @cached_property
    def _read(self) -> set[int]:
        """The operator states that another output is computed from."""
        own = [(o.number if o.kind == "op_state" else None, self.of(o.atom)) for o in self._outputs]
        return {tag for number, of in own for tag in of if isinstance(tag, int) and tag != number}

    @cached_property
    def _kept_for_state(self) -> Tags:
        """The operator states that the state of a later step is computed from."""
        found, more = None, _NOTHING.union(*(self.of(o.atom) for o in self._outputs if o.kind == "state"))
        while found != more:
            found = more
            read = [o for o in self._outputs if o.kind == "op_state" and o.number in found]
            more = found.union(*(self.of(o.atom) for o in read))
        return more


def named_steps(graph: Graph) -> list[int]:
    """Return the integers above 1 that the driver compares or combines `ad.step_number()` with, in ascending order."""
    numbers: dict[Var, set[int]] = {var: _whole_part(value) for var, value in graph.consts.items()}
    of_step, found = set[Var](), set[int]()
    for eqn in graph.eqns:
        beside = set[int]().union(
            *(numbers.get(a, ()) if isinstance(a, Var) else _whole_part(a.val) for a in eqn.invars)
        )
        scalars = [v for v in eqn.outvars if getattr(v.aval, "shape", None) == ()]
        is_step = eqn.primitive is source_p and eqn.params["source"] is STEP
        if scalars and (is_step or any(isinstance(a, Var) and a in of_step for a in eqn.invars)):
            found |= beside
            of_step.update(scalars)
        elif eqn.invars and all(not isinstance(a, Var) or a in numbers for a in eqn.invars):
            # `jnp.remainder` converts its operands.
            numbers.update(dict.fromkeys(scalars, beside))
    return sorted(n for n in found if n > 1)


def _asks_if_finite(eqn: JaxprEqn, graph: Graph) -> bool:
    """Return whether all finite values give the same result: `isfinite`, `isnan` (`x != x`) or `isinf`."""
    if eqn.primitive.name not in _COMPARES:
        return eqn.primitive.name == "is_finite"
    a, b = eqn.invars
    values = [graph.consts.get(x) if isinstance(x, Var) else x.val for x in (a, b)]
    return (isinstance(a, Var) and a is b) or any(
        _is_number(x) and np.size(x) == 1 and bool(np.isinf(x).all()) for x in values if x is not None
    )


def _counts_workers(eqn: JaxprEqn) -> bool:
    """Return whether a collective's result for values that are equal on all workers depends on who takes part."""
    how, aval = eqn.params["how"], eqn.invars[0].aval
    taking_part = jax.ShapeDtypeStruct((eqn.params["capacity"],), np.bool_)
    jaxpr = jax.make_jaxpr(how.of_replicated)(jax.ShapeDtypeStruct(aval.shape, aval.dtype), taking_part)
    return any(jaxpr.jaxpr.invars[1] in e.invars for e in jaxpr.jaxpr.eqns)


def _whole_part(value: Any) -> set[int]:
    if np.size(value) != 1 or not _is_number(value):
        return set()
    number = np.asarray(value).reshape(())
    return {int(number)} if np.isfinite(number) and abs(number) < 2**31 - 2 else set()


def _is_number(value: Any) -> bool:
    dtype: Any = getattr(value, "dtype", np.asarray(value).dtype)
    return bool(jax.numpy.issubdtype(dtype, np.floating) or jax.numpy.issubdtype(dtype, np.integer))
