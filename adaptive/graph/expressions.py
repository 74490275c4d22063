"""Digests of how each value of a driver is computed, which show whether two traces differ, and which values depend on
the batch's shape.

A driver is traced once for each kernel size, and `len(batch)` is a literal in each trace, like any other number; only a
comparison with another trace tells them apart. So every value gets an *expression*: a digest of the operations by which
it is computed from the driver's inputs and from the results of collectives. Values with equal expressions in two traces
are the same function of the same inputs. A value whose expression is missing in the other trace is *sized*: it depends
on the number of examples for which the driver was traced, the size of one microbatch.

*Ends* are the places where values leave the graph: into collectives, hooks and operator states, to the host, as the new
state and as metrics. Two traces have the same ends in the same order, so these are compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from adaptive.base.errors import DriverError
from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import JaxprEqn, Literal, Var, nested_equations
from adaptive.operators.collectives import Collective, collective_p
from adaptive.operators.hooks import Hook
from adaptive.operators.operator_state import state_read_p
from adaptive.operators.sources import source_p

from .flow import at_home
from .text import content, digest, params_text
from .trace import OPERATORS, Atom, Graph, describe


class Expressions:
    """The expressions of a graph's values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._of: dict[Var, bytes] = {}
        for kind, variables in (("state", graph.state_vars), ("batch", graph.batch_vars)):
            self._of.update((v, digest(kind, i, str(v.aval))) for i, v in enumerate(variables))
        self._of.update((var, digest("const", content(value))) for var, value in graph.consts.items())
        operators = {collective_p: 0, state_read_p: 0}
        for eqn in graph.eqns:
            if eqn.primitive is source_p:
                names: list[Any] = ["source", eqn.params["source"].name]
            elif eqn.primitive in operators:  # its results are identified by its index among equations of its kind
                operators[eqn.primitive] += 1
                names = [eqn.primitive.name, operators[eqn.primitive]]
            else:
                names = [eqn.primitive.name, params_text(eqn), *map(self.of, eqn.invars)]
            names.append([str(v.aval) for v in eqn.outvars])
            whole = digest(*names)
            self._of.update((v, digest(whole, i)) for i, v in enumerate(eqn.outvars))

    def of(self, atom: Atom) -> bytes:
        """Return a value's expression."""
        if isinstance(atom, Literal):
            return digest("literal", str(atom.aval), content(atom.val))
        return self._of[atom]

    def missing_in(self, other: Expressions) -> set[Var]:
        """Return the variables whose expressions no value of another graph has."""
        there = set(other._of.values())
        return {var for var, expression in self._of.items() if expression not in there}

    def ends(self) -> Iterator[End]:
        """Return the places where values leave the graph, in order."""
        outside = at_home(self.graph)
        for number, eqn in enumerate(self.graph.eqns):
            if eqn.primitive in OPERATORS and eqn.primitive is not source_p:
                yield End(describe(eqn), tuple(eqn.invars), eqn)
            elif number in outside:
                yield End(eqn.primitive.name, tuple(eqn.invars), eqn)
        yield End("what is returned", tuple(self.graph.outvars), None)


class End(NamedTuple):
    """Values that leave the graph at one place."""

    what: str
    atoms: tuple[Atom, ...]
    eqn: JaxprEqn | None

    @property
    def collective(self) -> Collective | None:
        """The collective, if this end is one."""
        return self.eqn.params["how"] if self.eqn is not None and self.eqn.primitive is collective_p else None

    @property
    def functions(self) -> tuple:
        """The Python functions of a hook or of callbacks, including callbacks within a loop."""
        if self.eqn is None:
            return ()
        within = (self.eqn, *nested_equations(self.eqn))
        found = (e.params.get(name) for e in within for name in ("hook", "callback"))
        return tuple(r for f in found if f is not None for r in (_behind(f) if isinstance(f, Hook) else (f,)))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [a.aval.shape for a in self.atoms]

    @property
    def where(self) -> str:
        return line_of(self.eqn.source_info) if self.eqn is not None else ""


def _behind(hook: Hook) -> Iterable[Any]:
    """Return the function or policy that a hook's handler holds."""
    return vars(hook.handler).values() if hasattr(hook.handler, "__dict__") else (hook.handler,)


def check_same_operators(ours: Expressions, theirs: Expressions) -> None:
    """Check that two traces of a driver have the same collectives, hooks, operator states and effects, in order."""
    for one, other in zip_longest(ours.ends(), theirs.ends()):
        if one is None or other is None or (one.what, len(one.atoms)) != (other.what, len(other.atoms)):
            there = next(end for end in (other, one) if end is not None and end.eqn is not None)
            raise another_program(ours.graph, theirs.graph, there.where)


def sized(ours: Expressions, theirs: Expressions) -> frozenset[Var]:
    """Return the values of a trace that depend on its number of examples, as another trace shows."""
    found = ours.missing_in(theirs)
    # A number of the shape may equal another literal by chance. Ends are compared one by one, which finds those.
    for one, other in zip(ours.ends(), theirs.ends(), strict=True):
        pairs = zip(one.atoms, other.atoms, strict=True)
        found |= {a for a, b in pairs if isinstance(a, Var) and ours.of(a) != theirs.of(b)}
    return frozenset(found)


def another_program(ours: Graph, theirs: Graph, where: str, how: str = "") -> DriverError:
    """Return the error for a driver that computes something else for another number of examples."""
    return DriverError(
        f"driver {ours.name!r}{at(where)} is another program for {theirs.examples} examples than for {ours.examples}"
        f"{how}. Messages, hook values, and values computed once per step must not depend on the batch's shape, for "
        "instance by a Python `if`. A number taken from the shape, such as len(batch), is the size of one microbatch "
        "of one worker. Use instead:\n"
        "    ad.global_batch()      all examples of the step\n"
        "    ad.batch_size()        this worker's\n"
        "    ad.microbatch_size()   those of this microbatch"
    )


def first_difference(ours: Expressions, a: Atom, theirs: Expressions, b: Atom) -> str | None:
    """Return the line of the driver at which two values first differ, or "" if unknown; None if they are equal."""
    if ours.of(a) == theirs.of(b):
        return None
    line = ""
    while isinstance(a, Var) and isinstance(b, Var):
        one, other = ours.graph.producer.get(a), theirs.graph.producer.get(b)
        if one is None or other is None:
            break
        line = line_of(other.source_info) or line_of(one.source_info) or line
        if one.primitive is not other.primitive or len(one.invars) != len(other.invars) or one.primitive in OPERATORS:
            break
        pairs = zip(one.invars, other.invars, strict=True)
        deeper = next(((x, y) for x, y in pairs if ours.of(x) != theirs.of(y)), None)
        if deeper is None:
            break
        a, b = deeper
    return line
