"""A check that a reduced message is finite, and the error for a step whose message is not.

Not finite are contributions of any worker, sums that overflow, and means whose weights are all zero (0 / 0). The
reduced values are bitwise equal on all workers, so all stop at the same message, before the step is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from math import hypot
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import NonFiniteError
from adaptive.base.process.source_lines import at, name_workers
from adaptive.base.reductions import Sliced
from adaptive.graph.plan import Contribution
from adaptive.operators.eager import least_weight, mean_of_nothing

from .message import Layout, must_be_finite

_INF = float("inf")
_MAX, _MIN = np.maximum.reduce, np.minimum.reduce
_BLOCK = 1 << 17  # elements, which stay in the CPU's caches between the two passes over them
_FEW = 64  # elements that are checked one by one
_NAMED = 3  # leaves of one all_reduce that an error lists
_SENT = (
    ", the format in which it is sent (wire=; with weight=, weight times value is sent; bfloat16 has float32's range)"
)


class _Range(NamedTuple):
    """Adjacent elements of a part with the same result type and the same weight."""

    part: int
    start: int
    stop: int
    weight: int  # its index in part 0; -1 for none
    dtype: np.dtype
    limit: float  # see `_limit`


class FiniteCheck:
    """The check of one message.

    Args:
      platform: the platform of the receiving device, or "mesh". On a CPU numpy reads the message without a copy.
    """

    def __init__(self, layout: Layout, platform: str):
        self.layout, self._on_host = layout, platform == "cpu"
        self._least = least_weight(layout.parts[0].dtype)
        pairs = list(zip(layout.contributions, layout.weights, strict=True))
        # A NaN weight is allowed if it belongs to values that may be NaN.
        self._weights = sorted({(w.offset, must_be_finite(c)) for c, w in pairs if w is not None})
        self._ranges = self._find_ranges()

    def _find_ranges(self) -> list[_Range]:
        """Return the elements that must be finite, in as few ranges as possible."""
        joined: list[_Range] = []
        each = zip(self.layout.contributions, self.layout.entries, self.layout.weights, strict=True)
        for c, e, w in sorted(each, key=lambda found: (found[1].part, found[1].offset)):
            if not must_be_finite(c) or not e.size:
                continue
            dtype = np.dtype(c.result.aval.dtype)
            new = _Range(e.part, e.offset, e.offset + e.size, w.offset if w else -1, dtype, _limit(dtype))
            if joined and joined[-1]._replace(start=new.start, stop=new.stop) == new and joined[-1].stop == new.start:
                joined[-1] = joined[-1]._replace(stop=new.stop)
            else:
                joined.append(new)
        return joined

    def passes(self, parts: Sequence[jax.Array]) -> bool:
        """Return whether all values that must be finite are, including the quotients of means.

        Args:
          parts: the reduced parts, on one worker's device.
        """
        if not self._on_host:
            return bool(self._program(list(parts))) or self.of_all(parts) == Reduced([], [])
        host = list(map(np.asarray, parts))
        for i, checked in self._weights:
            total = float(host[0][i])
            if not self._least <= total < _INF and (checked or total == total):
                return False
        for part, start, stop, divisor, _, limit in self._ranges:
            weight = 1.0 if divisor < 0 else float(host[0][divisor])
            values = host[part].reshape(-1)[start:stop]
            # Few values without the code of numpy's reductions.
            are_few = stop - start <= _FEW and values.dtype.kind == "f"
            if not (are_few and hypot(*values.tolist()) / weight < limit) and not _largest(values) / weight < limit:
                return False
        return True

    def all_finite(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return whether all values that must be finite are; traced. May be False although `passes` is True, if the sum
        of squares of many finite values overflows.

        Reads each part once. A finite sum of squares bounds all elements, and takes half the time of a maximum on CPUs.
        It would often overflow the range of half precision, whose elements are compared.
        """
        flat = [part.reshape(-1) for part in parts]
        ok = [jnp.asarray(self._is_weight(flat[0][i], checked)) for i, checked in self._weights]
        for part, start, stop, divisor, dtype, _ in self._ranges:
            # A part of a single range is not reshaped, because XLA might copy it.
            x = parts[part] if stop - start == parts[part].size else flat[part][start:stop]
            if dtype.itemsize < x.dtype.itemsize:
                bound = jnp.max(jnp.abs(x))
            else:
                bound = 2 * jnp.sqrt(jnp.sum(x.real**2 + x.imag**2 if x.dtype.kind == "c" else x**2))
            quotient = bound if divisor < 0 else bound / flat[0][divisor].astype(bound.dtype)
            ok.append(jnp.isfinite(quotient.astype(dtype)))
        return jnp.stack(ok).all() if ok else jnp.asarray(True)

    @cached_property
    def _program(self) -> Any:
        """`all_finite`, compiled for devices whose memory the host cannot read."""
        return jax.jit(self.all_finite)

    def _is_weight(self, total: Any, checked: bool) -> Any:
        usable = (total >= self._least) & (total < np.inf)
        return usable if checked else usable | (total != total)

    def of_worker(self, parts: Sequence[jax.Array]) -> list[int]:
        """Return the contributions of one worker that are not finite, or whose weight is not."""
        each = self._each(parts)
        return [i for i, checked, largest, weight in each if checked and not (largest < _INF and abs(weight) < _INF)]

    def of_all(self, parts: Sequence[jax.Array]) -> Reduced:
        """Return the reduced values that are not finite, and the sums of weights by which values cannot be divided."""
        found = Reduced([], [])
        for i, checked, largest, weight in self._each(parts):
            if not self._is_weight(weight, checked):
                found.weightless.append((i, weight))
            elif checked and not largest / weight < _limit(np.dtype(self.layout.contributions[i].result.aval.dtype)):
                found.too_large.append(i)
        return found

    def _each(self, parts: Sequence[jax.Array]) -> Iterator[tuple[int, bool, float, float]]:
        """Yield for each contribution its number, whether it must be finite, its largest magnitude if so, and its
        weight, 1 for none.
        """
        host, layout = [np.asarray(part).reshape(-1) for part in parts], self.layout
        for i, (c, e, w) in enumerate(zip(layout.contributions, layout.entries, layout.weights, strict=True)):
            checked, weight = must_be_finite(c), 1.0 if w is None else float(host[0][w.offset])
            yield i, checked, _largest(host[e.part][e.offset : e.offset + e.size]) if checked else 0.0, weight


def _limit(dtype: np.dtype) -> float:
    """Return the smallest number that rounds to infinity: half a unit in the last place above the largest."""
    info = jnp.finfo(dtype)
    return float(info.max) + 2.0 ** (info.maxexp - 2 - info.nmant)


def _largest(x: np.ndarray) -> float:
    """Return the largest magnitude of real and imaginary parts; NaN if there is a NaN."""
    if x.dtype.kind == "c":
        x = x.view(x.real.dtype)
    largest = 0.0
    for start in range(0, x.size, _BLOCK):
        block = x[start : start + _BLOCK]
        # Neither allocates an array, and both propagate NaNs. (A dot product takes half the time, but BLAS may use more
        # threads than this process is allowed.)
        of_block = max(float(_MAX(block)), -float(_MIN(block)))
        if not of_block <= largest:
            if of_block != of_block:
                return of_block
            largest = of_block
    return largest


# --- errors -----------------------------------------------------------------------------------------------------------


class Reduced(NamedTuple):
    """The values of a reduced message that are not finite."""

    weightless: list[tuple[int, float]]  # contributions by whose sum of weights values cannot be divided, with that sum
    too_large: list[int]  # other contributions whose result is not finite


class Culprit(NamedTuple):
    """A worker whose contributions are not finite."""

    worker: int
    contributions: tuple[int, ...]  # by their numbers in the message
    origin: str = ""  # of the first such value, in words; "" if unknown


class Trouble(NamedTuple):
    """Why a step was not committed. Replicated."""

    causes: list[str]  # a clause each
    origins: list[str]  # a line for each worker whose values' origin is known
    of_state: bool  # whether the state itself is not finite


def describe_trouble(message: Sequence[Contribution], reduced: Reduced, culprits: Sequence[Culprit]) -> Trouble:
    """Return why a message is not finite, in words."""
    causes = [
        f"{_named(message, (i for i, _ in same))} is {mean_of_nothing(total)}"
        for total, same in groupby(reduced.weightless, key=lambda found: found[1])
        if total == total  # a NaN weight is reported for its worker
    ]
    by_contributions = sorted(culprits, key=lambda c: (c.contributions, c.worker))
    for numbers, same in groupby(by_contributions, key=lambda c: c.contributions):
        who = name_workers([c.worker for c in same])
        causes.append(f"the contributions of {who} to {_named(message, numbers)} hold infinities or NaNs")
    if reduced.too_large and not culprits:
        causes += _overflows(message, reduced.too_large)
    origins = [f"On worker {c.worker} {c.origin}." for c in culprits if c.origin]
    return Trouble(causes, origins, any(c.origin.startswith("state") for c in culprits))


def _overflows(message: Sequence[Contribution], numbers: Sequence[int]) -> Iterator[str]:
    """Yield descriptions of overflowed values, with the format: the result's, or the narrower one on the wire."""

    def format_of(i: int) -> tuple[str, float, str]:
        dtype, op = np.dtype(message[i].result.aval.dtype), message[i].how.op
        wire = np.dtype(op.wire_dtype(dtype)) if isinstance(op, Sliced) else dtype
        largest, of_wire = float(jnp.finfo(dtype).max), float(jnp.finfo(wire).max)
        return (str(wire), of_wire, _SENT) if of_wire < largest else (str(dtype), largest, "")

    for (dtype, largest, sent), those in groupby(sorted(numbers, key=format_of), format_of):
        yield (
            f"the sum of all workers' contributions to {_named(message, those)} is too large for {dtype} "
            f"({largest:.6g} at most){sent}, though each is finite"
        )


def _named(message: Sequence[Contribution], numbers: Iterator[int] | Sequence[int]) -> str:
    """Return "all_reduce (driver.py:15) of ['kernel'], ['bias'] and 3 more", for each line."""
    by_line: dict[tuple[str, str], list[str]] = {}
    for c in (message[i] for i in numbers):
        by_line.setdefault((c.how.name, c.line), []).append(c.name)
    texts = []
    for (what, line), names in by_line.items():
        listed = ", ".join(filter(None, names[:_NAMED]))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        texts.append(f"{what}{at(line)}" + f" of {listed}{more}" * bool(listed or more))
    return " and ".join(texts)


_OF_STATE = (
    "An earlier update made them of finite values, such as 0 / 0 or the root of a negative number. Further steps have "
    "them too. Continue from a checkpoint: program.restore(checkpoint)."
)
_BY_ITSELF = """\
A driver that handles such steps itself, for example by lowering a loss scale, tests the reduced values, which are equal
on all workers:
    grads = comm.all_reduce(grads)
    finite = jnp.isfinite(optax.global_norm(grads))
    ad.Program(..., nonfinite="allow")"""


def not_finite(trouble: Trouble, step: int, skipped: int = 0) -> NonFiniteError:
    """Return the error for a step that is not committed.

    Args:
      skipped: the number of steps in a row that were skipped before, if that is too many.
    """
    unchanged = f"The state is that of step {step - 1 - skipped}"
    remedy = f'{unchanged}. To skip such steps and continue: ad.Program(..., nonfinite="skip").'
    what = f"step {step}: {'; '.join(trouble.causes)}."
    if skipped:
        what += f" {skipped} steps in a row were skipped before, which is the limit."
        remedy = f"{unchanged}, and no step since has changed it."
    return NonFiniteError("\n".join([what, *trouble.origins, *[_OF_STATE] * trouble.of_state, remedy, _BY_ITSELF]))
