"""What strategies do to trees of parameters."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import adaptive as ad
from collectives._all_reduce import all_reduce
from collectives._leaves import error

T = TypeVar("T")


def plus(a: T, b: Any) -> T:
    """The sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), a, b)


def minus(a: T, b: Any) -> T:
    """The difference of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: (x - y).astype(x.dtype), a, b)


def zeros(tree: T) -> T:
    """A tree of zeros, as arrays."""
    return jax.tree.map(jnp.zeros_like, tree)


def select(condition: jax.Array, a: T, b: T) -> T:
    """One of two trees of the same shapes."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y).astype(jnp.asarray(x).dtype), a, b)


def arrays(tree: T) -> T:
    """Parameters as arrays."""
    return jax.tree.map(jnp.asarray, tree)


def all_reduced(tree: T, when: jax.Array | None, **options: Any) -> T:
    """`all_reduce`, and zeros in steps in which it is not sent. Replicated in both."""
    if when is None:
        return all_reduce(tree, **options)
    found = all_reduce(tree, when=when, **options)
    # What is not sent is each worker's own; zeros, which take its place, are the same on all.
    return ad.replicated(jax.tree.map(lambda x: jnp.where(when, x, jnp.zeros((), x.dtype)), found))


def check_optimizer(what: str, optimizer: Any, name: str = "optimizer") -> optax.GradientTransformation:
    """An optimizer as optax has them.

    Raises:
      CollectiveError: it is none.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise error(what, f"{name}={optimizer!r} is no optimizer of optax, such as  optax.sgd(0.1)")
    return optimizer


def check_wire(what: str, wire: DTypeLike | None) -> DTypeLike | None:
    """A format of two bytes, or none, before anything is traced.

    Raises:
      CollectiveError: sums cannot travel in it.
    """
    try:
        known = wire is None or jnp.dtype(wire) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    except TypeError:
        known = False
    if not known:
        raise error(what, f"wire={wire!r} is no format of two bytes:  wire=jnp.bfloat16")
    return wire
