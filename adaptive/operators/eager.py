"""Eager collectives, outside a program, in the world that was entered last.

Without a world, or with one worker, a value is its own mean, sum and broadcast. In a world of several devices of one
process, all workers of the process have the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.channel import SentMessage
from adaptive.base.errors import CollectiveError, NonFiniteError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.reductions import Reduction
from adaptive.base.values.arrays import NotAnArrayError, as_jax, check_not_sharded
from adaptive.base.values.current import current_world, why_not_alone
from adaptive.base.world import MembersChanged, World

from .sources import ALONE

if TYPE_CHECKING:
    from .collectives import Collective


def exchange_eagerly(how: Collective, values: Sequence, *, weight: Any) -> list[jax.Array]:
    """Run a collective on concrete arrays and return its results. Blocks until all processes have called it.

    Raises:
      CollectiveError: there is no current world although there are several processes or a world in another thread; or
        a mean has no weight; or a value is sharded over devices.
      DisagreementError: the processes call different collectives. On every process.
    """
    alone = why_not_alone()
    if alone:
        raise CollectiveError(
            f"{how.name} outside a program{at(current_line())} has no world, so it would reduce nothing: {alone}. "
            "Write it inside the world's block, in the thread that has entered it:\n"
            "    with comm.world():\n"
            f"        x = comm.{how.name}(x)"
        )
    values = [as_jax(v) for v in values]
    dtypes = [v.dtype for v in values]
    world = current_world.get()
    if world is None or world.capacity == 1:
        if weight is not None:
            _check_weight(jnp.asarray(weight))
        return [how.of_replicated(v, jnp.asarray(ALONE)) for v in values]
    for value in values:
        try:
            check_not_sharded(value)
        except NotAnArrayError as error:
            raise CollectiveError(f"{how.name} outside a program{at(current_line())}: an array {error}") from error
    if weight is not None and not np.isfinite(weight):
        raise CollectiveError(
            f"{how.name} outside a program{at(current_line())}: the mean is over examples, and the number of examples "
            f"is known only in a program. Pass a weight, or use another op:\n"
            f"    comm.all_reduce(x, weight=n_examples)        comm.all_reduce(x, op='sum')"
        )
    what = ", ".join(f"{v.dtype}{list(v.shape)}" for v in values)
    about = f"{how.about} of {what}, outside a program"
    values = [v.astype(wire_dtype(v.dtype)) for v in values]
    ops: list[Reduction] = ["sum", *([] if weight is None else ["sum"]), *[how.op] * len(values)]

    while True:
        missing = [slot for slot in how.needed if slot not in world.members]
        if missing:
            where = f"outside a program{at(current_line())}"
            raise CollectiveError(f"{how.about} {where}: worker slot {missing[0]} has no worker.")
        parts = _parts(how, values, weight, world)
        with suppress(MembersChanged):  # members were lost meanwhile: the others send their values again
            results, _ = world.exchange(SentMessage(parts, np.zeros(1, np.float32), about), ops)
            break
    out = [jnp.array(r) for r in results[0][1:]]  # copied, because the world reuses its buffers
    if weight is not None:
        _check_weight(out[0])
        out = [divided(s, out[0]) for s in out[1:]]
    there = jnp.isin(jnp.arange(world.capacity), jnp.asarray(world.members))
    out = [with_unknown_rows(how, x, v.shape, there) for x, v in zip(out, values, strict=True)]
    out = [how.decode(x, world.workers[0], world.capacity) for x in out]
    return jax.block_until_ready([v.astype(dtype) for v, dtype in zip(out, dtypes, strict=True)])


def _parts(how: Collective, values: Sequence[jax.Array], weight: Any, world: World) -> list[list[jax.Array]]:
    """Return the parts of a message for each worker of this process."""
    parts: list[list[jax.Array]] = []
    for worker, target in zip(world.workers, world.targets, strict=True):
        there = worker in world.members
        if there:
            sent = [how.encode(v if weight is None else scaled(v, weight), worker, world.capacity) for v in values]
        else:
            shapes = [how.sent_shape(v.shape, world.capacity) for v in values]
            sent = [jnp.full(s, neutral_element(how.op, v.dtype), v.dtype) for s, v in zip(shapes, values, strict=True)]
        weights = [] if weight is None else [jnp.asarray(weight) if there else jnp.zeros_like(weight)]
        row = [jnp.zeros(1), *weights, *sent]
        parts.append([jax.device_put(p, target) for p in row])
    return parts


def _check_weight(total: jax.Array) -> None:
    if not least_weight(total.dtype) <= float(total) < np.inf:
        raise NonFiniteError(f"all_reduce outside a program{at(current_line())} is {mean_of_nothing(float(total))}.")


def least_weight(dtype: Any) -> float:
    """Return the smallest sum of weights to divide by: the smallest normal number, since XLA flushes others to zero."""
    return float(np.finfo(dtype).tiny)


def mean_of_nothing(total: float) -> str:
    """Return a description of a mean whose sum of weights is too small to divide by."""
    if total == 0:
        return "a mean over no examples: the weights of all workers are zero"
    return f"no mean: the weights of all workers sum to {total:g}, which cannot be divided by"


def scaled(x: jax.Array, weight: Any) -> jax.Array:
    """Return `x` times a real weight, in the dtype of `x`."""
    return _by_real(jnp.multiply, x, weight)


def divided(x: jax.Array, weight: Any) -> jax.Array:
    """Return `x` divided by a real sum of weights, in the dtype of `x`."""
    return _by_real(jnp.divide, x, weight)


def _by_real(operation: Callable, x: jax.Array, weight: Any) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return operation(x, jnp.asarray(weight).astype(x.dtype))
    # Real and imaginary parts separately: a product with w + 0j turns infinities into NaN, and is slower.
    weight = jnp.asarray(weight).astype(x.real.dtype)
    return jax.lax.complex(operation(x.real, weight), operation(x.imag, weight))


def wire_dtype(dtype) -> np.dtype:
    """Return the dtype in which values are sent: float32 for half precision, integers for booleans.

    MPI cannot sum the narrow types, and they would round weights.
    """
    if dtype == jnp.bool_:
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else np.dtype(dtype)


def with_unknown_rows(how: Collective, x: jax.Array, shape: tuple[int, ...], taking_part: jax.Array) -> jax.Array:
    """Return a reduced value whose rows of workers without examples are NaN (0 for integers), if it has a row for each
    worker's value of `shape`; traced. `taking_part`: as for `Collective.of_replicated`.
    """
    if how.reduces or x.shape != (len(taking_part), *shape):
        return x
    unknown = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jnp.where(taking_part.reshape((-1,) + (1,) * len(shape)), x, jnp.asarray(unknown, x.dtype))


def neutral_element(op: Reduction, dtype: np.dtype) -> Any:
    """Return what a worker without examples sends."""
    if op not in ("max", "min"):
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if op == "max" else np.inf
    return jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max
