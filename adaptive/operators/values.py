"""Values of the running program that a driver can read."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.current import current_world, why_not_alone

from .context import tracing
from .replication_claims import assert_scope
from .sources import BATCH_SIZE, EXAMPLES, GLOBAL_BATCH, OFFSET, SEED, STEP, WORKER, WORKERS, read

T = TypeVar("T")


def batch_size() -> jax.Array:
    """Return the number of this worker's examples in this step, an int32 scalar. Local.

    Changes without recompilation. 1 outside a program.
    """
    return read(BATCH_SIZE)


def microbatch_size() -> jax.Array:
    """Return the number of examples in this microbatch, an int32 scalar. Local, and different in each microbatch.

    A worker's batch may run as several microbatches of different sizes. Weight a mean over a microbatch by this number,
    and not by `batch_size()`. Changes without recompilation. 1 outside a program.

    Example:
      >>> total = comm.all_reduce(mean * ad.microbatch_size(), op="sum") / ad.global_batch()     # doctest: +SKIP
    """
    return read(EXAMPLES).astype(jnp.int32)


def global_batch() -> jax.Array:
    """Return the number of all workers' examples in this step, an int32 scalar. Replicated.

    Changes without recompilation. 1 outside a program.
    """
    return read(GLOBAL_BATCH)


def step_number() -> jax.Array:
    """Return the number of completed steps, an int32 scalar. Replicated. 0 outside a program."""
    return read(STEP)


def worker_index() -> jax.Array:
    """Return this worker's slot number, an int32 scalar. Local. 0 outside a program."""
    return read(WORKER)


def num_workers() -> jax.Array:
    """Return the number of workers with examples in this step, an int32 scalar. Replicated.

    Equals `comm.all_reduce(1, op="sum")`, without a message. Changes without recompilation. It is traced, so use
    `ad.capacity()` for shapes. Outside a program: the number of members of the world, or 1 without a world.

    Raises:
      CollectiveError: outside a program and a world, in one of several processes.

    Example:
      >>> import adaptive as ad
      >>> print(ad.num_workers())  # outside a program: one worker
      1
    """
    _check_world("ad.num_workers()")
    return read(WORKERS)


def capacity() -> int:
    """Return the number of worker slots, the maximum number of workers; a Python integer. Replicated. 1 without a
    world.

    It never changes, so shapes may depend on it; gathered values have a row for each slot.

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
    """Assert that values which come from the host are equal on all workers.

    The results of callbacks (`jax.pure_callback`, `io_callback`) and of `jax.lax.rng_uniform` count as local, so the
    state must not depend on them. That they are equal is not checked: if not, each worker trains another model.
    `comm.broadcast(x)` makes them equal, by a message.

    Args:
      tree: a pytree of arrays that are not computed from the batch. Local.

    Returns:
      `tree`, which counts as replicated.

    Raises:
      ReplicationError: when the program is built, if `tree` is computed from the batch.
    """
    return assert_scope("replicated", tree, "ad.replicated")


def step_key() -> jax.Array:
    """Return a PRNG key for this step, from the program's seed. Replicated."""
    return jax.random.fold_in(jax.random.key(read(SEED)), read(STEP))


def example_keys(batch: Any = None) -> jax.Array:
    """Return a PRNG key for each example of the local batch, shape (examples,). Local.

    An example's key in a step does not depend on the worker or microbatch that computes it, so dropout does not depend
    on the split.

    Args:
      batch: the driver's batch; needed only outside a program, where the number of examples is unknown.

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
            f"example_keys(){at(current_line())} outside a program: the number of examples is unknown. "
            "Pass the batch:  ad.example_keys(batch)"
        )
    return jax.vmap(jax.random.fold_in, (None, 0))(step_key(), read(OFFSET) + jnp.arange(examples, dtype=jnp.int32))
