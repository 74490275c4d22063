"""Collectives outside a program: carried out at once, by the world that was entered last.

With no world, or one of one worker, a value is its own mean, sum and broadcast. In a world of several devices of one
process every worker holds the value that the process holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import CollectiveError, DisagreementError, NonFiniteError
from ._where import at, current_line
from ._world import World

current_world: ContextVar[World | None] = ContextVar("adaptive_world", default=None)


def exchange_eagerly(kind: str, values: Sequence, *, op: str, weight, root: int) -> list[jax.Array]:
    """What a collective returns when its operands are numbers and not tracers. Blocks until all workers have called
    it.
    """
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
    if world.processes > 1:
        _check_agreement(world, f"{kind} {op if kind == 'reduce' else root} of {[str(jax.typeof(v)) for v in values]}")
    values = [v.astype(wire_dtype(v.dtype)) for v in values]
    parts, ops = [], []
    for worker, device in zip(world.workers, world.devices, strict=True):
        row = [jnp.zeros(1)]
        if weight is not None:
            w = jnp.asarray(weight)
            row += [w, *(v * w.astype(v.dtype) for v in values)]
        elif kind == "gather":
            row += [jnp.zeros((world.size, *v.shape), v.dtype).at[worker].set(v) for v in values]
        elif kind == "broadcast":
            row += [v if worker == root else jnp.zeros_like(v) for v in values]
        else:
            row += values
        parts.append([jax.device_put(p, device) for p in row])
        ops = ["sum"] + [op if kind == "reduce" and op != "mean" else "sum"] * (len(row) - 1)
    results, _ = world.exchange(parts, ops, np.zeros(1, np.float32))
    out = [jnp.array(r) for r in results[0][1:]]  # copies: the world may write its buffers again
    if weight is not None:
        _check_weight(out[0])
        out = [s / out[0].astype(s.dtype) for s in out[1:]]
    return jax.block_until_ready([v.astype(dtype) for v, dtype in zip(out, dtypes, strict=True)])


def _check_agreement(world: World, call: str) -> None:
    """Raise unless all processes make the same call: here no plan has been compared before."""
    line = current_line()
    calls = [text.decode().split("@") for text in world.share(f"{call}@{line}".encode())]
    for rank, (theirs, their_line) in enumerate(calls):
        if theirs != call:
            raise DisagreementError(
                f"ranks {rank} and {world.rank} meet in different collectives, outside a program:\n"
                f"    rank {rank}: {theirs}{at(their_line)}\n"
                f"    rank {world.rank}: {call}{at(line)}\n"
                "All ranks must call the same collectives in the same order, on values of the same shapes."
            )


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


def wire_dtype(dtype) -> np.dtype:
    """Half precisions travel as float32, booleans as integers: no MPI sums them, and weights would be rounded."""
    if dtype == jnp.bool_:
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else np.dtype(dtype)
