"""The corners of JAX that the library stands in: each is there, and does what it is used for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.base.values import jaxprs


def equations(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr.eqns


def the(name, eqns):
    (found,) = [e for e in eqns if e.primitive.name == name]
    return found


def test_equations_are_bound_again():
    eqn = the("dot_general", equations(lambda x: x @ x, jnp.eye(2)))
    (result,) = jaxprs.bind(eqn, [2 * jnp.eye(2), 3 * jnp.eye(2)])
    np.testing.assert_array_equal(result, 6 * np.eye(2))
    eqn = the("scan", equations(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x), jnp.ones(3)))
    total, sums = jaxprs.bind(eqn, [jnp.float32(1.0), jnp.arange(3.0)])
    assert float(total) == 4.0
    assert sums.tolist() == [1.0, 1.0, 2.0]


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), *tangents))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (jax.jit(jnp.sin), {}),
        (with_jvp, {"derivatives": True}),
        (with_vjp, {"derivatives": True}),
        (jax.checkpoint(jnp.sin), {"checkpoints": True}),
    ],
    ids=["jit", "jvp", "vjp", "checkpoint"],
)
def test_a_jaxpr_that_is_only_called_is_recognized(function, options):
    (eqn,) = equations(function, 1.0)
    found = jaxprs.called(eqn, **options)
    assert found is not None
    assert len(found.jaxpr.invars) == 1
    assert not options or jaxprs.called(eqn) is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jax.lax.scan(lambda c, _: (c, None), x, length=2)[0], "jax.lax.scan (or fori_loop)"),
        (lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, x), "jax.lax.while_loop"),
        (lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), "jax.lax.cond"),
        (jax.checkpoint(jnp.sin), "jax.checkpoint"),
    ],
)
def test_users_know_them_by_these_names(function, name):
    held = [e for e in equations(function, 1.0) if list(jaxprs.nested(e))]
    assert [jaxprs.holder(e) for e in held] == [name]
    assert jaxprs.is_checkpoint(held[0]) == (name == "jax.checkpoint")
