"""Equations as text: equal for two traces of one program, whatever their variables are called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from ._trace import Atom
from ._where import line_of

# Where in memory a function lies, and on which device something is placed, are no part of what is computed.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLACE = re.compile(r"sharding|device|mesh")


class Line(NamedTuple):
    """One equation and what it says."""

    text: str
    eqn: JaxprEqn | None = None

    @property
    def where(self) -> str:
        """Where in the driver it stems from; not cheap, so asked for only where it is told."""
        return line_of(self.eqn.source_info) if self.eqn else ""


def as_text(inputs: Sequence[Var], eqns: Iterable[JaxprEqn], outputs: Sequence[Atom] = ()) -> Iterator[Line]:
    """Equations with their variables numbered, between the shapes of what goes in and the names of what comes out."""
    numbers: dict[Var, int] = {var: i for i, var in enumerate(inputs)}

    def name(atom: Atom) -> str:
        return f"{atom.val!r}:{atom.aval}" if isinstance(atom, Literal) else f"#{numbers[atom]}"

    yield Line(repr([str(var.aval) for var in inputs]))
    for eqn in eqns:
        # The weight of a collective of what is replicated already is never used, so a segment does not hold it.
        operands = [name(atom) for atom in eqn.invars if isinstance(atom, Literal) or atom in numbers]
        params = [(k, _ADDRESS.sub("", repr(v))) for k, v in sorted(eqn.params.items()) if not _PLACE.search(k)]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        results = [str(var.aval) for var in eqn.outvars]
        yield Line(f"{eqn.primitive} {operands} {params} -> {results}", eqn)
    yield Line(repr([name(atom) for atom in outputs]))
