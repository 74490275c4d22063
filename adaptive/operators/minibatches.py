"""Several local steps in one step of a program: the local batch, cut into minibatches."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.errors import BatchSizeError, DriverError
from adaptive.base.numbers import whole
from adaptive.base.where import at, current_line

from .context import tracing

T = TypeVar("T")


class NotEqualPartsError(BatchSizeError):
    """A batch cannot be cut into that many minibatches of equal size."""

    def __init__(self, steps: int, message: str):
        super().__init__(message)
        self.steps = steps


def minibatches(batch: T, steps: int) -> T:
    """Cut the local batch into minibatches of equal size, in order, to take a local step on each.

        def driver(state, batch):                      # a round of federated averaging
            params, losses = jax.lax.scan(local_step, state["params"], ad.minibatches(batch, 8))
            return {"params": comm.all_reduce(params)}, {"loss": comm.all_reduce(losses.mean())}

    A driver that calls this is run on whole local batches. Rule 4, by which a batch may run as several kernel calls as
    if each were a worker, would be wrong here: two calls would be two clients, that take as many steps each on half of
    the examples. So every new batch size is compiled (behind the steps, the old size going on meanwhile), and batch
    sizes, and so the global batch, are multiples of `steps`.

    Args:
      batch: the driver's batch, or parts of it: a pytree of arrays with the examples on the leading axis.
      steps: how many minibatches; a Python number.

    Returns:
      `batch` with leaves of shape `(steps, examples / steps, ...)`. Local.

    Raises:
      DriverError: `steps` is no positive integer, or a leaf has other examples than the batch.
      BatchSizeError: outside a program, examples that cannot be cut so. In a program sizes are such that they can.

    References:
      McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", algorithm 1.
    """
    where = at(current_line())
    steps = _check_steps(steps, where)
    trace = tracing()
    if trace is not None:
        trace.minibatches.append((steps, where))
        _check_whole(trace.examples, steps, where)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or (trace is not None and shape[0] != trace.examples):
            wanted = "one row" if trace is None else f"{trace.examples} rows, one"
            raise DriverError(
                f"minibatches{where}: batch{jax.tree_util.keystr(path)} has shape {shape}; it must have {wanted} for "
                "each example of the local batch."
            )
        _check_whole(shape[0], steps, where)
    return jax.tree.map(lambda a: jnp.reshape(a, (steps, len(a) // steps, *jnp.shape(a)[1:])), batch)


def _check_steps(steps: int, where: str) -> int:
    number = whole(steps)
    if number is None or number < 1:
        raise DriverError(f"minibatches{where}: steps= is a number known while tracing, 1 or more; got {steps!r}.")
    return number


def _check_whole(examples: int, steps: int, where: str) -> None:
    if examples % steps:
        raise NotEqualPartsError(
            steps, f"minibatches{where}: {examples} examples cannot be cut into {steps} minibatches of equal size."
        )
