"""Squared norms of per-example gradients, from the operands and derivatives at each use of a parameter.

A layer's weight `W` of shape (m, n) takes part in T products per example (positions, patches, tokens). With inputs `A`
of shape (T, m) and the loss's derivatives `Y` of shape (T, n) by the results, an example's gradient is `A' Y`, and

    |A' Y|^2 = sum_mn (sum_t A_tm Y_tn)^2 = <A A', Y Y'>

which takes T m n multiplications in the first form, T^2 (m + n) in the second. For T = 1 it is |A|^2 |Y|^2. In a lookup
the rows of A are one-hot, and (A A')_ts is 1 if positions t and s hold the same token. For parameters that are used in
another way, or more than once, the gradient of each example is computed, one leaf at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from adaptive import CollectiveError
from adaptive.base.jaxprs import bind

from ._example_axes import is_elementwise
from ._example_trace import DifferentiatedLoss, Node, TrackedValue, Use
from ._squares import at_least_single

_AT_ONCE = 1 << 24  # elements: gradients of a leaf that take more are computed one example after another
_SAME_NORM = frozenset(("reshape", "transpose", "squeeze", "convert_element_type", "copy", "copy_p"))


class Chosen(NamedTuple):
    """Which examples of a batch have their norms computed: the first `sampled`."""

    examples: int  # of the batch
    sampled: int

    def rows(self, array: jax.Array, axis: int) -> jax.Array:
        """Return these examples' part of an array that has examples along `axis`; shape=(sampled, …)."""
        shape = array.shape
        split = array.reshape(*shape[:axis], self.examples, shape[axis] // self.examples, *shape[axis + 1 :])
        return jnp.moveaxis(jax.lax.slice_in_dim(split, 0, self.sampled, axis=axis), axis, 0)


class GradientPart(NamedTuple):
    """The contribution of one use to the examples' gradients with respect to `node`."""

    node: Node
    arrays: tuple[jax.Array, ...]  # shape=(sampled, …)
    gradient: Callable[..., jax.Array]  # from one example's arrays: its gradient by the node
    squares: Callable[[], jax.Array] | None  # of the examples' gradients, where that is cheap; shape=(sampled,)


def example_squares(
    traced: DifferentiatedLoss,
    leaves: Sequence[Any],
    names: Sequence[str],
    chosen: Chosen,
    only: Collection[int] | None = None,
) -> list[jax.Array]:
    """Return, for each leaf of the parameters, the squared norms of the chosen examples' gradients; shape=(sampled,).

    An example's gradient is scaled so that the mean over examples is the gradient.

    Args:
      only: the leaves whose norms are returned, as indices in increasing order; None for all.

    Raises:
      CollectiveError: a parameter is combined with the batch in an unsupported way.
    """
    wanted = range(len(leaves)) if only is None else only
    found: list[list[GradientPart]] = [[] for _ in leaves]
    for use, derivative in zip(traced.uses, traced.derivatives, strict=True):
        for place, operand in enumerate(use.operands):
            if operand.node is not None:
                for leaf in operand.node.leaves().intersection(wanted):
                    found[leaf].append(_contribution(use, place, operand.node, derivative, chosen, names[leaf]))
    return [
        _of_leaf(index, leaves[index], found[index], leaves, chosen.sampled) * chosen.examples**2 for index in wanted
    ]


def _of_leaf(
    index: int, leaf: Any, contributions: Sequence[GradientPart], leaves: Sequence[Any], sampled: int
) -> jax.Array:
    dtype = at_least_single(leaf.dtype)
    if not contributions:
        return jnp.zeros(sampled, dtype)
    first = contributions[0]
    if len(contributions) == 1 and first.squares is not None and _keeps_norm(first.node):
        return first.squares().astype(dtype)

    def pulled(contribution: GradientPart, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the contribution of this use to one example's gradient with respect to the leaf."""

        def value(this: Any) -> Any:
            return contribution.node.value([this if i == index else other for i, other in enumerate(leaves)])

        node, pull = jax.vjp(value, leaf)
        (gradient,) = pull(contribution.gradient(*arrays).astype(node.dtype).reshape(node.shape))
        return gradient.astype(dtype)

    def one(arrays: Sequence[Sequence[jax.Array]]) -> jax.Array:
        parts = [pulled(c, row) for c, row in zip(contributions, arrays, strict=True)]
        return jnp.sum(jnp.square(sum(parts[1:], parts[0])))

    arrays = [c.arrays for c in contributions]
    return jax.vmap(one)(arrays) if sampled * leaf.size <= _AT_ONCE else jax.lax.map(one, arrays)


def _keeps_norm(node: Node) -> bool:
    """Return whether a value is a reshaped leaf, so that the gradients with respect to both have the same norm."""
    while node.eqn is not None:
        (source, *_) = node.inputs
        if node.eqn.primitive.name not in _SAME_NORM or not isinstance(source, Node):
            return False
        node = source
    return True


def _contribution(use: Use, place: int, node: Node, derivative: jax.Array, chosen: Chosen, name: str) -> GradientPart:
    if is_elementwise(use.eqn):
        return _of_elements(use, place, node, derivative, chosen, name)
    if use.eqn.primitive.name == "concatenate":
        return _of_concatenation(use, place, node, derivative, chosen, name)
    return _of_product(use, place, node, derivative, chosen)


# --- parameters that are added to or multiplied by rows ---------------------------------------------------------------


def _of_elements(use: Use, place: int, node: Node, derivative: jax.Array, chosen: Chosen, name: str) -> GradientPart:
    own = use.operands[place]
    full = jnp.broadcast_to(own.value, derivative.shape)
    (gradient,) = _pull(use.eqn, [o.value for o in use.operands], place, full)(derivative)
    rows = chosen.rows(gradient, use.axis)
    if own.value.ndim == 0:
        return _plain(node, jnp.sum(rows, tuple(range(1, rows.ndim))))
    return _without_copies(node, rows, own.value.shape, use, chosen, name)


def _of_concatenation(
    use: Use, place: int, node: Node, derivative: jax.Array, chosen: Chosen, name: str
) -> GradientPart:
    (gradient,) = _pull(use.eqn, [o.value for o in use.operands], place)(derivative)
    rows = chosen.rows(gradient, use.axis)
    return _without_copies(node, rows, gradient.shape, use, chosen, name)


def _pull(eqn: JaxprEqn, operands: list[Any], place: int, at: Any = None) -> Callable[[jax.Array], tuple[jax.Array]]:
    """Return the transpose of an equation's derivative by one operand."""

    def result(operand: Any) -> Any:
        return bind(eqn, [operand if i == place else other for i, other in enumerate(operands)])[0]

    return jax.vjp(result, operands[place] if at is None else at)[1]


def _without_copies(
    node: Node, rows: jax.Array, shape: tuple[int, ...], use: Use, chosen: Chosen, name: str
) -> GradientPart:
    """Sum derivatives over all copies of each element of the node, whose value has shape `shape`.

    The elements must be copied along the axis of the examples, by the equation itself or by an earlier one.
    """
    rows = _summed(rows, shape, list(range(len(shape))))
    if chosen.examples == 1 or shape[use.axis] == 1:
        return _plain(node, rows.reshape(chosen.sampled, *shape))
    if node.eqn is not None and node.eqn.primitive.name == "broadcast_in_dim" and isinstance(node.inputs[0], Node):
        source = node.eqn.invars[0].aval.shape
        kept = [int(d) for d in node.eqn.params["broadcast_dimensions"]]
        if use.axis not in kept or source[kept.index(use.axis)] == 1:
            return _plain(node.inputs[0], _summed(rows, source, kept).reshape(chosen.sampled, *source))
    raise CollectiveError(
        f"example_norms: parameter {name} has an axis as long as the batch, and `{use.eqn.primitive.name}` combines it "
        'with the axis of the examples. Write mon.example_norms(loss_fn, method="vmap").'
    )


def _summed(rows: jax.Array, shape: tuple[int, ...], kept: list[int]) -> jax.Array:
    """Sum over axes that are new or of size 1 in `shape`, whose axis i is axis `kept[i]` of an example's rows."""
    copied = tuple(1 + d for d, size in zip(kept, shape, strict=True) if size == 1)
    new = tuple(1 + d for d in range(rows.ndim - 1) if d not in kept)
    return jnp.sum(jnp.sum(rows, copied, keepdims=True), new)


def _plain(node: Node, gradients: jax.Array) -> GradientPart:
    def squares() -> jax.Array:
        wide = gradients.astype(at_least_single(gradients.dtype))
        return jnp.sum(jnp.square(wide.reshape(len(wide), -1)), 1)

    return GradientPart(node, (gradients,), lambda gradient: gradient, squares)


# --- products, convolutions and lookups -------------------------------------------------------------------------------


def _of_product(use: Use, place: int, node: Node, derivative: jax.Array, chosen: Chosen) -> GradientPart:
    other = use.operands[1 - place]
    axis = other.layout.axis  # type: ignore[union-attr]
    rows, derivatives = chosen.rows(other.value, axis), chosen.rows(derivative, use.axis)
    own = use.operands[place].value

    def gradient(rows: jax.Array, derivatives: jax.Array) -> jax.Array:
        operands = [own, rows] if place == 0 else [rows, own]
        return _pull(use.eqn, operands, place)(derivatives)[0]

    match use.eqn.primitive.name:
        case "dot_general":
            squares = _squares_of_dot(use, place, rows, derivatives, axis)
        case "conv_general_dilated":
            squares = _squares_of_conv(use, other, derivatives, chosen)
        case _:
            squares = _squares_of_lookup(use, own, rows, derivatives)
    return GradientPart(node, (rows, derivatives), gradient, squares)


def _squares_of_dot(
    use: Use, place: int, rows: jax.Array, derivatives: jax.Array, axis: int
) -> Callable[[], jax.Array] | None:
    contract, batch = use.eqn.params["dimension_numbers"]
    if batch[0]:
        return None
    side, own_rank = 1 - place, use.operands[place].value.ndim
    free = [d for d in range(rows.ndim - 1) if d not in contract[side]]
    inputs = rows.transpose(0, *(1 + d for d in free), *(1 + d for d in contract[side]))
    inputs = inputs.reshape(len(rows), math.prod(inputs.shape[1 : 1 + len(free)]), -1)
    own_free = own_rank - len(contract[place])
    columns = derivatives if side == 0 else jnp.moveaxis(derivatives, range(1, 1 + own_free), range(-own_free, 0))
    columns = columns.reshape(len(rows), inputs.shape[1], -1)
    return lambda: _squares_of_factors(inputs, columns)


def _squares_of_conv(
    use: Use, other: TrackedValue, derivatives: jax.Array, chosen: Chosen
) -> Callable[[], jax.Array] | None:
    params, kernel = use.eqn.params, use.operands[1].value
    numbers = params["dimension_numbers"]
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    axis = numbers.lhs_spec[0]
    per_example = other.value.shape[axis] // chosen.examples
    patches = jax.lax.conv_general_dilated_patches(
        jax.lax.slice_in_dim(other.value, 0, chosen.sampled * per_example, axis=axis),
        [kernel.shape[d] for d in numbers.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=numbers,
    )
    by_example = Chosen(chosen.sampled, chosen.sampled).rows(patches, numbers.out_spec[0])
    inputs, columns = (_channels_last(x, numbers.out_spec[1]) for x in (by_example, derivatives))
    return lambda: _squares_of_factors(inputs, columns)


def _channels_last(rows: jax.Array, channels: int) -> jax.Array:
    """Return shape=(examples, positions, channels)."""
    last = jnp.moveaxis(rows, 1 + channels, -1)
    return last.reshape(len(last), -1, last.shape[-1])


def _squares_of_factors(inputs: jax.Array, columns: jax.Array) -> jax.Array:
    """Return `|A' Y|^2` per example, for A of shape=(examples, t, m) and Y of shape=(examples, t, n)."""
    dtype = at_least_single(inputs.dtype, columns.dtype)
    a, y = inputs.astype(dtype), columns.astype(dtype)
    t, m, n = *a.shape[1:], y.shape[2]
    if t == 1:
        return jnp.sum(jnp.square(a), (1, 2)) * jnp.sum(jnp.square(y), (1, 2))
    if t * (m + n) < m * n:
        return jnp.einsum("btm,bsm,btn,bsn->b", a, a, y, y, optimize=[(0, 1), (0, 1), (0, 1)])
    return jnp.sum(jnp.square(jnp.einsum("btm,btn->bmn", a, y)), (1, 2))


def _squares_of_lookup(
    use: Use, table: jax.Array, rows: jax.Array, derivatives: jax.Array
) -> Callable[[], jax.Array] | None:
    """Return the squared norms for a lookup that takes whole rows of a table, one index each; None for others."""
    numbers, sizes = use.eqn.params["dimension_numbers"], use.eqn.params["slice_sizes"]
    simple = numbers.start_index_map == numbers.collapsed_slice_dims == (0,) and not numbers.operand_batching_dims
    if not simple or tuple(sizes) != (1, *table.shape[1:]) or rows.shape[-1] != 1:
        return None
    tokens = jnp.clip(rows.reshape(len(rows), -1), 0, len(table) - 1)
    counting = [d for d in range(derivatives.ndim - 1) if d not in numbers.offset_dims]
    columns = derivatives.transpose(0, *(1 + d for d in counting), *(1 + d for d in numbers.offset_dims))
    columns = columns.reshape(len(rows), tokens.shape[1], -1)
    columns = columns.astype(at_least_single(columns.dtype))

    def squares() -> jax.Array:
        equal = tokens[:, :, None] == tokens[:, None, :]
        products = jnp.einsum("btn,bsn->bts", columns, columns)
        return jnp.sum(jnp.where(equal, products, 0), (1, 2))

    return squares
