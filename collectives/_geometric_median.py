"""The geometric median of a few vectors of any magnitude, computed from their inner products.

Squares of float32 overflow above 1.8e19, and a sum of squares loses terms 1e4 times smaller than its largest one.
A bad worker may send either. Two things therefore differ from the textbook:

* Vectors are taken relative to a reference point near the good ones, the coordinate-wise median. Inner products of good
  vectors then do not contain a bad vector's magnitude.
* Elements are divided into three ranges of magnitude. Each range has its own scale, at which squares neither overflow
  nor underflow (Blue 1978, "A portable Fortran program to find the Euclidean norm of a vector"). Inner products remain
  sums over elements, so those of slices can be added.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_STEPS = 2000  # iterations of Weiszfeld's algorithm at most; each costs the cube of the number of workers
_EXACT = jax.lax.Precision.HIGHEST  # otherwise a GPU multiplies float32 with fewer bits
_RANGES = 3  # of magnitudes: tiny, ordinary, huge
_ZERO = -(1 << 20)  # stands for the exponent of a vector of zeros: less than all others


def inner_products(rows: jax.Array) -> jax.Array:
    """Return the inner products of all pairs of vectors, per range of magnitude. Additive over elements.

    Args:
      rows: shape=(workers, elements); finite.

    Returns:
      shape=(3 * workers, 3 * workers): tiny, ordinary and huge elements of each vector, each scaled.
    """
    n, dtype = len(rows), rows.dtype
    size, top = jnp.abs(rows), jnp.finfo(dtype).maxexp
    tiny, huge = size < 2.0 ** (-15 * top // 32), size > 2.0 ** (top // 4)
    ordinary = jnp.where(tiny | huge, 0, rows)

    def product(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x.T, precision=_EXACT)

    def of_all() -> jax.Array:
        scaled = [jnp.where(tiny, rows * 2.0 ** _scale(dtype, 0), 0), ordinary]
        return product(jnp.concatenate([*scaled, jnp.where(huge, rows * 2.0 ** _scale(dtype, 2), 0)]))

    def of_ordinary() -> jax.Array:
        return jnp.pad(product(ordinary), n)

    return jax.lax.cond(jnp.any(huge | (tiny & (rows != 0))), of_all, of_ordinary)


def _scale(dtype: jax.typing.DTypeLike, which: int) -> int:
    """Return the exponent of two by which elements of a range of magnitude are multiplied."""
    return (1 - which) * 5 * jnp.finfo(dtype).maxexp // 8


class Weights(NamedTuple):
    """The geometric median, relative to the reference point, as a linear combination of vectors.

        sum_i factors[i] * 2^common * (vectors[i] * 2^-exponents[i])

    In this order no product overflows, and no significant one underflows.
    """

    factors: jax.Array  # shape=(workers,)
    exponents: jax.Array  # shape=(workers,), integers
    common: jax.Array  # integer

    def combine(self, rows: jax.Array) -> jax.Array:
        """Return the linear combination of `rows`; shape=(elements,)"""
        units = jnp.ldexp(rows, -jnp.maximum(self.exponents, -2 * jnp.finfo(rows.dtype).maxexp)[:, None])
        factors = self.factors.astype(rows.dtype)[:, None]
        return jnp.ldexp(jnp.where(factors != 0, factors * units, 0).sum(0), self.common)


def geometric_median(products: jax.Array, weights: jax.Array) -> Weights:
    """Find the point with the least weighted sum of distances to all vectors, by Weiszfeld's iteration.

    Each vector is written as a length (a power of two) times a direction. Lengths are in units of the median length,
    and clipped at 2^32 units (float64: 2^256), beyond which only the direction affects the result.

    Args:
      products: `inner_products` of all vectors, relative to the reference point.
      weights: shape=(workers,); a vector with weight 0 is ignored.
    """
    n, dtype, top = len(weights), products.dtype, jnp.finfo(products.dtype).maxexp
    blocks = products.reshape(_RANGES, n, _RANGES, n).transpose(0, 2, 1, 3)
    scales = jnp.array([_scale(dtype, which) for which in range(_RANGES)], jnp.int32)

    squares = jnp.stack([jnp.diagonal(blocks[which, which]) for which in range(_RANGES)])
    lengths = jnp.where(squares > 0, jnp.frexp(jnp.sqrt(squares))[1] - scales[:, None], _ZERO)
    exponents = lengths.max(0)
    shift = -scales[:, None, None, None] - scales[None, :, None, None]
    shift = shift - exponents[None, None, :, None] - exponents[None, None, None, :]
    shift = jnp.clip(shift, -4 * top, 4 * top)
    units = jnp.ldexp(jnp.ldexp(blocks, shift // 2), shift - shift // 2).sum((0, 1))  # inner products of the directions

    common = _median(exponents, weights)
    length = jnp.ldexp(jnp.ones(n, dtype), jnp.clip(exponents - common, -top // 4, top // 4))
    length = jnp.where(exponents == _ZERO, 0, length)

    def distances(shares: jax.Array) -> jax.Array:
        """Return the vectors' distances from their mean with weights `shares`, without cancellation near a vector."""
        others = jnp.where(jnp.eye(n, dtype=bool), 0, shares).sum(1)
        away = jnp.where(jnp.eye(n, dtype=bool), others * length, -shares * length)
        return jnp.sqrt(jnp.maximum((jnp.matmul(away, units, precision=_EXACT) * away).sum(1), 0))

    def pulled(shares: jax.Array) -> jax.Array:
        """Return the weights after one step of Weiszfeld's algorithm: inversely proportional to the distances."""
        pull = weights / jnp.maximum(distances(shares), jnp.finfo(dtype).eps)
        return pull / pull.sum()

    def moves(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        steps, before, shares = state
        moved = jnp.abs(shares - before) * jnp.maximum(length, 1)
        return (steps < _STEPS) & (moved.max() > 2 * jnp.finfo(dtype).eps)

    near = weights / (1 + length)
    start = jnp.zeros((), jnp.int32), jnp.full_like(near, jnp.inf), near / near.sum()
    shares = jax.lax.while_loop(moves, lambda state: (state[0] + 1, state[2], pulled(state[2])), start)[2]
    # If half of the weight is at the reference point, that point is the median.
    return Weights(jnp.where(common == _ZERO, 0, shares * length), exponents, common)


def _median(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted lower median; scalar."""
    order = jnp.argsort(values)
    return values[order][jnp.argmax(jnp.cumsum(weights[order]) >= weights.sum() / 2)]
