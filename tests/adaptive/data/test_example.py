from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
from adaptive.data.example import Functions, batch_of


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros(2, np.float16), r"float16\[2\], of example 0 float32\[2\]"),
        (np.zeros(3, np.float32), r"float32\[3\], of .*\[2\]"),
    ],
)
def test_a_batch_of_other_dtypes_or_shapes_is_refused_by_its_first_example(x, text):
    first = {"x": np.zeros(2, np.float32)}
    np.testing.assert_array_equal(
        batch_of([first, {"x": np.ones(2, np.float32)}], [7, 9], first)["x"], [[0, 0], [1, 1]]
    )
    with pytest.raises(ad.DataError, match=rf"of example 7 is {text}"):
        batch_of([{"x": x}, {"x": x}], [7, 9], first)


def test_the_random_numbers_of_an_example_depend_on_seed_index_epoch_and_shard():
    draw = Functions(random_map=lambda item, rng: rng.random()).applied
    numbers = [draw(0, *how) for how in [(1, 0, 3, 0), (2, 0, 3, 0), (1, 1, 3, 0), (1, 0, 3, 1), (1, 0, 2**64 - 3, 0)]]
    numbers += [draw(0, 1, 0, seed, 0) for seed in (0, -1, -2, 2**63, 2**63 + 1)]
    assert len(set(numbers)) == 10
