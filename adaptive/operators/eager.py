"""Collectives outside a program: carried out at once, by the world that was entered last.

With no world, or one of one worker, a value is its own mean, sum and broadcast. In a world of several devices of one
process every worker holds the value that the process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.current import current_world, why_not_alone
from adaptive.base.errors import CollectiveError, NonFiniteError
from adaptive.base.where import at, current_line


def exchange_eagerly(kind: str, values: Sequence, *, op: str, weight, root: int) -> list[jax.Array]:
    """What a collective returns when its operands are numbers and not tracers. Blocks until all workers have called
    it.

    Raises:
      CollectiveError: there is no world, and other processes or a world in another thread; or a mean has no weight.
      DisagreementError: the processes call different collectives, or are not all in one. On every process.
    """
    alone = why_not_alone()
    if alone:
        raise CollectiveError(
            f"{_names[kind]} outside a program{at(current_line())} has no world, so it would reduce nothing: {alone}. "
            "Write it inside the world's block, in the thread that has entered it:\n"
            "    with comm.world():\n"
            f"        x = comm.{_names[kind]}(x)"
        )
    values = [jnp.asarray(v) for v in values]
    dtypes = [v.dtype for v in values]
    world = current_world.get()
    if world is None or world.size == 1:
        if weight is not None:
            _check_weight(jnp.asarray(weight))
        return [v[None] if kind == "gather" else v for v in values]
    if weight is not None and not np.isfinite(weight):
        raise CollectiveError(
            f"all_reduce outside a program{at(current_line())}: a mean is over examples, and how many each worker "
            f"has is known only inside one. Say what to weigh by, or reduce by another op:\n"
            f"    comm.all_reduce(x, weight=n_examples)        comm.all_reduce(x, op='sum')"
        )
    how = {"reduce": f" {op!r}", "gather": "", "broadcast": f" from {root}"}[kind]
    what = ", ".join(f"{v.dtype}{list(v.shape)}" for v in values)
    about = f"{_names[kind]}{how} of {what}, outside a program"
    values = [v.astype(wire_dtype(v.dtype)) for v in values]
    parts, ops = [], []
    for worker, device in zip(world.workers, world.devices, strict=True):
        row = [jnp.zeros(1)]
        if weight is not None:
            w = jnp.asarray(weight)
            row += [w, *(scaled(v, w) for v in values)]
        elif kind == "gather":
            row += [jnp.zeros((world.size, *v.shape), v.dtype).at[worker].set(v) for v in values]
        elif kind == "broadcast":
            row += [v if worker == root else jnp.zeros_like(v) for v in values]
        else:
            row += values
        parts.append([jax.device_put(p, device) for p in row])
        ops = ["sum"] + [op if kind == "reduce" and op != "mean" else "sum"] * (len(row) - 1)
    results, _ = world.exchange(parts, ops, np.zeros(1, np.float32), about=about)
    out = [jnp.array(r) for r in results[0][1:]]  # copies: the world may write its buffers again
    if weight is not None:
        _check_weight(out[0])
        out = [divided(s, out[0]) for s in out[1:]]
    return jax.block_until_ready([v.astype(dtype) for v, dtype in zip(out, dtypes, strict=True)])


_names = {"reduce": "all_reduce", "gather": "all_gather", "broadcast": "broadcast"}


def _check_weight(total: jax.Array) -> None:
    if not least_weight(total.dtype) <= float(total) < np.inf:
        raise NonFiniteError(f"all_reduce outside a program{at(current_line())} is {mean_of_nothing(float(total))}.")


def least_weight(dtype: Any) -> float:
    """The least sum of weights that can be divided by: XLA takes what is below the least normal number for zero."""
    return float(np.finfo(dtype).tiny)


def mean_of_nothing(total: float) -> str:
    """What a mean is, whose weights sum to what cannot be divided by."""
    if total == 0:
        return "a mean of nothing: the weights of all workers are zero, and 0 / 0 is no number"
    return f"no mean: the weights of all workers sum to {total:g}, which cannot be divided by"


def scaled(x: jax.Array, weight: Any) -> jax.Array:
    """`x`, weighed by a real number."""
    return _by_real(jnp.multiply, x, weight)


def divided(x: jax.Array, weight: Any) -> jax.Array:
    """`x` over a sum of weights."""
    return _by_real(jnp.divide, x, weight)


def _by_real(operation: Callable, x: jax.Array, weight: Any) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return operation(x, jnp.asarray(weight).astype(x.dtype))
    # Each part by itself: a product with w + 0j makes NaNs of infinities, and takes four multiplications.
    weight = jnp.asarray(weight).astype(x.real.dtype)
    return jax.lax.complex(operation(x.real, weight), operation(x.imag, weight))


def wire_dtype(dtype) -> np.dtype:
    """Half precisions travel as float32, booleans as integers: no MPI sums them, and weights would be rounded."""
    if dtype == jnp.bool_:
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else np.dtype(dtype)
