"""`asynchronous_mean`: the mean of two replicas, without waiting."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from adaptive.extend import SCHEDULES, read_peer

from ._leaves import error, leaves_of

T = TypeVar("T")
Peer = Literal["random", "ring"]

_NAME = "asynchronous_mean"


def asynchronous_mean(tree: T, *, peer: Peer = "random") -> T:
    """Average this worker's replica with the latest one that another worker has published, without waiting.

    Publishes `tree`, reads the latest publication of worker j, and returns

        (x_i + x_j) / 2

    which is one half of asynchronous decentralised SGD (Lian et al. 2018, algorithm 1), as KungFu has it
    (`PairAveragingOptimizer`, Mai et al. 2020): the other worker takes no part in it, and changes its own replica in an
    update of its own. The gradient is of the replica before, and is applied to the mean. May stand in a loop: then a
    worker looks at another one in each local step, however long others take for theirs. A driver for that cuts its
    batch by `ad.minibatches(batch, size=…)`, and averages the replicas at the end of the round, by `all_reduce`.

    Only publications of the same round, that is of this step of the program, are read. Without any, the result is
    `tree`.

    A driver that calls this is run on whole local batches: each kernel call would be a replica of its own. What is read
    is one whole tree, never parts of two. The result depends on the workers' speeds, so two runs are not bitwise equal.
    Under differentiation the other worker's publication is a constant.

    Args:
      tree: a pytree of floats and complex numbers, of the same shapes on all workers. Local.
      peer: who worker j is: "random", one of the others, drawn anew in each update by a counter and the program's seed;
        or "ring", one of the two neighbors by number, in turn. Of those, one that has published.

    Returns:
      A tree of the same shapes and dtypes. Local.

    Raises:
      CollectiveError: outside a program; in a world that has no mailbox; for integers and what else has no mean; or the
        driver maps it by `jax.vmap`.

    Example:
      >>> import jax, jax.numpy as jnp, adaptive as ad, collectives as comm
      >>> def local_step(w, x):
      ...     grad = jax.grad(lambda w: ((w - x) ** 2).mean())(w)
      ...     return comm.asynchronous_mean(w) - 0.5 * grad, None
      >>> def driver(w, batch):  # a round
      ...     w, _ = jax.lax.scan(local_step, w, ad.minibatches(batch, size=2))
      ...     return comm.all_reduce(w), {}
      >>> program = ad.Program(driver, jnp.zeros(()), jnp.ones(8), global_batch=8)
      >>> _ = program.step()
      >>> float(program.state)
      1.0

    References:
      Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent".
      Mai et al. 2020, "KungFu: Making Training in Distributed Machine Learning Adaptive".
    """
    if peer not in SCHEDULES:
        raise error(_NAME, f"peer={peer!r} is none of 'random', 'ring'.")
    leaves = list(leaves_of(_NAME, tree, _problem_of).values())
    filled = [leaf for leaf in leaves if leaf.size]
    if not filled:
        return tree
    dtypes = list(dict.fromkeys(leaf.dtype for leaf in filled))
    # One vector per dtype, so that each dtype is copied in one piece.
    own = [jnp.concatenate([leaf.ravel() for leaf in filled if leaf.dtype == dtype]) for dtype in dtypes]
    theirs = dict(zip(dtypes, read_peer(own, peer, _NAME), strict=True))
    taken = dict.fromkeys(dtypes, 0)
    means = []
    for leaf in leaves:
        if leaf.size:
            start = taken[leaf.dtype]
            taken[leaf.dtype] += leaf.size
            other = theirs[leaf.dtype][start : start + leaf.size].reshape(leaf.shape)
            leaf = 0.5 * leaf + 0.5 * other  # bitwise equal to both if they are equal
        means.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(tree), means)


def _problem_of(dtype: Any) -> str | None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return f"{dtype}, of which there is no mean of two. Leave it out of the tree."
    return None
