"""What each value of a step is computed from, and in which outputs a difference counts. Read from the graph alone.

One forward pass gives every value a set of tags: `DATA`, the result variable of a contribution to a message, the number
of an operator state, the name of a source, or `Counted`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
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


class Counted(NamedTuple):
    """A place where the driver reads the number of workers: `ad.num_workers()`, or a sum of equal values."""

    where: str


class Output(NamedTuple):
    """A replicated result of a step."""

    kind: str  # state | op_state | hook | metric
    name: str
    number: int  # of the state leaf or operator state
    atom: Atom


def outputs_of(plan: Plan) -> list[Output]:
    """Return all replicated outputs of the driver: state, operator states, hook values, metrics."""
    graph = plan.graph
    found = [Output("state", graph.state_names[i], i, graph.new_state[i]) for i in compared(plan)]
    found += [Output("op_state", f"operator state {s.name!r}", k, a) for k, s in shared(plan) for a in s.new]
    for n, h in enumerate(plan.hooks):
        paths, _ = jax.tree.flatten_with_path(jax.tree.unflatten(h.hook.tree, h.values))
        found += [Output("hook", f"hook {h.hook.name!r}, values{jax.tree_util.keystr(p)}", n, a) for p, a in paths]
    labels = zip(graph.metric_labels, graph.metrics, strict=False)  # there are more; see `widened`
    return found + [Output("metric", label, n, a) for n, (label, a) in enumerate(labels)]


def compared(plan: Plan) -> list[int]:
    return [i for i in plan.changed_state if i not in plan.local_state]


def shared(plan: Plan) -> list[tuple[int, Any]]:
    """Return the replicated operator states, with their numbers."""
    return [(k, s) for k, s in enumerate(plan.op_states) if s.scope == Scope.ALL]


class Dependencies:
    """Dependencies of every value of a plan, and of its outputs."""

    def __init__(self, plan: Plan):
        # All contributions to messages, by the variable of their result.
        self.contributions: dict[Var, Contribution] = {c.result: c for message in plan.messages for c in message}
        graph, outputs = plan.graph, outputs_of(plan)
        of_data = {*graph.batch_vars, *(graph.state_vars[i] for i in plan.local_state), *plan.sized}
        self._tags: dict[Var, Tags] = dict.fromkeys(of_data, frozenset({DATA}))
        for k, s in enumerate(plan.op_states):
            self._tags.update(dict.fromkeys(s.values, frozenset({k, DATA} if s.scope > Scope.ALL else {k})))
        for eqn in graph.eqns:
            if eqn.primitive is not state_read_p:
                self._tags.update(self._of_equation(eqn))
        self._kept_for_state = _NOTHING.union(*(self.of(o.atom) for o in outputs if o.kind == "state"))
        for _ in plan.op_states:
            read = [self.of(o.atom) for o in outputs if o.kind == "op_state" and self.is_state(o)]
            self._kept_for_state = self._kept_for_state.union(*read)
        # The results of those whose differences count in some output.
        self.places = [p for p in self.contributions if any(self.counts(p, o) for o in outputs)]

    def of(self, atom: Atom | None) -> Tags:
        return self._tags.get(atom, _NOTHING) if isinstance(atom, Var) else _NOTHING

    def _of_equation(self, eqn: JaxprEqn) -> Iterator[tuple[Var, Tags]]:
        if eqn.primitive is source_p:
            name, where = eqn.params["source"].name, at(line_of(eqn.source_info))
            yield eqn.outvars[0], frozenset({Counted(f"ad.num_workers(){where}") if name == WORKERS.name else name})
        elif eqn.primitive in (assert_scope_p, collective_p):  # one result for each value
            for value, result in zip(eqn.invars, eqn.outvars, strict=False):
                added = self._combined(eqn, result) if eqn.primitive is collective_p else _NOTHING
                yield result, self.of(value) | added
        else:
            tags = _NOTHING.union(*map(self.of, eqn.invars))
            is_nan = eqn.primitive.name == "ne" and eqn.invars[0] is eqn.invars[1]
            if is_nan or eqn.primitive.name == "is_finite":  # all finite values give the same
                tags = frozenset(tag for tag in tags if not isinstance(tag, Var | Counted))
            yield from ((var, tags | self.of(var)) for var in eqn.outvars)  # a value of the batch's shape has tags

    def _combined(self, eqn: JaxprEqn, result: Var) -> Tags:
        """Return the tags that a collective adds to those of its value."""
        if result in self.contributions:
            # A source that only weighs a mean does not make it one over microbatches.
            return (self.of(self.contributions[result].weight) - OF_SPLIT) | {result}
        counts = f"{eqn.params['how'].about} of equal values{at(line_of(eqn.source_info))}"
        return frozenset({Counted(counts)} if _counts_workers(eqn) else ())

    def counts(self, place: Var, output: Output) -> bool:
        """Return whether an output must not depend on a contribution that depends on the split.

        Metrics and hook values may show values without examples, gathered rows as they are, and statistics over
        microbatches, which read the number of microbatches.
        """
        of, sent = self.of(output.atom), self.sent(place)
        as_it_is = self.contributions[place].how.shows_workers and output.atom is place
        over_calls = bool(sent & OF_SPLIT) and MICROBATCHES.name in of
        return place in of and (self.is_state(output) or (DATA in sent and not as_it_is and not over_calls))

    def counted(self, output: Output) -> list[str]:
        """Return where the driver reads the numbers of workers that an output depends on, and must not.

        Metrics and hook values may report the number of workers, but not mix it with the examples' values.
        """
        of = self.of(output.atom)
        if not self.is_state(output) and not (DATA in of and MICROBATCHES.name not in of):
            return []
        return sorted(tag.where for tag in of if isinstance(tag, Counted))

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
        c = self.contributions[place]
        return f"{c.name or 'a value'}{'' if c.how.reduces else f', by {c.how.name}'}{at(c.line)}"


def named_steps(graph: Graph) -> list[int]:
    """Return the integers above 1 that the driver compares or combines `ad.step_number()` with, in ascending order."""
    numbers: dict[Var, set[int]] = {var: _whole_part(value) for var, value in graph.consts.items()}
    of_step, found = set[Var](), set[int]()
    for eqn in graph.eqns:
        parts = [numbers.get(a) if isinstance(a, Var) else _whole_part(a.val) for a in eqn.invars]
        beside = set[int]().union(*filter(None, parts))
        scalars = [v for v in eqn.outvars if getattr(v.aval, "shape", None) == ()]
        is_step = eqn.primitive is source_p and eqn.params["source"] is STEP
        if scalars and (is_step or not of_step.isdisjoint(a for a in eqn.invars if isinstance(a, Var))):
            found |= beside
            of_step.update(scalars)
        elif eqn.invars and None not in parts:  # `jnp.remainder` converts its operands
            numbers.update(dict.fromkeys(scalars, beside))
    return sorted(n for n in found if n > 1)


def _whole_part(value: Any) -> set[int]:
    dtype: Any = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    is_number = jax.numpy.issubdtype(dtype, np.floating) or jax.numpy.issubdtype(dtype, np.integer)
    number = float(np.asarray(value).reshape(())) if is_number and np.size(value) == 1 else np.nan
    return {int(number)} if abs(number) < 2**31 - 2 else set()


def _counts_workers(eqn: JaxprEqn) -> bool:
    """Return whether a collective's result for values that are equal on all workers depends on who takes part."""
    how, aval = eqn.params["how"], eqn.invars[0].aval
    taking_part = jax.ShapeDtypeStruct((eqn.params["capacity"],), np.bool_)
    jaxpr = jax.make_jaxpr(how.of_replicated)(jax.ShapeDtypeStruct(aval.shape, aval.dtype), taking_part)
    return any(jaxpr.jaxpr.invars[1] in e.invars for e in jaxpr.jaxpr.eqns)
