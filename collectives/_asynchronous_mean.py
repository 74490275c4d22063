"""`asynchronous_mean`: the mean of two replicas, without waiting."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from adaptive.operators.peer_read import SCHEDULES, read_peer

from ._leaves import error, leaves_of

T = TypeVar("T")
Peer = Literal["random", "ring"]

_NAME = "asynchronous_mean"


def asynchronous_mean(tree: T, *, peer: Peer = "random") -> T:
    """Average this worker's replica with the latest one that another worker has published, without waiting.

    Publishes `tree`, reads the latest publication of worker j, and returns

        (x_i + x_j) / 2

    This is one half of asynchronous decentralized SGD (Lian et al. 2018, algorithm 1), as in KungFu's
    `PairAveragingOptimizer` (Mai et al. 2020): worker j does not wait, and averages its own replica at its own time.
    Compute the gradient at the replica before the mean, and apply it to the mean.

    To average in each local step, call this in a loop over `ad.minibatches(batch, size=…)`, and average the replicas
    at the end of the round by `all_reduce`. Workers then take their local steps at their own speed.

    Reads only what was published in the same step of the program. If no other worker has published, the result is
    `tree`.

    A driver that calls this is run on whole local batches, because each microbatch would be a replica of its own. The
    tree that is read is always one complete publication. The result depends on the workers' speeds, so two runs are
    not bitwise equal. Under differentiation the other worker's publication is a constant.

    Args:
      tree: a pytree of floats and complex numbers, of the same shapes on all workers. Local.
      peer: selects worker j among those that have published: "random", drawn again in each update from the program's
        seed and a counter; or "ring", the previous and the next worker by turns.

    Returns:
      A tree of the same shapes and dtypes. Local.

    Raises:
      CollectiveError: it is called outside a program, in a world that has no mailbox, under `jax.vmap`, or for leaves
        that are not floats or complex numbers.

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
        raise error(_NAME, f"peer= must be 'random' or 'ring'; got {peer!r}.")
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
        return f"{dtype}, which cannot be averaged. Leave it out of the tree."
    return None
