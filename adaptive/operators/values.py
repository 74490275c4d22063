"""What a driver may ask of the program that runs it."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.current import current_world, why_not_alone
from adaptive.base.errors import CollectiveError
from adaptive.base.source_lines import at, current_line

from .context import tracing
from .replication_claims import assert_scope
from .sources import BATCH_SIZE, EXAMPLES, GLOBAL_BATCH, OFFSET, SEED, STEP, WORKER, WORKERS, read

T = TypeVar("T")


def batch_size() -> jax.Array:
    """This worker's examples in this step, an int32 scalar. Local. No recompile when it changes; 1 outside a
    program.
    """
    return read(BATCH_SIZE)


def microbatch_size() -> jax.Array:
    """Return the number of examples in this microbatch, an int32 scalar. Local, and of the call: a worker's batch may
    run as several calls, each of its own size, so this, and not `batch_size()`, is what to weigh a call's mean by. No
    recompile; 1 outside a program.

    Example:
      >>> total = comm.all_reduce(mean * ad.microbatch_size(), op="sum") / ad.global_batch()     # doctest: +SKIP
    """
    return read(EXAMPLES).astype(jnp.int32)


def global_batch() -> jax.Array:
    """Return the number of all workers' examples in this step, an int32 scalar. Replicated. No recompile when it
    changes; 1 outside a program.
    """
    return read(GLOBAL_BATCH)


def step() -> jax.Array:
    """Steps done before this one, an int32 scalar. Replicated. 0 outside a program."""
    return read(STEP)


def worker() -> jax.Array:
    """This worker's number, an int32 scalar. Local. 0 outside a program."""
    return read(WORKER)


def workers() -> jax.Array:
    """Return the number of workers with examples in this step, an int32 scalar. Replicated. No
    recompile when it changes. Sums count the same workers, so it is `comm.all_reduce(1, op="sum")` at no cost.

    Less than `ad.capacity()` while worker slots are empty or a worker's share is 0. It is not known while the driver is
    traced, so shapes come from `ad.capacity()`. Outside a program: the members of the world, or 1 without a world.

    Raises:
      CollectiveError: outside a program and a world, in one of several processes.

    Example:
      >>> import adaptive as ad
      >>> print(ad.workers())  # outside a program: one worker
      1
    """
    _check_world("ad.workers()")
    trace = tracing()
    if trace is not None:
        trace.hints.append(
            f"ad.workers(){at(current_line())} changes from step to step, and is not known while the driver is traced. "
            "Make shapes of  ad.capacity(), the number of worker slots."
        )
    return read(WORKERS)


def capacity() -> int:
    """Return the number of worker slots: how many workers there can be. A Python number that stays the same, so shapes
    may depend on it; gathered values have a row for each slot. Replicated. 1 without a world.

    Raises:
      CollectiveError: outside a program and a world, in one of several processes.

    Example:
      >>> import adaptive as ad
      >>> ad.capacity()  # outside a program: one worker
      1
    """
    _check_world("ad.capacity()")
    trace, world = tracing(), current_world.get()
    return trace.capacity if trace else world.capacity if world else 1


def _check_world(what: str) -> None:
    alone = why_not_alone() if tracing() is None else None
    if alone:
        raise CollectiveError(
            f"{what}{at(current_line())} outside a program has no world to count: {alone}. Write it inside the "
            "world's block, in the thread that has entered it:  with comm.world(): …"
        )


def replicated(tree: T) -> T:
    """Vouch that values which come from the host are equal on all workers.

    What a callback (`jax.pure_callback`, `io_callback`) brings, or `jax.lax.rng_uniform`, counts as this worker's own,
    since nobody can see that it is not; so it may not go into the state. Where it is the same on all workers, say so.
    It is not checked: with values that differ after all, each worker trains a model of its own. `comm.broadcast(x)`
    makes them equal, for a place on a message.

    Args:
      tree: a pytree of arrays that are not computed from the batch. Local, as far as can be seen.

    Returns:
      `tree`. Replicated, on your word.

    Raises:
      ReplicationError: it is computed from the batch.
    """
    return assert_scope("replicated", tree, "ad.replicated")


def step_key() -> jax.Array:
    """Return a PRNG key for this step, from the program's seed. Replicated."""
    return jax.random.fold_in(jax.random.key(read(SEED)), read(STEP))


def example_keys(batch: Any = None) -> jax.Array:
    """Return a PRNG key for each example of the local batch, shape (examples,). Local, but it belongs to the example:
    whichever worker computes it, in whichever call, its key in this step is the same. So dropout does not depend on the
    split.

    Args:
      batch: the driver's batch; needed outside a program only, where the number of examples is not known.

    Raises:
      CollectiveError: outside a program, without `batch`.
    """
    trace = tracing()
    leaves = jax.tree.leaves(batch)
    if leaves:
        examples = leaves[0].shape[0]
    elif trace is not None:
        examples = trace.examples
    else:
        raise CollectiveError(
            f"example_keys(){at(current_line())} outside a program: how many examples there are is not known. "
            "Say it:  ad.example_keys(batch)"
        )
    return jax.vmap(jax.random.fold_in, (None, 0))(step_key(), read(OFFSET) + jnp.arange(examples, dtype=jnp.int32))
