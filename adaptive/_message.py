"""What a message looks like in memory, and the JAX code that writes and reads it.

A message is a list of *parts*; each is reduced over the workers by one operation, and all together are one exchange.

    part 0      small leaves to be summed, weighted, then gathered values (one row per worker, all others zero), the
                weights, and the runtime's tail: one float per worker and three more (see _agreement)
    parts 1…    small leaves of other dtypes or operations, one packed buffer for each pair of the two
    then        large leaves to be summed, each from its own memory

Small leaves are packed by the segment's own XLA program. Large ones are not: packing 100 MB costs more than it saves
(see benchmarks/exchange_resnet50.py).

Rule 3, the mean over examples, is here: a mean's leaf travels as `w x` and its weight `w` beside it; the division comes
after the sum, over workers and over the calls of one worker alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from ._eager import divided, scaled, wire_dtype
from ._flow import Scope
from ._plan import Contribution

LARGE_BYTES = 256 << 10  # from here on a leaf travels from its own memory; benchmarks/exchange_resnet50.py


@dataclass(frozen=True)
class Entry:
    """Where one contribution, or one weight, lies."""

    part: int
    offset: int  # in elements of the part; 0 for a large leaf, which is the part
    shape: tuple[int, ...]  # as it travels: gathered values have a row per worker
    dtype: np.dtype  # as it travels

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """One buffer of a message."""

    op: str  # sum | max | min
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """A message, as data.

    Attributes:
      entries: one per contribution, in order.
      weights: one per contribution, `None` where there is nothing to divide by. Equal weights share one entry.
      tail: elements at the end of part 0 that belong to the runtime.
    """

    contributions: tuple[Contribution, ...]
    entries: tuple[Entry, ...]
    weights: tuple[Entry | None, ...]
    parts: tuple[Part, ...]
    tail: int
    workers: int

    @property
    def nbytes(self) -> int:
        """Bytes that one worker puts into the message. Replicated."""
        return sum(p.nbytes for p in self.parts)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(p.op for p in self.parts)


def must_be_finite(c: Contribution) -> bool:
    """Whether infinities and NaNs in a contribution are a fault: not in what is gathered or broadcast, nor in what a
    worker measures once per step, such as seconds that are not known yet.
    """
    return c.kind == "reduce" and c.scope == Scope.CALL and jnp.issubdtype(c.value.aval.dtype, jnp.inexact)


def lay_out(contributions: Sequence[Contribution], *, workers: int, tail: int) -> Layout:
    """Find a place for everything in one message.

    What is weighed alike, and must be finite, lies side by side: so few operations weigh it, and few look at it.
    """
    wire = [wire_dtype(c.value.aval.dtype) for c in contributions]
    shapes = [
        ((workers, *c.value.aval.shape) if c.kind == "gather" else tuple(c.value.aval.shape)) for c in contributions
    ]
    ops = [c.op if c.op in ("max", "min") else "sum" for c in contributions]
    size = [int(np.prod(s, dtype=int)) for s in shapes]
    large = [op == "sum" and n * d.itemsize >= LARGE_BYTES for op, n, d in zip(ops, size, wire, strict=True)]
    # One floating buffer for everything small that is summed: what is single precision travels in double where
    # anything is double, which costs a few bytes and saves a buffer. Weights are in it, so large leaves count too,
    # and those of complex leaves.
    floating = [np.finfo(d).dtype for d, op in zip(wire, ops, strict=True) if op == "sum" and d.kind in "fc"]
    main = max(floating, key=lambda d: d.itemsize, default=np.dtype(np.float32))

    groups: dict[tuple[str, np.dtype], int] = {("sum", main): 0}
    fill: list[int] = [0]

    def place(op: str, dtype: np.dtype, shape: tuple[int, ...], count: int) -> Entry:
        dtype = main if op == "sum" and dtype.kind == "f" else dtype
        part = groups.setdefault((op, dtype), len(groups))
        if part == len(fill):
            fill.append(0)
        entry = Entry(part, fill[part], shape, dtype)
        fill[part] += count
        return entry

    # What is weighed once per worker and what is weighed in every call have two sums, even of one weight.
    keys = [
        None
        if c.weight is None or c.kind != "reduce"
        else (c.weight if isinstance(c.weight, Var) else float(c.weight.val), c.scope < Scope.CALL)
        for c in contributions
    ]
    nth = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    alike = [
        (not must_be_finite(c), nth[key], c.result.aval.dtype.itemsize)
        for c, key in zip(contributions, keys, strict=True)
    ]
    entries: list[Entry | None] = [None] * len(contributions)
    for i in sorted(range(len(contributions)), key=alike.__getitem__):
        if not large[i]:
            entries[i] = place(ops[i], wire[i], shapes[i], size[i])
    known = {key: place("sum", main, (), 1) for key in nth if key is not None}
    weights = [None if key is None else known[key] for key in keys]
    fill[0] += tail
    parts = [Part(op, dtype, (fill[i],)) for (op, dtype), i in groups.items()]
    for i, is_large in enumerate(large):
        if is_large:
            entries[i] = Entry(len(parts), 0, shapes[i], wire[i])
            parts.append(Part("sum", wire[i], shapes[i]))
    return Layout(tuple(contributions), tuple(e for e in entries if e), tuple(weights), tuple(parts), tail, workers)


def pack(layout: Layout, values: Sequence[jax.Array], weights: Sequence[jax.Array | None], *, worker, first) -> list:
    """One call's contributions as parts. Traced into the segment that computes them.

    Args:
      values, weights: one per contribution.
      worker: this worker's number, for gathered values' rows.
      first: 1.0 in the first call of a worker's step: what belongs to the worker and not to the call counts once.
    """
    pieces: list[list[_Piece]] = [[] for _ in layout.parts]
    weights_written = set()
    for i, (c, entry, value) in enumerate(zip(layout.contributions, layout.entries, values, strict=True)):
        x = jnp.asarray(value).astype(entry.dtype)
        if c.kind == "gather":
            row = (jnp.arange(layout.workers, dtype=jnp.int32) == worker).reshape((-1,) + (1,) * x.ndim)
            x = jnp.where(row, x[None], jnp.zeros((), x.dtype))
        elif c.kind == "broadcast":
            x = jnp.where(worker == c.root, x, jnp.zeros((), x.dtype))
        weight, once = layout.weights[i], c.scope < Scope.CALL and c.op not in ("max", "min")
        factor = None if weight is None else weights[i]
        pieces[entry.part].append(_Piece(entry.offset, x, weight.offset if weight else -1, factor, once))
        if weight is not None and weight.offset not in weights_written:
            weights_written.add(weight.offset)
            w = jnp.asarray(weights[i]).astype(weight.dtype)
            pieces[0].append(_Piece(weight.offset, w, -1, None, once))
    pieces[0].append(_Piece(layout.parts[0].shape[0], jnp.zeros(layout.tail, layout.parts[0].dtype), -1, None, False))
    return [_join(part, found, first) for part, found in zip(layout.parts, pieces, strict=True)]


class _Piece(NamedTuple):
    """What one contribution, one weight, or the tail puts into a part."""

    offset: int
    value: jax.Array
    weight: int  # which weight it is multiplied by: where that lies; -1 for none
    factor: Any
    once: bool  # counts in a worker's first call only


def _join(part: Part, pieces: Sequence[_Piece], first: Any) -> jax.Array:
    """A part, of what goes into it.

    Neighbours that are treated alike are joined before they are weighed: a model has hundreds of leaves, and an
    operation on each costs more than one on all of them.
    """
    runs = []
    for (_, once), group in groupby(sorted(pieces, key=lambda p: p.offset), key=lambda p: (p.weight, p.once)):
        members = list(group)
        alone = len(members) == 1 and members[0].value.shape == part.shape
        run = members[0].value if alone else jnp.concatenate([p.value.reshape(-1) for p in members])
        if members[0].factor is not None:
            run = scaled(run, members[0].factor)
        runs.append(jnp.where(first > 0, run, jnp.zeros((), run.dtype)) if once else run)
    return runs[0] if len(runs) == 1 else jnp.concatenate([run.reshape(-1) for run in runs])


def unpack(layout: Layout, parts: Sequence[jax.Array], wanted: Sequence[int]) -> list[jax.Array]:
    """The contributions numbered `wanted`, out of the reduced parts. Traced into the segment that takes them."""
    inverse: dict[int, jax.Array] = {}

    def one(i: int) -> jax.Array:
        c, x, weight = layout.contributions[i], _take(layout, parts, layout.entries[i]), layout.weights[i]
        if weight is not None:
            if weight.offset not in inverse:
                inverse[weight.offset] = _take(layout, parts, weight)
            x = divided(x, inverse[weight.offset])
        return x.astype(c.result.aval.dtype)

    return [one(i) for i in wanted]


def _take(layout: Layout, parts: Sequence[jax.Array], entry: Entry) -> jax.Array:
    part = parts[entry.part]
    if part.shape == entry.shape and entry.offset == 0:
        return part
    return part[entry.offset : entry.offset + entry.size].reshape(entry.shape)


def accumulate(ops: Sequence[str], old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
    """Rule 4: a further call's parts, added to those of the calls before."""
    combine = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
    return [combine[op](a, b) for op, a, b in zip(ops, old, new, strict=True)]
