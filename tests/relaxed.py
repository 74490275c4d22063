"""JAX's usual dtype promotion, for the calls of optax and flax alone: inside they multiply integers by floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import optax

F = TypeVar("F", bound=Callable)


def relaxed(function: F) -> F:
    """`function`, computed and traced under the promotion that JAX has by default; the suite's is strict."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call


def relaxed_tx(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose updates are computed so."""
    return optax.GradientTransformationExtraArgs(tx.init, relaxed(optax.with_extra_args_support(tx).update))
