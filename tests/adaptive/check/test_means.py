"""A function whose result for a batch is neither a mean nor a sum over its examples is refused before it misleads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
from adaptive.check.means import MeanCheck

ROWS = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
W = jnp.array([0.3, -0.2, 0.1])


def checked(fn, op="mean", *, sizes=(64, 16), names=("loss",), state=W, check=None, rows=ROWS):
    (check or MeanCheck())(fn, state, lambda indices: rows[indices], sizes, names, op)


def squares(w, batch):
    return (batch @ w - 1) ** 2


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda w, b: squares(w, b).mean(), "mean"),
        (lambda w, b: squares(w, b).sum(), "sum"),
        (lambda w, b: (3.0 + squares(w, b).mean()) * 1e6, "mean"),
        (lambda w, b: b.astype(jnp.bfloat16).mean().astype(jnp.float32), "mean"),
        (lambda w, b: (squares(w, b) > 0.5).sum() / len(b), "mean"),
        (lambda w, b: jax.nn.softmax(b * 3, axis=-1).sum(-1).mean() - 1, "mean"),  # zero but for rounding
        (lambda w, b: (b[:, 0] > 0).sum(), "sum"),
        (lambda w, b: jnp.exp(1j * b[:, 0].astype(jnp.complex64)).mean(), "mean"),
    ],
)
def test_means_and_sums_pass(fn, op):
    checked(fn, op)


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda w, b: squares(w, b).sum(), "mean"),
        (lambda w, b: squares(w, b).mean(), "sum"),
        (lambda w, b: jnp.exp(squares(w, b).mean()), "mean"),
        (lambda w, b: squares(w, b).max(), "mean"),
        (lambda w, b: jnp.exp(squares(w.astype(jnp.bfloat16), b.astype(jnp.bfloat16)).mean()), "mean"),
        (lambda w, b: len(b), "mean"),
        (lambda w, b: squares(w, b).mean() + 0.1 * squares(w, b).max(), "mean"),
    ],
)
def test_others_are_refused(fn, op):
    for sizes in ((64, 16), (3, 3)):
        with pytest.raises(ad.DriverError, match=rf"evaluate: loss is no {op} over the batch's examples: \d examples"):
            checked(fn, op, sizes=sizes)


@pytest.mark.parametrize("order", ["ascending", "padding at the end"])
def test_a_mean_over_tokens_is_refused_in_sorted_data_too(order):
    length = np.sort(np.random.default_rng(0).integers(1, 13, 160))
    if order == "padding at the end":
        length = np.where(np.arange(160) < 155, 12, 0)
    mask = (np.arange(12) < length[:, None]).astype(np.float32)
    values = np.random.default_rng(1).normal(size=(160, 12)).astype(np.float32)

    def token_mean(w, batch):
        x, mask = batch[..., 0], batch[..., 1]
        return (mask * (x - w[0]) ** 2).sum() / mask.sum()

    with pytest.raises(ad.DriverError, match="a mean over tokens"):
        checked(token_mean, sizes=(160, 32), rows=np.stack([values, mask], -1))


def test_leaves_that_are_merged_in_another_way_are_left_out():
    def fn(w, b):
        return squares(w, b).max(), squares(w, b).mean()

    checked(fn, names=(None, "loss"))
    with pytest.raises(ad.DriverError, match="evaluate: most"):
        checked(fn, names=("most", None))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, b: jax.random.normal(jax.random.key(0), b.shape).max(),
        lambda w, b: jax.pure_callback(np.max, jax.ShapeDtypeStruct((), np.float32), b),
        lambda w, b: squares(w, b.reshape(16, 3)).max(),
        lambda w, b: squares(w, b).max() / 0.0,
        lambda w, b: (jax.lax.bitcast_convert_type(b, jnp.int32) & 1).max(),
    ],
    ids=["random numbers", "the host", "one size", "not finite", "its own dtype"],
)
def test_where_nothing_can_be_compared_nothing_is_refused(fn):
    checked(fn)
    checked(lambda w, b: squares(w, b).max(), sizes=(64, 1))


def test_a_function_is_looked_at_until_its_parts_differ_and_at_most_three_times():
    def fn(w, b):
        return (b @ w).max()

    same, other = jnp.zeros(3), W
    check = MeanCheck()
    for _ in range(2):
        checked(fn, state=same, check=check)
    with pytest.raises(ad.DriverError, match="is no mean"):
        checked(fn, state=other, check=check)
    check = MeanCheck()
    for state in (same, same, same, other):
        checked(fn, state=state, check=check)
    check = MeanCheck()
    checked(lambda w, b: (b @ w).mean(), check=check)
    assert len(check._looks) == 1
    with pytest.raises(ad.DriverError, match="is no sum"):  # it is known as a mean
        checked(lambda w, b: (b @ w).mean(), "sum", check=check)
