"""A check that a reduced message is finite, and the search for the contributions that are not.

Checking the reduced values finds contributions of any worker that are not finite, sums that overflow, and means whose
weights are all zero (0 / 0). The reduced values are bitwise equal on all workers, so all of them stop at the same
message, before the step is committed. They then determine together whose contributions are not finite.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import NonFiniteError
from adaptive.base.reductions import Sliced
from adaptive.base.source_lines import at, name_workers
from adaptive.base.world import World
from adaptive.graph.plan import Contribution
from adaptive.operators.eager import least_weight, mean_of_nothing

from .message import Entry, Layout, must_be_finite

_WIRE = (
    ", the format in which it is sent (wire=; with weight=, weight times value is sent; bfloat16 has float32's range)"
)
_INF = float("inf")
_MAX, _MIN = np.maximum.reduce, np.minimum.reduce
_LARGE = 1 << 16  # elements; fewer are in the CPU's caches, where a second pass costs nothing
_NAMED = 3  # leaves of one all_reduce that an error lists


class _Range(NamedTuple):
    """Adjacent elements of a part with the same result type and the same weight."""

    part: int
    start: int
    stop: int
    weight: Entry | None
    dtype: np.dtype  # of the result


class FiniteCheck:
    """The check of one message.

    Args:
      platform: the platform of the receiving devices. On CPUs numpy reads the message without a copy.
    """

    def __init__(self, layout: Layout, platform: str):
        self.layout, self._on_host = layout, platform == "cpu"
        found = [
            _Range(e.part, e.offset, e.offset + e.size, w, np.dtype(c.result.aval.dtype))
            for c, e, w in self._all()
            if must_be_finite(c)
        ]
        self._ranges = [(r, _limit(r.dtype)) for r in _joined(sorted(found, key=lambda r: (r.part, r.start)))]
        # A NaN weight is allowed if it belongs to values that may be NaN.
        weights = {(w, must_be_finite(c)) for c, _, w in self._all() if w is not None}
        self._weights = [(w.offset, checked) for w, checked in sorted(weights, key=lambda found: found[0].offset)]
        self._least = least_weight(layout.parts[0].dtype)

    def passes(self, parts: Sequence[jax.Array]) -> bool:
        """Return whether all values that must be finite are, including the quotients of means.

        Args:
          parts: the reduced parts, on one worker's device.
        """
        if not self._on_host:
            return bool(self.dispatch(parts))
        host = list(map(np.asarray, parts))
        for i, checked in self._weights:
            total = float(host[0][i])
            if not self._least <= total < _INF and (checked or total == total):
                return False
        for r, limit in self._ranges:
            weight = 1.0 if r.weight is None else float(host[0][r.weight.offset])
            values = host[r.part].reshape(-1)[r.start : r.stop]
            if values.size >= _LARGE and weight >= 1.0 and values.dtype == r.dtype and _sum_is_finite(values):
                continue
            # A call of Python less in a steady step, for all but complex numbers.
            real = values.dtype.kind == "f"
            largest = max(float(_MAX(values)), -float(_MIN(values))) if real else _largest(values)
            if not largest / weight < limit:
                return False
        return True

    def dispatch(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Dispatch the check on the device, and the copy of its result to the host.

        Returns:
          What `passes` returns, once it has been computed.
        """
        finite = self._program(list(parts))
        finite.copy_to_host_async()
        return finite

    def all_finite(self, parts: Sequence[jax.Array], at_least_one: Collection[int] = ()) -> jax.Array:
        """Return whether all values that must be finite are; traced. May be False although `passes` is True, if the sum
        of many finite values overflows.

        Sums each range, in one pass over memory: a finite sum has no infinities and NaNs. A mean whose weights sum to
        less than 1, or whose dtype is narrower than that of the message, may overflow by its division, so its elements
        are divided first.

        Args:
          parts: the reduced parts.
          at_least_one: indices in part 0 of sums of weights that are at least 1.
        """
        flat = [part.reshape(-1) for part in parts]
        ok = [jnp.asarray(self._is_weight(flat[0][i], checked)) for i, checked in self._weights]
        for r, _ in self._ranges:
            # A part of a single range is not reshaped, because XLA might copy it.
            whole = r.stop - r.start == parts[r.part].size
            x = parts[r.part] if whole else flat[r.part][r.start : r.stop]
            weight = jnp.ones((), x.real.dtype) if r.weight is None else flat[0][r.weight.offset].astype(x.real.dtype)
            divided = partial(_divided_finite, dtype=r.dtype)
            if r.dtype.itemsize < x.dtype.itemsize:
                ok.append(divided(x, weight))
            elif r.weight is None or r.weight.offset in at_least_one:
                ok.append(jnp.isfinite(jnp.sum(x)))
            else:
                ok.append(jax.lax.cond(weight < 1, divided, lambda x, _: jnp.isfinite(jnp.sum(x)), x, weight))
        return jnp.stack(ok).all() if ok else jnp.asarray(True)

    @cached_property
    def _program(self) -> Any:
        """The same check, compiled for devices whose memory the host cannot read."""

        def look(parts: list[jax.Array]) -> jax.Array:
            flat = [part.reshape(-1) for part in parts]
            ok = [jnp.asarray(self._is_weight(flat[0][i], checked)) for i, checked in self._weights]
            for r, _ in self._ranges:
                x = flat[r.part][r.start : r.stop]
                x = x if r.weight is None else x / flat[0][r.weight.offset].astype(x.dtype)
                ok.append(jnp.isfinite(x.astype(r.dtype)).all())
            return jnp.stack(ok).all() if ok else jnp.asarray(True)

        return jax.jit(look)

    def _is_weight(self, total: Any, checked: bool) -> Any:
        usable = (total >= self._least) & (total < np.inf)
        return usable if checked else usable | (total != total)

    def of_worker(self, parts: Sequence[jax.Array]) -> list[int]:
        """Return the contributions of one worker that are not finite, or whose weight is not finite."""
        host = [np.asarray(part).reshape(-1) for part in parts]
        found = []
        for i, (c, e, w) in enumerate(self._all()):
            ok = np.isfinite(host[e.part][e.offset : e.offset + e.size]).all() and (
                w is None or np.isfinite(host[0][w.offset])
            )
            if must_be_finite(c) and not ok:
                found.append(i)
        return found

    def of_all(self, parts: Sequence[jax.Array]) -> Arrived:
        """Return the reduced values that are not finite, and the sums of weights by which values cannot be divided."""
        host = [np.asarray(part).reshape(-1) for part in parts]
        weightless, too_large = [], []
        for i, (c, e, w) in enumerate(self._all()):
            total = 1.0 if w is None else float(host[0][w.offset])
            if w is not None and not self._is_weight(total, must_be_finite(c)):
                weightless.append((i, total))
            elif must_be_finite(c):
                largest = _largest(host[e.part][e.offset : e.offset + e.size])
                if not largest / total < _limit(np.dtype(c.result.aval.dtype)):
                    too_large.append(i)
        return Arrived(weightless, too_large)

    def _all(self) -> Iterator[tuple[Contribution, Entry, Entry | None]]:
        return zip(self.layout.contributions, self.layout.entries, self.layout.weights, strict=True)


def _divided_finite(x: jax.Array, weight: jax.Array, *, dtype: np.dtype) -> jax.Array:
    """Return whether all elements are finite after the division by a weight, as `dtype`; traced."""
    quotients = jnp.abs(x.real / weight) + jnp.abs(x.imag / weight) if x.dtype.kind == "c" else jnp.abs(x / weight)
    return jnp.all(quotients.astype(dtype if dtype.kind != "c" else quotients.dtype) < jnp.inf)


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    joined: list[_Range] = []
    for r in ranges:
        last = joined[-1] if joined else None
        if last and (last.part, last.stop, last.weight, last.dtype) == (r.part, r.start, r.weight, r.dtype):
            joined[-1] = last._replace(stop=r.stop)
        else:
            joined.append(r)
    return joined


def _sum_is_finite(x: np.ndarray) -> bool:
    """Return whether the elements' sum is finite. If it is, so are the elements. One pass over memory."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(x)))


def _limit(dtype: np.dtype) -> float:
    """Return the smallest number that rounds to infinity: half a unit in the last place above the largest."""
    info = jnp.finfo(dtype)
    return float(info.max) + 2.0 ** (info.maxexp - 2 - info.nmant)


def _largest(x: np.ndarray) -> float:
    """Return the largest magnitude of real and imaginary parts; NaN if there is a NaN."""
    if x.dtype.kind == "c":
        x = x.view(x.real.dtype)
    # Neither allocates an array, and both propagate NaNs. (A dot product takes half the time, but BLAS may use more
    # threads than this process is allowed.)
    return max(float(_MAX(x)), -float(_MIN(x)))


# --- culprits ---------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """The values of a reduced message that are not finite."""

    weightless: list[tuple[int, float]]  # contributions, with the sum of their weights
    too_large: list[int]  # other contributions whose result is not finite


@dataclass(frozen=True)
class Culprit:
    """A worker whose contributions are not finite.

    Attributes:
      contributions: the numbers of the contributions.
      origin: a description of the origin of the first such value; "" if unknown.
    """

    worker: int
    contributions: tuple[int, ...]
    origin: str = ""


@dataclass(frozen=True)
class Trouble:
    """Why a step was not committed. Replicated."""

    message: tuple[Contribution, ...]
    arrived: Arrived
    culprits: tuple[Culprit, ...]

    @property
    def causes(self) -> list[str]:
        """The causes, a line for each."""
        found = [
            f"{self._named(i for i, _ in same)} is {mean_of_nothing(total)}"
            for total, same in groupby(self.arrived.weightless, key=lambda found: found[1])
            if total == total  # a NaN weight is reported for its worker
        ]
        by_contributions = sorted(self.culprits, key=lambda c: (c.contributions, c.worker))
        for numbers, same in groupby(by_contributions, key=lambda c: c.contributions):
            who = name_workers([c.worker for c in same])
            found.append(f"the contributions of {who} to {self._named(numbers)} hold infinities or NaNs")
        if self.arrived.too_large and not self.culprits:
            found += self._too_large()
        return found

    def _too_large(self) -> list[str]:
        """Return descriptions of overflowed values, with the format: the result's, or the narrower one on the wire."""
        by_format: dict[tuple[np.dtype, bool], list[int]] = {}
        for i in self.arrived.too_large:
            dtype, op = np.dtype(self.message[i].result.aval.dtype), self.message[i].how.op
            wire = np.dtype(op.wire_dtype(dtype)) if isinstance(op, Sliced) else dtype
            narrower = float(jnp.finfo(wire).max) < float(jnp.finfo(dtype).max)
            by_format.setdefault((wire if narrower else dtype, narrower), []).append(i)
        return [
            f"the sum of all workers' contributions to {self._named(numbers)} is too large for {dtype} "
            f"({float(jnp.finfo(dtype).max):.6g} at most)" + (_WIRE if narrower else "") + ", though each is finite"
            for (dtype, narrower), numbers in sorted(by_format.items(), key=str)
        ]

    @property
    def origins(self) -> list[str]:
        """The origins of the values, a line for each worker whose origin is known."""
        return [f"On worker {c.worker} {c.origin}." for c in self.culprits if c.origin]

    def _named(self, numbers: Iterable[int]) -> str:
        """Return "all_reduce (driver.py:15) of ['kernel'], ['bias'] and 3 more", for each line."""
        by_line: dict[tuple[str, str], list[str]] = {}
        for i in numbers:
            c = self.message[i]
            by_line.setdefault((c.how.name, c.line), []).append(c.name)
        texts = []
        for (what, line), names in by_line.items():
            listed = ", ".join(n for n in names[:_NAMED] if n) + (
                f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            )
            texts.append(f"{what}{at(line)}" + (f" of {listed}" if listed else ""))
        return " and ".join(texts)


def find_together(world: World, message: tuple[Contribution, ...], arrived: Arrived, own: Sequence[Culprit]) -> Trouble:
    """Combine the findings of all processes. Communicates; all processes call it, because all saw the same message."""
    own_findings = json.dumps([(c.worker, c.contributions, c.origin) for c in own]).encode()
    everyone = world.all_gather_bytes(own_findings, "whose contributions are not finite")
    culprits = [Culprit(w, tuple(numbers), origin) for found in everyone for w, numbers, origin in json.loads(found)]
    return Trouble(message, arrived, tuple(sorted(culprits, key=lambda c: c.worker)))


# --- errors -----------------------------------------------------------------------------------------------------------

_BY_ITSELF = """\
A driver that handles such steps itself, for example by lowering a loss scale, tests the reduced values, which are equal
on all workers:
    grads = comm.all_reduce(grads)
    finite = jnp.isfinite(optax.global_norm(grads))
    ad.Program(..., nonfinite="allow")"""


def _of_state(trouble: Trouble) -> list[str]:
    """Return a line on the remedy if values are not finite because the state is not."""
    if not any(culprit.origin.startswith("state") for culprit in trouble.culprits):
        return []
    return [
        "An earlier update made them of finite values, such as 0 / 0 or the root of a negative number. Further steps "
        "have them too. Continue from a checkpoint: program.restore(checkpoint)."
    ]


def not_finite(trouble: Trouble, step: int) -> NonFiniteError:
    """Return the error for a step that is not committed."""
    return NonFiniteError(
        "\n".join(
            [
                f"step {step}: {'; '.join(trouble.causes)}.",
                *trouble.origins,
                *_of_state(trouble),
                f"The state is that of step {step - 1}. To skip such steps and continue: "
                'ad.Program(..., nonfinite="skip").',
                _BY_ITSELF,
            ]
        )
    )


def skipped_too_often(trouble: Trouble, step: int, limit: int) -> NonFiniteError:
    """Return the error for the last of too many skipped steps."""
    return NonFiniteError(
        "\n".join(
            [
                f"step {step}: {'; '.join(trouble.causes)}. {limit} steps in a row were skipped before, which is the "
                "limit.",
                *trouble.origins,
                *_of_state(trouble),
                f"The state is that of step {step - 1 - limit}, and no step since has changed it.",
                _BY_ITSELF,
            ]
        )
    )
