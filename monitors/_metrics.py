"""Norms of gradients that belong to an optimizer's steps, for noise scales.

An optimizer whose step has a bounded norm gains, per unit of this norm, the *dual* norm of the gradient:

    metric      optimizers             norm of a step                   dual norm of the gradient
    euclidean   SGD                    root of the sum of squares       the same, |g|_2
    sign        Lion, Signum, signSGD  largest element                  sum_j |g_j|
    spectral    Muon                   largest singular value           sum of singular values, |g|_*

With noise of covariance Sigma / b in the mean gradient over b examples, the noise scales are

    sign        (sum_j sigma_j / sum_j |G_j|)^2
    spectral    (tr E[N N']^(1/2) / |G|_*)^2        with N the noise of one example's gradient, a matrix

Both follow from the norms of groups, as the Euclidean one does. Let L(b) be the expected dual norm of the gradient over
b examples. If the elements `G_j / sigma_j` are normally distributed over j, with variance r^2, then `g_j / sigma_j` is
normal with variance `r^2 + 1/b`, and so

    L(b)^2 = (sum_j |G_j|)^2 + (2/pi) (sum_j sigma_j)^2 / b

Likewise for a matrix whose signal is distributed like its noise, with `k(m/n)^2` in place of 2/pi, where k is the mean
singular value of a large matrix of m x n independent elements of variance 1/n: 1 for wide ones, 8/(3 pi) for square
ones (Marchenko and Pastur 1967). So `L^2` takes the place of `|g|^2` in the two estimates of `_anova.py`, and the trace
is divided by k^2.

Where the signal is distributed otherwise, the trace remains exact as long as noise dominates the gradient of each group
(first order in the signal), and the signal becomes the gain of a step that noise dominates: `(2/pi) sum sigma_j
sum G_j^2 / sigma_j`. This is larger than `(sum |G_j|)^2` if few elements have most of the signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ._squares import at_least_single, prepared, squared_norm

Metric = Literal["euclidean", "sign", "spectral"]
METRICS = ("euclidean", "sign", "spectral")
Sets = dict[str, list[int]]


def squared_dual_norm(metric: str, tree: Any, *, averaged: bool = False) -> jax.Array:
    """Return the square of the norm that belongs to a metric, over all leaves: a scalar, float32 or better.

    Args:
      metric: one of `METRICS`; "spectral" only of matrices.
      averaged: whether the leaves are results of messages (see `squared_norm`).
    """
    if metric == "euclidean":
        return squared_norm(tree, averaged=averaged)
    if metric == "sign":
        leaves, dtype = prepared(tree, averaged=averaged)
        norms = [jnp.sum(jnp.abs(leaf).astype(dtype)) for leaf in leaves]
    else:
        norms = [nuclear_norm(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.square(sum(norms[1:], norms[0]))


def nuclear_norm(matrix: jax.Array) -> jax.Array:
    """Return the sum of a matrix's singular values, from the eigenvalues of its product with its transpose.

    The smaller side decides the cost: 0.4 ms for 64 x 192 on one core. A singular value decomposition took 11 ms.
    """
    wide = matrix.astype(at_least_single(matrix.dtype))
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    largest = jnp.max(jnp.abs(wide))
    wide = wide / jnp.where(largest > 0, largest, 1)  # no square leaves the range of the dtype
    eigenvalues = jnp.linalg.eigvalsh(jnp.matmul(wide, wide.T, precision="highest"))
    return largest * jnp.sum(jnp.sqrt(jnp.maximum(eigenvalues, 0)))


def noise_factor(metric: str, leaves: Sequence[Any]) -> float:
    """Return k^2: the noise in the squared dual norm, over the square of the noise's own measure (see above)."""
    if metric == "euclidean":
        return 1.0
    if metric == "sign":
        return 2 / np.pi
    shapes = [sorted(leaf.shape) for leaf in leaves]
    weights = np.array([m * n**0.5 for m, n in shapes])  # of noise that is equal in all elements
    return float(np.average([_mean_singular_value(m / n) for m, n in shapes], weights=weights)) ** 2


def _mean_singular_value(ratio: float) -> float:
    """Return the mean singular value of large m x n matrices of elements of variance 1/n, with m/n = `ratio` <= 1."""
    low, high = 1 - ratio**0.5, 1 + ratio**0.5
    angles = (np.arange(1000) + 0.5) * np.pi / 1000
    s = (low + high) / 2 + (high - low) / 2 * np.cos(angles)
    inner = np.sqrt((high + s) * (s + low)) * ((high - low) / 2 * np.sin(angles)) ** 2  # times ds: no root at the ends
    return float(inner.mean() / ratio)


def only_matrices(leaves: Sequence[Any], sets: Sets | None) -> tuple[list[int], Sets | None]:
    """Return the indices of the leaves that are matrices, and the sets by positions among these, without empty ones.

    Muon updates these leaves; for all others it falls back on another optimizer, such as Adam.
    """
    kept = [index for index, leaf in enumerate(leaves) if jnp.ndim(leaf) == 2]
    if sets is None:
        return kept, None
    position = {index: place for place, index in enumerate(kept)}
    found = {name: [position[i] for i in indices if i in position] for name, indices in sets.items()}
    return [*kept], {name: indices for name, indices in found.items() if indices}
