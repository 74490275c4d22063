"""Arithmetic on trees of parameters, and checks of strategies' arguments."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import adaptive as ad
from adaptive.base.values.numbers import whole
from collectives._all_reduce import all_reduce
from collectives._leaves import error
from collectives.compression._wire import Rounding, Wire, check_format, codec_of

T = TypeVar("T")


def plus(a: T, b: Any) -> T:
    """Add two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), a, b)


def minus(a: T, b: Any) -> T:
    """Subtract two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: (x - y).astype(x.dtype), a, b)


def scaled(tree: T, weight: jax.Array) -> T:
    """Multiply a tree by a number, in single precision at least."""

    def one(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return wide * weight.astype(wide.dtype)

    return jax.tree.map(one, tree)


def zeros(tree: T) -> T:
    """Return a tree of zeros with the shapes and dtypes of `tree`."""
    return jax.tree.map(jnp.zeros_like, tree)


def select(condition: jax.Array, a: T, b: T) -> T:
    """Return `a` where the condition holds, else `b`; trees of the same shapes."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y).astype(jnp.asarray(x).dtype), a, b)


def arrays(tree: T) -> T:
    """Convert a tree's leaves to arrays."""
    return jax.tree.map(jnp.asarray, tree)


def all_reduced(tree: T, when: jax.Array | None, **options: Any) -> T:
    """Apply `all_reduce`, and return zeros in steps in which nothing is sent. Replicated in both cases."""
    if when is None:
        return all_reduce(tree, **options)
    found = all_reduce(tree, when=when, **options)
    # In steps without sending, `found` differs between workers; zeros do not.
    return ad.replicated(jax.tree.map(lambda x: jnp.where(when, x, jnp.zeros((), x.dtype)), found))


def check_optimizer(what: str, optimizer: Any, name: str = "optimizer") -> None:
    """Raise a CollectiveError if the argument `name` is not an optax optimizer."""
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise error(what, f"{name}={optimizer!r} is not an optax optimizer, such as  optax.sgd(0.1)")


def check_count(what: str, name: str, value: Any) -> None:
    """Raise a CollectiveError if the argument `name` is not a positive integer."""
    if whole(value) is None or value < 1:
        raise error(what, f"{name}={value!r} must be a positive integer.")


def rounding_of(what: str, wire: Wire | None, rounding: Rounding | None) -> Rounding:
    """Return `rounding`, or the default: "error_feedback" for compressed formats, else "nearest".

    Called before anything is traced.

    Raises:
      CollectiveError: the format or the rounding is not supported, or they do not go together.
    """
    if wire is None and rounding is not None:
        raise error(what, f'rounding={rounding!r} needs a format to round to:  wire="4bit"')
    found: Rounding = rounding or ("nearest" if codec_of(wire) is None else "error_feedback")
    if wire is not None:
        check_format(what, wire, found)
    return found
