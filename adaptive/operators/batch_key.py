"""`ad.batch_key()`: one key for the batch, whose random numbers are drawn example by example.

Layers such as dropout draw numbers for all rows of their input from one key. With an ordinary key, a row's numbers
depend on its position in the microbatch, so training would depend on the split. This key has a PRNG implementation of
its own: numbers drawn from it have a row per example, and each row is drawn from that example's key. It is computed
from an ordinary key and the position of the microbatch's first example in the step's global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import JaxprEqn, nested

from .sources import OFFSET, read
from .values import step_key

_WORDS = 2  # 32-bit words of an ordinary key
_FOLDED_IN = 0x726F7773  # "rows": makes the keys independent of `step_key()`


def batch_key() -> jax.Array:
    """Return a PRNG key for a whole batch, from which each example gets its own random numbers. Local.

    For layers such as dropout, in models that take one key. An example's numbers in a step do not depend on the worker
    or microbatch that computes it.

    The key can be folded, split and passed to flax like any other. Arrays drawn from it must have the microbatch's
    examples as their leading axis.

    Example:
      >>> net.apply(variables, batch["x"], rngs={"dropout": ad.batch_key()})        # doctest: +SKIP
      >>> model(batch["x"], rngs=nnx.Rngs(dropout=ad.batch_key()))                  # doctest: +SKIP
    """
    words = jax.random.bits(jax.random.fold_in(step_key(), _FOLDED_IN), (_WORDS,), jnp.uint32)
    offset = read(OFFSET).astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.concatenate([words, offset[None]]), impl=_rows())


@cache
def _rows() -> Any:
    """Return the PRNG implementation of these keys."""
    plain = jax.extend.random.threefry_prng_impl

    def fold_in(key: jax.Array, number: Any) -> jax.Array:
        return jnp.concatenate([plain.fold_in(key[:_WORDS], number), key[_WORDS:]])

    def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        keys = plain.split(key[:_WORDS], shape)
        return jnp.concatenate([keys, jnp.broadcast_to(key[_WORDS:], (*shape, 1))], axis=-1)

    def random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        rows = key[_WORDS] + jnp.arange(shape[0], dtype=jnp.uint32)
        return jax.vmap(lambda row: plain.random_bits(plain.fold_in(key[:_WORDS], row), bit_width, shape[1:]))(rows)

    def seed(number: Any) -> jax.Array:
        raise TypeError("batch keys are created by ad.batch_key() only")

    return jax.extend.random.define_prng_impl(
        key_shape=(_WORDS + 1,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name="rows",
        tag="rows",
    )


def check_rows(eqns: Sequence[JaxprEqn], examples: int, line: str = "") -> None:
    """Check that all random numbers drawn from batch keys have one row per example.

    Args:
      line: of the equation in which `eqns` are nested. Functions that JAX has traced before know no line of the user's.

    Raises:
      CollectiveError: an array has another shape.
    """
    for eqn in eqns:
        own = line_of(eqn.source_info) or line
        for jaxpr in nested(eqn):
            check_rows(jaxpr.eqns, examples, own)
        if eqn.primitive.name != "random_bits" or not is_of_batch(eqn.invars[0].aval.dtype):
            continue
        shape = eqn.params["shape"]
        if shape[:1] != (examples,) or eqn.invars[0].aval.shape:
            raise CollectiveError(
                f"random numbers of shape {tuple(shape)} are drawn from ad.batch_key(){at(own)}; "
                f"it gives one row for each of the microbatch's {examples} examples. For numbers that all examples "
                "share, write\n    ad.step_key()\nIn local steps on parts of the batch, cut keys with it:\n"
                '    {**batch, "keys": ad.example_keys()}'
            )


def is_of_batch(dtype: Any) -> bool:
    """Return whether a dtype is that of batch keys."""
    return getattr(dtype, "name", "").endswith("<rows>")
