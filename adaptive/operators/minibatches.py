"""Several local steps in one step of a program: the local batch, cut into minibatches."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.errors import BatchSizeError, DriverError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import whole

from .context import Minibatches, tracing

T = TypeVar("T")


class NotEqualPartsError(BatchSizeError):
    """The batch cannot be cut into equal minibatches: it must be a multiple of `multiple` examples."""

    def __init__(self, multiple: int, message: str):
        super().__init__(message)
        self.multiple = multiple


def minibatches(batch: T, steps: int | None = None, *, size: int | None = None) -> T:
    """Cut the local batch into minibatches of equal size, in order, to take a local step on each.

        def driver(state, batch):                      # a round of federated averaging
            params, losses = jax.lax.scan(local_step, state["params"], ad.minibatches(batch, 8))
            return {"params": comm.all_reduce(params)}, {"loss": comm.all_reduce(losses.mean())}

    With `steps=`, all workers take that many local steps. With `size=`, all minibatches have that size, and a worker
    with a larger local batch takes more steps. If batches follow the workers' speeds (`ctrl.balance()`), fast workers
    then do not wait for slow ones.

    The driver runs on whole local batches, because each microbatch would act as a separate client. So every new batch
    size is compiled (in the background; the old size stays in force until then), and local batch sizes are multiples
    of `steps`, or of `size`.

    Args:
      batch: the driver's batch, or parts of it: a pytree of arrays with the examples on the leading axis.
      steps: number of minibatches; a Python number. Either this or `size`.
      size: examples in a minibatch; a Python number.

    Returns:
      `batch` with leaves of shape `(steps, examples / steps, ...)`, or `(examples / size, size, ...)`. Local.

    Raises:
      DriverError: `steps` or `size` is not a positive integer, both or neither are given, or a leaf's leading axis is
        not the batch's.
      BatchSizeError: outside a program, if the number of examples is not a multiple. Programs choose valid sizes.

    References:
      McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", algorithm 1.
    """
    where, trace = at(current_line()), tracing()
    if steps is not None and size is not None:
        raise DriverError(
            f"minibatches{where}: give either steps=, the number of minibatches, or size=, their size; got "
            f"steps={steps!r} and size={size!r}."
        )
    name, given = ("steps", steps) if size is None else ("size", size)
    number = whole(given)
    if number is None or number < 1:
        raise DriverError(f"minibatches{where}: {name}= is a number known while tracing, 1 or more; got {given!r}.")
    parts = f"minibatches of {number}" if size is not None else f"{number} minibatches of equal size"

    def check_whole(examples: int) -> None:
        if examples % number:
            raise NotEqualPartsError(number, f"minibatches{where}: {examples} examples cannot be cut into {parts}.")

    if trace is not None:
        how = (
            f"{number} steps on the whole local batch, not on each microbatch"
            if size is None
            else f"a step on every {number} examples, one after another across the local batch"
        )
        trace.minibatches.append(Minibatches(number, f"minibatches{where} takes {how}"))
        check_whole(trace.examples)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or (trace is not None and shape[0] != trace.examples):
            wanted = "one row" if trace is None else f"{trace.examples} rows, one"
            raise DriverError(
                f"minibatches{where}: batch{jax.tree_util.keystr(path)} has shape {shape}; it must have {wanted} for "
                "each example of the local batch."
            )
        check_whole(shape[0])

    def cut(leaf: jax.Array) -> jax.Array:
        other = len(leaf) // number
        return jnp.reshape(leaf, (*((number, other) if size is None else (other, number)), *jnp.shape(leaf)[1:]))

    return jax.tree.map(cut, batch)
