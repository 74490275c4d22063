"""Equations as text: equal for two traces of one program, whatever their variables are called."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from adaptive.base.jaxprs import closed_within
from adaptive.base.source_lines import line_of

from .trace import Atom

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


def as_text(
    inputs: Sequence[Var],
    eqns: Iterable[JaxprEqn],
    outputs: Sequence[Atom] = (),
    contents: Mapping[Var, str] = MappingProxyType({}),
) -> Iterator[Line]:
    """Equations with their variables numbered, between the shapes of what goes in and the names of what comes out.

    Args:
      contents: what is in inputs that are known: told wherever they are used.
    """
    numbers: dict[Var, int] = {var: i for i, var in enumerate(inputs)}

    def name(atom: Atom) -> str:
        return f"{atom.val!r}:{atom.aval}" if isinstance(atom, Literal) else f"#{numbers[atom]}{contents.get(atom, '')}"

    yield Line(repr([str(var.aval) for var in inputs]))
    for eqn in eqns:
        # The weight of a collective of what is replicated already is never used, so a segment does not hold it.
        operands = [name(atom) for atom in eqn.invars if isinstance(atom, Literal) or atom in numbers]
        params = params_text(eqn)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        results = [str(var.aval) for var in eqn.outvars]
        yield Line(f"{eqn.primitive} {operands} {params} -> {results}", eqn)
    yield Line(repr([name(atom) for atom in outputs]))


def params_text(eqn: JaxprEqn) -> str:
    """Return what an equation says beside its operands; of jaxprs in it, the arrays that they close over too."""
    texts = [(k, _ADDRESS.sub("", repr(v))) for k, v in sorted(eqn.params.items()) if not _PLACE.search(k)]
    consts = [np.asarray(c) for nested in closed_within(eqn.params) for c in nested.consts]
    return repr((texts, [(str(c.dtype), c.shape, hash_of(c.tobytes())) for c in consts]))


def hash_of(text: bytes) -> str:
    """Return a short digest of a text."""
    return hashlib.blake2b(text, digest_size=8).hexdigest()
