"""What each value of a step is computed from, and in which outputs a difference counts. Read from the graph alone.

One forward pass gives every value a set of tags: the contributions to messages, operator states, examples, sources and
numbers of workers that it is computed from.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from adaptive.base.process.source_lines import at, line_of
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Contribution, Plan
from adaptive.graph.trace import Atom, operands_of
from adaptive.operators.collectives import collective_p
from adaptive.operators.operator_state import state_read_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import EXAMPLES, MICROBATCHES, STEP, WORKERS, source_p

Tags = frozenset[Hashable]
DATA = "data"  # examples, the number of examples in a microbatch (the batch's shape), or per-worker state
_NOTHING: Tags = frozenset()
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class ContributionKey:
    """A contribution: its message's number, and its index in the message."""

    message: int
    index: int


@dataclass(frozen=True)
class Kept:
    """An operator state, by its number in the plan."""

    number: int


@dataclass(frozen=True)
class Counted:
    """A place where the driver reads the number of workers: `ad.num_workers()`, or a sum of equal values."""

    where: str


@dataclass(frozen=True)
class Read:
    """A source, by its name."""

    source: str


@dataclass(frozen=True)
class Whole:
    """The whole part of a constant with a single number."""

    number: int


OF_SPLIT = frozenset({Read(EXAMPLES.name), Read(MICROBATCHES.name)})


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
      named_steps: the integers that the driver compares or combines `ad.step_number()` with, above 1.
    """

    def __init__(self, plan: Plan, outputs: Sequence[Output]):
        self._plan, self._outputs = plan, outputs
        self._sent = {
            c.result: ContributionKey(n, i) for n, message in enumerate(plan.messages) for i, c in enumerate(message)
        }
        self._named: set[Whole] = set()
        graph = plan.graph
        of_data = (*graph.batch_vars, *(graph.state_vars[i] for i in plan.local_state), *(plan.sized & {*graph.consts}))
        self._tags: dict[Var, Tags] = {var: _whole(value) for var, value in graph.consts.items()}
        self._tags.update(dict.fromkeys(of_data, frozenset({DATA})))
        for k, s in enumerate(plan.op_states):
            local = {DATA} if s.scope > Scope.ALL else set()
            self._tags.update(dict.fromkeys(s.values, frozenset({Kept(k), *local})))
        for eqn in graph.eqns:
            if eqn.primitive is not state_read_p:
                self._tags.update(self._of_equation(eqn))
        self.named_steps = sorted(w.number for w in self._named if w.number > 1)

    def of(self, atom: Atom) -> Tags:
        """Return the tags of a value."""
        return self._tags.get(atom, _NOTHING) if isinstance(atom, Var) else _whole(atom.val)

    def _of_equation(self, eqn: JaxprEqn) -> Iterable[tuple[Var, Tags]]:
        if eqn.primitive is assert_scope_p:
            return [(v, self.of(a)) for a, v in zip(eqn.invars, eqn.outvars, strict=True)]
        if eqn.primitive is collective_p:
            pairs = zip(operands_of(eqn), eqn.outvars, strict=False)
            return [(result, self._of_collective(eqn, value, result)) for value, result in pairs]
        if eqn.primitive is source_p:
            name = eqn.params["source"].name
            counted = Counted(f"ad.num_workers(){at(line_of(eqn.source_info))}")
            return [(eqn.outvars[0], frozenset({counted if name == WORKERS.name else Read(name)}))]
        tags = _NOTHING.union(*map(self.of, eqn.invars))
        numbers = {tag for tag in tags if isinstance(tag, Whole)}
        others = tags - numbers
        if self._asks_if_finite(eqn):  # all finite values give the same
            others = frozenset(tag for tag in others if not isinstance(tag, ContributionKey | Counted))
        found: list[tuple[Var, Tags]] = []
        for var in eqn.outvars:
            is_scalar = getattr(var.aval, "shape", None) == ()
            if is_scalar and Read(STEP.name) in others:
                self._named |= numbers
            kept = others or (numbers if is_scalar else _NOTHING)  # of constants alone: `jnp.remainder` converts one
            own = frozenset({DATA}) if var in self._plan.sized else _NOTHING
            found.append((var, own | (kept if is_scalar else kept - {Read(STEP.name)})))
        return found

    def _asks_if_finite(self, eqn: JaxprEqn) -> bool:
        """Return whether all finite values give the same result: `isfinite`, `isnan` (`x != x`) or `isinf`."""
        if eqn.primitive.name not in _COMPARES:
            return eqn.primitive.name == "is_finite"
        a, b = eqn.invars
        return (isinstance(a, Var) and a is b) or any(map(self._is_infinite, (a, b)))

    def _is_infinite(self, atom: Atom) -> bool:
        value = self._plan.graph.consts.get(atom) if isinstance(atom, Var) else atom.val
        return value is not None and _is_number(value) and np.size(value) == 1 and bool(np.isinf(value).all())

    def _of_collective(self, eqn: JaxprEqn, value: Atom, result: Var) -> Tags:
        known = self.of(value)
        if result in self._sent:
            sent = self._sent[result]
            weight = self.contribution(sent).weight
            # A source that only weighs a mean does not make it one over microbatches.
            return known | {sent} | (_NOTHING if weight is None else self.of(weight) - OF_SPLIT)
        if _counts_workers(eqn):
            return known | {Counted(f"{eqn.params['how'].about} of equal values{at(line_of(eqn.source_info))}")}
        return known

    # --- which differences count --------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> list[ContributionKey]:
        """The contributions whose differences count in some output."""
        return [p for p in self._sent.values() if any(self.counts(p, output) for output in self._outputs)]

    def counts(self, place: ContributionKey, output: Output) -> bool:
        """Return whether an output must not depend on a contribution that depends on the split."""
        of = self.of(output.atom)
        unread = output.kind == "op_state" and not self._is_read(output)
        if unread or place not in of:
            return False
        sent, c = self.sent(place), self.contribution(place)
        as_it_is = c.how.shows_workers and output.atom is c.result
        over_calls = bool(sent & OF_SPLIT) and Read(MICROBATCHES.name) in of
        return self.is_state(output) or (DATA in sent and not as_it_is and not over_calls)

    def counted(self, output: Output) -> list[str]:
        """Return where the driver reads the numbers of workers that an output depends on, and must not.

        Metrics and hook values may report the number of workers, but not mix it with the examples' values.
        """
        of = self.of(output.atom)
        if not self.is_state(output) and not (DATA in of and Read(MICROBATCHES.name) not in of):
            return []
        return sorted(tag.where for tag in of if isinstance(tag, Counted))

    def is_of_count(self, place: ContributionKey) -> bool:
        """Return whether a contribution is computed from a number of workers."""
        return any(isinstance(tag, Counted) for tag in self.sent(place))

    def is_state(self, output: Output) -> bool:
        """Return whether an output is state of the driver, or an operator state that such state is computed from."""
        return output.kind == "state" or (output.kind == "op_state" and Kept(output.number) in self._kept_for_state)

    def reaches_state(self, place: ContributionKey) -> bool:
        """Return whether any state depends on a contribution."""
        return any(self.is_state(o) and self.counts(place, o) for o in self._outputs)

    def contribution(self, place: ContributionKey) -> Contribution:
        return self._plan.messages[place.message][place.index]

    def sent(self, place: ContributionKey) -> Tags:
        """Return the tags of a contribution's value, without its weight."""
        return self.of(self.contribution(place).value)

    def label(self, place: ContributionKey) -> str:
        """Return a contribution's name and line, for texts."""
        c = self.contribution(place)
        how = "" if c.how.reduces else f", by {c.how.name}"
        return f"{c.name or 'a value'}{how}{at(c.line)}"

    def _is_read(self, op_state: Output) -> bool:
        others = [o for o in self._outputs if (o.kind, o.number) != (op_state.kind, op_state.number)]
        return any(Kept(op_state.number) in self.of(o.atom) for o in others)

    @cached_property
    def _kept_for_state(self) -> Tags:
        """The operator states that the state of a later step is computed from."""
        found = _NOTHING.union(*(self.of(o.atom) for o in self._outputs if o.kind == "state"))
        while True:
            read = [o for o in self._outputs if o.kind == "op_state" and Kept(o.number) in found]
            more = found.union(*(self.of(o.atom) for o in read))
            if more == found:
                return found
            found = more


def _counts_workers(eqn: JaxprEqn) -> bool:
    """Return whether a collective's result for values that are equal on all workers depends on who takes part."""
    how, value = eqn.params["how"], operands_of(eqn)[0]
    taking_part = jax.ShapeDtypeStruct((eqn.params["capacity"],), np.bool_)
    jaxpr = jax.make_jaxpr(how.of_replicated)(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype), taking_part)
    return any(jaxpr.jaxpr.invars[1] in e.invars for e in jaxpr.jaxpr.eqns)


def _whole(value: Any) -> Tags:
    if np.size(value) != 1 or not _is_number(value):
        return _NOTHING
    number = np.asarray(value).reshape(())
    return frozenset({Whole(int(number))}) if np.isfinite(number) and abs(number) < 2**31 - 2 else _NOTHING


def _is_number(value: Any) -> bool:
    dtype: Any = getattr(value, "dtype", np.asarray(value).dtype)
    return bool(jax.numpy.issubdtype(dtype, np.floating) or jax.numpy.issubdtype(dtype, np.integer))
