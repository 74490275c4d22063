"""Collectives: values combined over all workers.

A `Collective` object defines an operation: how a value is encoded for sending, how it is reduced over the workers, and
how the result is decoded. Planning, messages, kernels, eager execution and errors use only this object, so a new
collective is one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, current_line, line_search_of
from adaptive.base.reductions import Reduction
from adaptive.base.values.current import current_world
from adaptive.base.values.jaxprs import Primitive, current_source

from .context import only_in_programs, tracing
from .eager import exchange_eagerly
from .sources import ALONE

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """One way to combine a value over all workers. Subclasses are frozen dataclasses too, compared by their fields.

    For example, a mean of neighboring workers sends one row for each worker, as `all_gather` does, and averages three:

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

        def neighbors(x):
            return collective(Neighbors(), [x])[0]

    Attributes of the class, or properties:
      name: what users call it.
      reduces: whether `op` combines the values of parts of the examples to the value of all. If not, a local batch
        runs as one microbatch, and rows of workers without examples arrive as NaN (0 for integers).
      result_is_replicated: whether the result is equal on all workers.
      travels: whether values are sent to other workers. If not, they are combined over one worker's microbatches only.
      shows_workers: whether the result has a part for each worker, and so depends on the split by design.
      must_be_finite: whether a result must be finite even if it does not depend on examples.
      is_linear: whether tangents are combined in the same way as values.
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
        """The reduction of the encoded values: "sum", "max" or "min", or a `Sliced` or `Mixed` reduction."""
        return "sum"

    @property
    def weighted(self) -> bool:
        """Whether this is a mean: encoded values are multiplied by a weight, and the sum is divided by that of the
        weights."""
        return False

    @property
    def needed(self) -> tuple[int, ...]:
        """The workers whose values the result requires; they must have examples."""
        return ()

    def result_shape(self, shape: Shape, capacity: int) -> Shape:
        """Return the shape of the result for a value of `shape`."""
        return shape

    def sent_shape(self, shape: Shape, capacity: int) -> Shape:
        """Return the shape of the encoded value that each worker sends for a value of `shape`."""
        return shape

    def encode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        """Return the encoded value that worker number `worker` sends; traced. `x` has the dtype in which it is sent."""
        return x

    def decode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        """Return the result for the reduced value `x` (divided by the sum of weights, if weighted); traced."""
        return x

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        """Return the result if `x` is equal on all workers, so that nothing is sent; traced.

        Args:
          taking_part: whether each worker has examples in this step; boolean, shape=(capacity,). Workers without
            examples must not count.
        """
        return x

    def result_axis(self, axis: int) -> int:
        """Return the axis of the result that corresponds to axis `axis` of the value, for `jax.vmap`."""
        return axis

    @property
    def label(self) -> str:
        """A short name, for `explain()`."""
        return self.name

    @property
    def about(self) -> str:
        """The name with options, for errors: "all_reduce(op='mean')"."""
        return self.name


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
      how: the collective.
      leaves: arrays of any shape; local or replicated.
      weight: scalar `w_i`, if `how` is weighted.
      names: names of the leaves, for messages and errors.
      when: a boolean scalar that is known before the step. In steps in which it is false nothing is sent, and the
        result is that of this worker alone. By default values are always sent. Replicated.

    Returns:
      One array per leaf; replicated if `how.result_is_replicated` and there is no `when`, else local.
    """
    trace, world = tracing(), current_world.get()
    capacity = trace.capacity if trace else world.capacity if world else 1
    # An empty leaf is its own result, so it is not sent.
    sent = [i for i, leaf in enumerate(leaves) if leaf.size]
    operands = [leaves[i] for i in sent] + ([weight] if how.weighted else []) + ([] if when is None else [when])
    named = tuple(names[i] for i in sent) if names else ()
    params = {"how": how, "names": named, "capacity": capacity, "gated": when is not None}
    results = iter(collective_p.bind(*operands, **params) if sent else ())
    return [
        next(results) if leaf.size else jnp.zeros(how.result_shape(leaf.shape, capacity), leaf.dtype) for leaf in leaves
    ]


class Operands(NamedTuple):
    """The operands of a collective's equation: values, weight and condition."""

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
    # Linear collectives combine tangents like values, with the same weights. There is no rule for the derivative with
    # respect to a weight, and none for extremes.
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
    raise CollectiveError(  # JAX transposes an equation with its line in the driver as the current line
        f"reverse-mode differentiation through a collective: jax.grad of a function that calls {how.name}"
        f"{at(current_line())}. Each "
        "worker would get only its own part of the gradient. Differentiate the local loss, then reduce:\n"
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
