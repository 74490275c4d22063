"""Equations as text, which is equal for two traces of one program, whatever the names of variables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.process.source_lines import line_of
from adaptive.base.values.arrays import numbers_of
from adaptive.base.values.jaxprs import JaxprEqn, Literal, Var, closed_within

from .trace import Atom

# A function's address and a value's placement on devices are not part of the computation.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLACE = re.compile(r"sharding|device|mesh")


class EquationText(NamedTuple):
    """One equation and its text."""

    text: str
    eqn: JaxprEqn | None = None

    @property
    def where(self) -> str:
        """The equation's line in the driver; not cheap, so computed only for messages."""
        return line_of(self.eqn.source_info) if self.eqn else ""


def as_text(
    inputs: Sequence[Var],
    eqns: Iterable[JaxprEqn],
    outputs: Sequence[Atom] = (),
    contents: Mapping[Var, str] = MappingProxyType({}),
) -> Iterator[EquationText]:
    """Yield equations as text, with numbered variables, after the inputs' shapes and before the outputs' names.

    Args:
      contents: the contents of known inputs, shown wherever they are used.
    """
    numbers: dict[Var, int] = {var: i for i, var in enumerate(inputs)}

    def name(atom: Atom) -> str:
        return f"{atom.val!r}:{atom.aval}" if isinstance(atom, Literal) else f"#{numbers[atom]}{contents.get(atom, '')}"

    yield EquationText(repr([str(var.aval) for var in inputs]))
    for eqn in eqns:
        # A collective of replicated values does not use its weight, so a segment does not compute it.
        operands = [name(atom) for atom in eqn.invars if isinstance(atom, Literal) or atom in numbers]
        params = params_text(eqn)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        results = [str(var.aval) for var in eqn.outvars]
        yield EquationText(f"{eqn.primitive} {operands} {params} -> {results}", eqn)
    yield EquationText(repr([name(atom) for atom in outputs]))


def params_text(eqn: JaxprEqn) -> str:
    """Return an equation's parameters as text, including arrays that nested jaxprs close over."""
    texts = [(k, _ADDRESS.sub("", repr(v))) for k, v in sorted(eqn.params.items()) if not _PLACE.search(k)]
    return repr((texts, [content(c) for nested in closed_within(eqn.params) for c in nested.consts]))


def content(value: Any) -> bytes:
    """Return a digest of all bits of an array."""
    array = numbers_of(value)
    return digest(str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())


def digest(*parts: Any) -> bytes:
    """Return a digest of bytes, and of other objects as Python writes them."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
        found.update(b"|")
    return found.digest()
