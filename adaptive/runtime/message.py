"""The memory layout of messages, and the JAX code that packs and unpacks them.

A message is a list of *parts*; each is reduced over the workers by one operation, and all together are one exchange.

    part 0      small leaves of sums, weighted; gathered values (one row per worker, all others zero); the weights; and
                in the last message of a step the status (`adaptive/control/status.py`)
    parts 1…    small leaves of other dtypes or operations, one packed buffer for each pair of the two
    then        large leaves of sums, each sent from its own memory; and each leaf of a reduction that is neither
                elementwise nor a sum or an extreme

Small leaves are packed by the segment's own XLA program. Packing large ones costs more than it saves. A mean's leaf is
sent as `w x`, with its weight `w`, and divided after the sum over workers and microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.channel import PartSpec
from adaptive.base.reductions import Reduction, adds_up, combine_microbatches
from adaptive.base.values.jaxprs import Var
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Contribution, Message
from adaptive.operators.eager import divided, neutral_element, scaled, wire_dtype, with_unknown_rows

LARGE_BYTES = 256 << 10  # leaves of this size are sent from their own memory; benchmarks/exchange_resnet50.py


@dataclass(frozen=True)
class Entry:
    """The position of one contribution, or one weight, in a message."""

    part: int
    offset: int  # in elements of the part; 0 for a large leaf, which is the part
    shape: tuple[int, ...]  # as sent: gathered values have a row per worker
    dtype: np.dtype  # as sent

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))


@dataclass(frozen=True)
class Layout:
    """The layout of a message."""

    contributions: tuple[Contribution, ...]
    entries: tuple[Entry, ...]  # one per contribution, in order
    weights: tuple[Entry | None, ...]  # also; `None` for contributions without a weight. Equal ones share an entry.
    parts: tuple[PartSpec, ...]
    status: int  # elements of the status at the end of part 0; 0 except in a step's last message
    capacity: int  # worker slots

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message that one worker sends. Replicated."""
        return sum(p.nbytes for p in self.parts)

    @cached_property
    def ops(self) -> tuple[Reduction, ...]:
        """The operations of the parts, in order."""
        return tuple(p.op for p in self.parts)


def must_be_finite(c: Contribution) -> bool:
    """Return whether infinities and NaNs in a contribution are an error.

    They are allowed in values that are gathered, broadcast, or measured once per step, where NaN means unknown.
    """
    of_examples = c.how.reduces and c.scope == Scope.MICROBATCH
    return (of_examples or c.how.must_be_finite) and jnp.issubdtype(c.value.aval.dtype, jnp.inexact)


def counts_once(c: Contribution) -> bool:
    """Return whether a contribution counts in the first microbatch of a worker's step only."""
    return c.scope < Scope.MICROBATCH and adds_up(c.how.op)


def lay_out_all(messages: Sequence[Message], *, capacity: int, status: int) -> list[Layout]:
    """Lay out the messages of a step. The status is in the last one that is always sent."""
    last = max((n for n, m in enumerate(messages) if m.travels and m.gate is None), default=-1)
    return [
        lay_out(m.contributions, capacity=capacity, status=status if n == last else 0) for n, m in enumerate(messages)
    ]


def lay_out(contributions: Sequence[Contribution], *, capacity: int, status: int) -> Layout:
    """Assign positions to the contributions and weights of one message.

    Contributions with the same weight that must be finite are adjacent, so that few operations weight and check them.
    """
    wire = [wire_dtype(c.value.aval.dtype) for c in contributions]
    shapes = [tuple(c.how.sent_shape(c.value.aval.shape, capacity)) for c in contributions]
    ops = [c.how.op for c in contributions]
    size = [int(np.prod(s, dtype=int)) for s in shapes]
    large = [_by_itself(op, n * d.itemsize) for op, n, d in zip(ops, size, wire, strict=True)]
    # One floating buffer for all small sums, in double precision if any of them is: a few more bytes, one buffer less.
    # It includes the weights of large and complex leaves.
    floating = [np.finfo(d).dtype for d, op in zip(wire, ops, strict=True) if adds_up(op) and d.kind in "fc"]
    main = max(floating, key=lambda d: d.itemsize, default=np.dtype(np.float32))

    filled: dict[tuple[Reduction, np.dtype], int] = {("sum", main): 0}  # elements of the parts

    def place(op: Reduction, dtype: np.dtype, shape: tuple[int, ...], count: int) -> Entry:
        key = op, main if op == "sum" and dtype.kind == "f" else dtype
        offset = filled.setdefault(key, 0)
        filled[key] += count
        return Entry(list(filled).index(key), offset, shape, key[1])

    # Weights of values per worker and of values per microbatch have separate sums, even if they are equal.
    keys = [
        None
        if c.weight is None
        else (c.weight if isinstance(c.weight, Var) else float(c.weight.val), c.scope < Scope.MICROBATCH)
        for c in contributions
    ]
    nth = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    alike = [
        (not must_be_finite(c), nth[key], c.result.aval.dtype.itemsize)
        for c, key in zip(contributions, keys, strict=True)
    ]
    small = [i for i in sorted(range(len(contributions)), key=alike.__getitem__) if not large[i]]
    entries = {i: place(ops[i], wire[i], shapes[i], size[i]) for i in small}
    known = {key: place("sum", main, (), 1) for key in nth if key is not None}
    weights = [None if key is None else known[key] for key in keys]
    filled["sum", main] += status
    parts = [PartSpec((count,), dtype, op) for (op, dtype), count in filled.items()]
    for i, is_large in enumerate(large):
        if is_large:
            entries[i] = Entry(len(parts), 0, shapes[i], wire[i])
            parts.append(PartSpec(shapes[i], wire[i], ops[i]))
    in_order = tuple(entries[i] for i in range(len(contributions)))
    return Layout(tuple(contributions), in_order, tuple(weights), tuple(parts), status, capacity)


def _by_itself(op: Reduction, nbytes: int) -> bool:
    """Return whether a leaf is sent from its own memory."""
    if isinstance(op, str):
        return op == "sum" and nbytes >= LARGE_BYTES
    return nbytes >= LARGE_BYTES or not op.elementwise


def pack(layout: Layout, values: Sequence[jax.Array], weights: Sequence[jax.Array | None], *, worker, first) -> list:
    """Return the contributions of one microbatch as parts. Traced into the segment that computes them.

    Args:
      values, weights: one per contribution.
      first: whether it is the first microbatch of a worker's step: values of scope "worker" count once.
    """
    pieces: list[list[_Piece]] = [[] for _ in layout.parts]
    weights_written = set()
    for i, (c, entry, value) in enumerate(zip(layout.contributions, layout.entries, values, strict=True)):
        x = jnp.asarray(value).astype(entry.dtype)
        x = c.how.encode(x, worker, layout.capacity)
        weight, once = layout.weights[i], counts_once(c)
        factor = None if weight is None else weights[i]
        pieces[entry.part].append(_Piece(entry.offset, x, weight.offset if weight else -1, factor, once))
        if weight is not None and weight.offset not in weights_written:
            weights_written.add(weight.offset)
            w = jnp.asarray(weights[i]).astype(weight.dtype)
            pieces[0].append(_Piece(weight.offset, w, -1, None, once))
    pieces[0].append(_Piece(layout.parts[0].shape[0], jnp.zeros(layout.status, layout.parts[0].dtype), -1, None, False))
    return [_join(part, found, first) for part, found in zip(layout.parts, pieces, strict=True)]


class _Piece(NamedTuple):
    """The elements of a part that belong to one contribution, one weight, or the status."""

    offset: int
    value: jax.Array
    weight: int  # offset of the weight by which it is multiplied; -1 for none
    factor: Any
    once: bool  # counts in a worker's first microbatch only


def _join(part: PartSpec, pieces: Sequence[_Piece], first: Any) -> jax.Array:
    """Return a part, joined from its pieces.

    These are concatenated first and weighted then: one operation on hundreds of leaves costs less than one on each. A
    barrier keeps XLA on CPU from fusing the two into a loop that finds the leaf of each element (0.3 ms for 3 MB).
    """
    pieces = sorted(pieces, key=lambda p: p.offset)
    if len(pieces) == 1:
        joined = pieces[0].value.reshape(part.shape)
    else:
        joined = jax.lax.optimization_barrier(jnp.concatenate([p.value.reshape(-1) for p in pieces]))
    ends = [p.offset for p in pieces[1:]] + [int(np.prod(part.shape, dtype=int))]
    runs = []  # adjacent pieces with equal treatment: (first piece, end)
    for _, group in groupby(zip(pieces, ends, strict=True), key=lambda found: (found[0].weight, found[0].once)):
        members = list(group)
        runs.append((members[0][0], members[-1][1]))
    place = None if len(runs) == 1 else jnp.arange(len(joined), dtype=jnp.int32)

    def only(run: _Piece, end: int, inside: Any, outside: Any) -> Any:
        return inside if place is None else jnp.where((place >= run.offset) & (place < end), inside, outside)

    weighed = joined
    for run, end in runs:
        value = joined if run.factor is None else scaled(joined, run.factor)
        if run.once:
            value = jnp.where(first, value, jnp.zeros((), value.dtype))
        if value is not joined:
            weighed = only(run, end, value, weighed)
    return weighed


def unpack(
    layout: Layout, parts: Sequence[jax.Array], *, worker: Any, taking_part: jax.Array
) -> Callable[[int], jax.Array]:
    """Return a function that returns a result of the reduced parts by its number, computed anew by each call. Traced
    into the segment that reads them.

    XLA fuses a division into one operation that uses it, but not into two: it writes the quotient to memory. With Adam
    that is a temporary as large as all parameters, and doubles the time of the update. Quotients by different divisors
    are each fused into their operation.

    Args:
      taking_part: see `Feed.taking_part`.
    """
    totals: dict[int, list[jax.Array]] = {}  # by a weight's offset: copies of one number that XLA does not merge
    calls = Counter[int]()

    def total_of(weight: Entry, travels: bool, use: int) -> jax.Array:
        if weight.offset not in totals:
            total = _entry_of(parts, weight)
            # For a worker without examples. If all workers have none, the mean is an error.
            totals[weight.offset] = [total if travels else jnp.where(total == 0, 1, total)]
        found = totals[weight.offset]
        if len(found) == use:
            found.append(jax.lax.optimization_barrier(found[-1]))
        return found[use]

    def result(i: int) -> jax.Array:
        c, x, weight = layout.contributions[i], _entry_of(parts, layout.entries[i]), layout.weights[i]
        if weight is not None:
            x = divided(x, total_of(weight, c.how.travels, calls[i]))
        calls[i] += 1
        x = with_unknown_rows(c.how, x, c.value.aval.shape, taking_part)
        return c.how.decode(x, worker, layout.capacity).astype(c.result.aval.dtype)

    return result


def _entry_of(parts: Sequence[jax.Array], entry: Entry) -> jax.Array:
    part = parts[entry.part]
    if part.shape == entry.shape and entry.offset == 0:
        return part
    return part[entry.offset : entry.offset + entry.size].reshape(entry.shape)


def neutral_parts(layout: Layout) -> list[np.ndarray]:
    """Return a message's parts for a worker without examples, which change no result."""
    parts = [np.zeros(part.shape, part.dtype) for part in layout.parts]
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        elements = parts[entry.part].reshape(-1)[entry.offset : entry.offset + entry.size]
        elements[:] = neutral_element(c.how.op, entry.dtype)
    return parts


def accumulate(ops: Sequence[Reduction], old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
    """Add the parts of a further microbatch to those of the ones before (rule 4)."""
    return [combine_microbatches(op, a, b) for op, a, b in zip(ops, old, new, strict=True)]
