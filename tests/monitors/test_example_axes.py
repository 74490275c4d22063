"""The axis of the examples, followed through single equations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal

from monitors._example_axes import SAME, TOTAL, Interacting, PerExample, layouts_of

N = 4


def layout(function, *shapes, axes):
    """Return the layout of a function's result; `axes`: of the examples, by argument; None where there is none."""
    closed = jax.make_jaxpr(function)(*[jnp.ones(shape) for shape in shapes])
    known = dict(zip(closed.jaxpr.invars, [SAME if axis is None else PerExample(axis) for axis in axes], strict=True))
    for eqn in closed.jaxpr.eqns:
        found = layouts_of(eqn, [SAME if isinstance(v, Literal) else known[v] for v in eqn.invars], N)
        known.update(zip(eqn.outvars, found, strict=True))
    return known[closed.jaxpr.outvars[0]]


@pytest.mark.parametrize(
    ("function", "shape", "axis", "expected"),
    [
        (lambda x: x.reshape(2, N, 3).transpose(1, 2, 0), (2, N, 3), 1, PerExample(0)),
        (lambda x: x.reshape(N * 6, 2), (N, 3, 2, 2), 0, PerExample(0)),
        (lambda x: x.sum(0), (3, N), 1, PerExample(0)),
        (lambda x: x.sum(), (3, N), 1, TOTAL),
        (lambda x: jnp.cumsum(x, 0), (3, N), 1, PerExample(1)),
        (lambda x: x[:, ::-1][None], (N, 3), 0, PerExample(1)),
        (lambda x: jnp.unstack(x)[1], (3, 2, N), 2, PerExample(1)),
        (lambda x: jnp.unstack(x, axis=2)[1], (3, N, 2), 1, PerExample(1)),
        (lambda x: jax.lax.top_k(x, 2)[0], (N, 3), 0, PerExample(0)),
        (lambda x: jnp.stack([x, 2 * x], axis=1), (3, N), 1, PerExample(2)),
        (lambda x: jnp.stack([x, 2 * x], axis=2), (3, N), 1, PerExample(1)),
    ],
)
def test_it_is_where_the_operation_puts_it(function, shape, axis, expected):
    assert layout(function, shape, axes=[axis]) == expected


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.reshape(3, N), (N, 3)),
        (lambda x: jnp.cumsum(x, 0), (N, 3)),
        (lambda x: x[1:], (N, 3)),
        (lambda x: x.max(0), (N, 3)),
        (lambda x: jnp.unstack(x)[1], (N, 3)),
        (lambda x: jax.lax.top_k(x, 2, axis=0)[0], (N, 3)),
        (lambda x: x @ x.T, (N, 3)),
        (lambda x: x - x.sum(0, keepdims=True), (N, 3)),
    ],
)
def test_operations_that_may_mix_examples_end_the_trail(function, shape):
    assert isinstance(layout(function, shape, axes=[0]), Interacting)


@pytest.mark.parametrize(
    ("text", "shapes", "axes", "expected"),
    [
        ("bd,dh->bh", [(N, 3), (3, 2)], [0, None], PerExample(0)),
        ("hd,bd->hb", [(2, 3), (N, 3)], [None, 0], PerExample(1)),
        ("bqd,bkd->bqk", [(N, 3, 2), (N, 5, 2)], [0, 0], PerExample(0)),
        ("hkbd,hde->hkbe", [(2, 3, N, 5), (2, 5, 6)], [2, None], PerExample(2)),
        ("hde,hkbd->hekb", [(2, 5, 6), (2, 3, N, 5)], [None, 2], PerExample(3)),
        ("bd,bd->", [(N, 3), (N, 3)], [0, 0], TOTAL),
        ("bd,b->d", [(N, 3), (N,)], [0, None], TOTAL),
    ],
)
def test_products(text, shapes, axes, expected):
    assert layout(lambda a, b: jax.lax.dot_general(a, b, _numbers(text)), *shapes, axes=axes) == expected


def _numbers(text):
    left, right = text.partition("->")[0].split(",")
    batch = [c for c in text.partition("->")[2] if c in left and c in right]
    both = [c for c in left if c in right and c not in batch]
    return tuple(tuple([side.index(c) for c in chosen] for side in (left, right)) for chosen in (both, batch))
