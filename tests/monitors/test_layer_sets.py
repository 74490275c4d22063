"""Sets of leaves by a function of the path."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

import adaptive as ad
from monitors._layer_sets import layer_sets

GRADS = {"params": {"first": {"bias": jnp.ones(2), "kernel": jnp.ones(3)}, "second": {"kernel": jnp.ones(4)}}}


def test_leaves_are_numbered_in_the_order_of_the_tree():
    assert layer_sets(GRADS, lambda path: path[1]) == {"first": [0, 1], "second": [2]}
    assert layer_sets(GRADS, lambda path: path[-1]) == {"bias": [0], "kernel": [1, 2]}


def test_paths_are_text_in_any_tree():
    paths = []
    layer_sets(([jnp.ones(1)], nnx.state(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))), lambda p: str(paths.append(p) or p))
    assert paths[0] == ("0", "0")
    assert {path[1] for path in paths[1:]} == {"bias", "kernel"}


def test_a_leaf_without_a_name_is_left_out():
    assert layer_sets(GRADS, lambda p: p[1] if p[-1] == "kernel" else None) == {"first": [1], "second": [2]}


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (lambda path: path[0], r"all 3 leaves are in the set 'params'(?s:.)*path\[1\]: first, second"),
        (lambda path: None, "no leaf is in any set"),
        (lambda path: path[7], r"by\(\('params', 'first', 'bias'\)\) raised IndexError"),
        (lambda path: 3, "returned 3"),
    ],
)
def test_functions_that_do_not_separate_layers_are_refused(by, text):
    with pytest.raises(ad.CollectiveError, match=rf"^noise_scale \(test_layer_sets.py:\d+\): (?s:.)*{text}"):
        layer_sets(GRADS, by)
