"""`ad.batch_key()`: one key for the batch, whose random numbers are drawn example by example.

Layers such as dropout take one key and draw numbers for all rows that they are given. From an ordinary key a row's
numbers go by its place in the microbatch, so that training depends on the split. This key is one of a kind of its own,
which JAX lets libraries define: what is drawn from it has a row per example, and each row is drawn from that example's
key. It is made of an ordinary key and of the place of the call's first example in the step's global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from adaptive.base.errors import CollectiveError
from adaptive.base.source_lines import at, line_of

from .sources import OFFSET, read
from .values import step_key

_WORDS = 2  # of an ordinary key
_FOLDED_IN = 0x726F7773  # "rows": apart from what drivers draw from `step_key()`


def batch_key() -> jax.Array:
    """Return a PRNG key for a whole batch, from which every example draws numbers of its own: for dropout and the like,
    in models that take one key. Local, but what is drawn belongs to the example: whichever worker computes it, in
    whichever call, its numbers in this step are the same.

    It is used as any key is: folded, split, given to flax. What is drawn from it must have the call's examples for its
    leading axis.

    Example:
      >>> net.apply(variables, batch["x"], rngs={"dropout": ad.batch_key()})        # doctest: +SKIP
      >>> model(batch["x"], rngs=nnx.Rngs(dropout=ad.batch_key()))                  # doctest: +SKIP
    """
    words = jax.random.bits(jax.random.fold_in(step_key(), _FOLDED_IN), (_WORDS,))
    offset = read(OFFSET).astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.concatenate([words, offset[None]]), impl=_rows())


@cache
def _rows() -> Any:
    """Return the kind of these keys, which tells JAX how to draw numbers."""
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
        raise TypeError("keys of batches are made by ad.batch_key() alone")

    return jax.extend.random.define_prng_impl(
        key_shape=(_WORDS + 1,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name="rows",
        tag="rows",
    )


def check_rows(eqns: Sequence[JaxprEqn], examples: int) -> None:
    """Check that all random numbers from a batch's key have one row per example.

    Raises:
      CollectiveError: some have another shape.
    """
    for eqn in eqns:
        if not _draws(eqn) or not is_of_batch(eqn.invars[0].aval.dtype):
            continue
        shape = eqn.params["shape"]
        if shape[:1] != (examples,) or eqn.invars[0].aval.shape:
            raise CollectiveError(
                f"random numbers of shape {tuple(shape)} are drawn from ad.batch_key(){at(line_of(eqn.source_info))}; "
                f"it gives one row for each of the call's {examples} examples. For numbers that all examples share, "
                "write\n    ad.step_key()"
            )


def drawn_for_a_microbatch(eqns: Sequence[JaxprEqn], examples: int) -> list[str]:
    """Return the lines at which random numbers for all examples of a microbatch are drawn from one key."""
    found = [
        line_of(eqn.source_info)
        for eqn in eqns
        if _draws(eqn)
        and not eqn.invars[0].aval.shape
        and eqn.params["shape"][:1] == (examples,)
        and not is_of_batch(eqn.invars[0].aval.dtype)
    ]
    return [line for line in dict.fromkeys(found) if line]


def is_of_batch(dtype: Any) -> bool:
    """Whether keys of this dtype draw numbers by rows."""
    return getattr(dtype, "name", "").endswith("<rows>")


def _draws(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "random_bits"
