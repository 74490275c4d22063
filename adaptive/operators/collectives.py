"""Collectives: values combined over all workers.

What a collective does is an object, a `Collective`: what is sent of a value, how that is reduced over the workers, and
what comes out. Planning, messages, kernels, eager execution and errors go by that object, so a new one is one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from adaptive.base.current import current_world
from adaptive.base.errors import CollectiveError
from adaptive.base.jaxprs import current_source
from adaptive.base.reductions import Reduction, adds_up
from adaptive.base.source_lines import at, current_line, line_search_of

from .context import only_in_programs, tracing
from .eager import exchange_eagerly
from .sources import ALONE

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """One way to combine a value over all workers. Subclasses are frozen dataclasses too, compared by their fields.

    A mean of neighboring workers, say, sends one row for each worker, as `all_gather` does, and takes three of them:

        @dataclass(frozen=True)
        class Neighbors(Collective):
            name = "neighbors"
            result_is_replicated = False

            def sent_shape(self, shape, capacity):
                return (capacity, *shape)

            def encode(self, x, worker, capacity):
                return jnp.zeros((capacity, *x.shape), x.dtype).at[worker].set(x)

            def decode(self, x, worker, capacity):
                return (x[worker - 1] + x[worker] + x[(worker + 1) % capacity]) / 3

            def of_replicated(self, x, taking_part):
                return x

        def neighbors(x):
            return collective(Neighbors(), [x])[0]

    Attributes of the class, or properties:
      name: what users call it.
      op: how what workers send is reduced: "sum", "max" or "min", or a `Sliced` or `Mixed` reduction.
      weighted: whether it is a mean: what is sent is multiplied by a weight, and what has arrived divided by their sum.
      reduces: whether values of parts of the examples (of workers, of microbatches) combine by `op` to that of all. If
        not, a local batch of which it takes a value runs as one call.
      result_is_replicated: whether all workers get the same.
      travels: whether anything is sent to other workers. What does not is combined over the microbatches of one worker.
      shows_workers: whether what comes out tells of each worker by itself, so that it goes by the split on purpose.
      must_be_finite: whether a result that is not finite is a fault, whatever it is made of. Of what reduces values of
        examples it always is.
      is_linear: whether tangents are combined as values are.
    """

    name = "collective"
    reduces = False
    result_is_replicated = True
    travels = True
    shows_workers = False
    must_be_finite = False
    is_linear = True

    @property
    def op(self) -> Reduction:
        """How what workers send is reduced: "sum", "max" or "min", or a `Sliced` or `Mixed`."""
        return "sum"

    @property
    def weighted(self) -> bool:
        """Whether it is a mean."""
        return False

    @property
    def needed(self) -> tuple[int, ...]:
        """Workers without whose value there is no result: they must take examples."""
        return ()

    def result_shape(self, shape: Shape, capacity: int) -> Shape:
        """Return the shape of the result for a value of `shape`."""
        return shape

    def sent_shape(self, shape: Shape, capacity: int) -> Shape:
        """Return the shape of what each worker sends for a value of `shape`."""
        return shape

    def encode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        """Return what worker number `worker` sends; traced. `x` has the dtype in which it travels."""
        return x

    def encode_nothing(self, shape: Shape, dtype: np.dtype, worker: int, capacity: int) -> jax.Array:
        """Return what a worker sends that has no examples, and so no value of `shape`: what changes nothing where
        values are reduced; else what `encode` makes of NaN, or of 0 among integers.
        """
        if self.reduces:
            return jnp.full(self.sent_shape(shape, capacity), _neutral(self.op, dtype), dtype)
        unknown = np.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
        return self.encode(jnp.full(shape, unknown, dtype), worker, capacity)

    def decode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        """Return the result, of what has been reduced over the workers (and divided by the sum of weights); traced."""
        return x

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        """Return the result where all workers have `x`, so that nothing is sent; traced.

        Args:
          taking_part: whether each worker takes examples in this step; boolean, shape=(capacity,). Of the others
            nothing may be counted, as where values are sent.
        """
        return x

    def result_axis(self, axis: int) -> int:
        """Return which axis of the result is a value's axis `axis`: what `jax.vmap` has mapped."""
        return axis

    @property
    def label(self) -> str:
        """In a word, for `explain()`."""
        return self.name

    @property
    def about(self) -> str:
        """With its options, for errors: "all_reduce(op='mean')"."""
        return self.name


def _neutral(op: Reduction, dtype: np.dtype) -> Any:
    """Return the value that changes nothing when it is combined with another."""
    if adds_up(op):
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if op == "max" else np.inf
    return jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max


collective_p = Primitive("collective")
collective_p.multiple_results = True
only_in_programs(collective_p)


def collective(
    how: Collective,
    leaves: Sequence[jax.Array],
    *,
    weight: jax.Array | None = None,
    names: Sequence[str] = (),
    when: jax.Array | None = None,
) -> list[jax.Array]:
    """Combine `leaves` over all workers: the primitive behind everything in `collectives`.

    Args:
      how: what is done.
      leaves: arrays of any shape; local or replicated.
      weight: scalar `w_i`; where `how` is weighted.
      names: what to call each leaf in messages and errors.
      when: a boolean scalar, replicated, that is known before the step: in steps in which it is false nothing is sent,
        and the result is what the worker would get if it were alone. By default it is sent in all.

    Returns:
      One array per leaf; replicated, or as `how` says; with `when`, local.
    """
    trace, world = tracing(), current_world.get()
    capacity = trace.capacity if trace else world.capacity if world else 1
    # An empty leaf is its own result, and equal on all workers: nothing of it is sent.
    sent = [i for i, leaf in enumerate(leaves) if leaf.size]
    operands = [leaves[i] for i in sent] + ([weight] if how.weighted else []) + ([] if when is None else [when])
    named = tuple(names[i] for i in sent) if names else ()
    params = {"how": how, "names": named, "capacity": capacity, "gated": when is not None}
    results = iter(collective_p.bind(*operands, **params) if sent else ())
    return [
        next(results) if leaf.size else jnp.zeros(how.result_shape(leaf.shape, capacity), leaf.dtype) for leaf in leaves
    ]


class Operands(NamedTuple):
    """A collective's operands: its values, and behind them what goes with all of them."""

    values: Sequence[Any]
    weight: Any | None
    when: Any | None


def operands(given: Sequence[Any], params: dict[str, Any]) -> Operands:
    """Return the roles of an equation's operands, given its parameters."""
    n = len(given) - params["how"].weighted - params["gated"]
    weight = given[n] if params["how"].weighted else None
    return Operands(given[:n], weight, given[-1] if params["gated"] else None)


@collective_p.def_abstract_eval
def _collective_abstract(*given, **params):
    how, capacity = params["how"], params["capacity"]
    return [jax.core.ShapedArray(how.result_shape(v.shape, capacity), v.dtype) for v in operands(given, params).values]


@collective_p.def_impl
def _collective_eager(*given, **params):
    values, weight, when = operands(given, params)
    if not params["how"].travels or (when is not None and not when):
        return [params["how"].of_replicated(v, ALONE) for v in values]
    return exchange_eagerly(params["how"], values, weight=weight)


def _collective_jvp(primals, tangents, **params):
    # Linear in its values, so tangents are combined as values are: with the same weights. A weight that itself is
    # differentiated, and the extremes, have no such rule.
    how, n = params["how"], len(operands(primals, params).values)
    weight = operands(tangents, params).weight
    moving_weight = how.weighted and not isinstance(weight, ad.Zero)
    if moving_weight or not how.is_linear:
        what = f"{how.name} cannot be differentiated with respect to its weight" if moving_weight else how.about
        what += "" if moving_weight else " cannot be differentiated"
        raise CollectiveError(f"{what}{at(current_line())}. Differentiate the local value and reduce the gradient.")
    dense = [ad.instantiate_zeros(t) for t in tangents[:n]]
    return collective_p.bind(*primals, **params), collective_p.bind(*dense, *primals[n:], **params)


def _collective_transpose(cotangents, *given, how, **params):
    raise CollectiveError(  # JAX transposes an equation in the place of the driver that it stems from
        f"reverse-mode differentiation through a collective: jax.grad of a function that calls {how.name}"
        f"{at(current_line())}. Each "
        "worker would get only its own share of the gradient. Differentiate the local loss, then reduce:\n"
        "    loss, grads = jax.value_and_grad(local_loss)(params, batch)\n"
        "    grads = comm.all_reduce(grads)" + line_search_of(current_source())
    )


def _collective_batch(given, dims, **params):
    how, mapped = params["how"], operands(dims, params)
    for what, dim in (("weight", mapped.weight), ("when", mapped.when)):
        if dim is not None:
            raise CollectiveError(
                f"{how.name}: {what}= must be one scalar per worker, not mapped by vmap{at(current_line())}."
            )
    results = collective_p.bind(*given, **params)
    return results, [d if d is None else how.result_axis(d) for d in mapped.values]  # None: not mapped


ad.primitive_jvps[collective_p] = _collective_jvp
ad.primitive_transposes[collective_p] = _collective_transpose
batching.primitive_batchers[collective_p] = _collective_batch
