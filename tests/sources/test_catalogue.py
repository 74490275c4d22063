"""Every kind of data on one worker, with the real libraries; what is refused, by the line that the error says."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.advice import SPLIT
from adaptive.data.rows import rows_of
from adaptive.data.stream import Stream, open_data
from tests.sources.catalogue import CASES, COMMON, LENGTH, TORCH, Files, noise, rows

GLOBAL_BATCH = 5  # of 24 examples: steps span the ends of epochs
STEPS, KEPT = 11, 3  # two epochs and a part of the third; a restored stream begins in mid-epoch


def ids(tree: Any, examples: Any) -> Any:
    """What tells examples apart: the leaf of integers, or else the first element of the first leaf. shape=(n,)."""
    tables = jax.tree.leaves(examples)
    which = next((k for k, table in enumerate(tables) if table.ndim == 1 and table.dtype.kind == "i"), 0)
    leaf = jax.tree.leaves(tree)[which]
    return leaf.reshape(leaf.shape[0], -1)[:, 0]


def steps_of(stream, steps):
    for _ in range(steps):
        (batch,) = stream.take((GLOBAL_BATCH,)).batches
        stream.advance((GLOBAL_BATCH,))
        yield jax.tree.map(np.asarray, batch)


@pytest.mark.parametrize(("group", "row"), CASES)
def test_data_or_the_line_that_an_error_says_to_write_give_each_example_once_per_epoch(group, row, tmp_path):
    data = group.build(row, tmp_path)
    stream, other = (Stream(open_data(data, 1, range(1)), seed=3, workers=range(1)) for _ in range(2))
    seen, taken = np.zeros(LENGTH, int), []
    for batch in steps_of(stream, STEPS):
        numbers = np.argmax(ids(batch, row.examples)[:, None] == ids(row.examples, row.examples), axis=1)
        np.add.at(seen, numbers, 1)
        assert seen.min() >= seen.sum() // LENGTH
        assert seen.max() <= -(-seen.sum() // LENGTH)
        for leaf, table in zip(jax.tree.leaves(batch), jax.tree.leaves(row.examples), strict=True):
            assert (leaf.shape[1:], leaf.dtype) == (table.shape[1:], table.dtype)
            if not isinstance(table, jax.ShapeDtypeStruct):
                np.testing.assert_array_equal(leaf, table[numbers])
        taken.append(batch)
        if len(taken) == KEPT:
            other.go_on(stream.cursors, stream.place())
    for batch, again in zip(taken[KEPT:], steps_of(other, STEPS - KEPT), strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, again)
    stream.close()
    other.close()


def test_a_restored_program_draws_the_same_random_numbers():
    def driver(state, batch):
        return state + 1, {"drawn": comm.all_reduce(batch["noise"].sum(), op="sum")}

    def program():
        data = ad.data.from_source(Files(), random_map=noise)
        return ad.Program(driver, jnp.zeros(()), data, global_batch=5, seed=3, world=comm.SoloWorld(), resizable=False)

    with program() as first, program() as restored:
        list(first.run(steps=KEPT))
        restored.restore(first.checkpoint())
        drawn, again = ([float(r.metrics["drawn"]) for r in p.run(steps=STEPS)] for p in (first, restored))
    assert drawn == again
    assert len(set(drawn)) == STEPS


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: {0, 1}, r"A set has no order. Write  np.asarray\(sorted\(data\)\)"),
        (lambda: "data.csv", "Text is no data set"),
        (lambda: rows(0), "a generator can be iterated over only once"),
        (lambda: dict, "data is the class dict. Create an object"),
        (lambda: 42, "is a single number"),
        (lambda: None, "the data set has no arrays"),
        (lambda: {"x": [1.0, 2.0]}, "write np.asarray"),
        (lambda: {"x": np.array(["a"])}, "holds text"),
        (lambda: {"x": np.full(3, 1e40)}, r"holds 1e\+40, which float32 cannot"),
    ],
)
def test_data_that_no_line_mends_are_refused_by_name(make, says):
    with pytest.raises(ad.DataError, match=says):
        rows_of(make())


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ([1.0, 2.0], r"data\[0\]\['x'\] is a list of numbers.*np.asarray"),
        ("words", r"data\[0\]\['x'\] holds text"),
    ],
)
def test_items_that_hold_no_arrays_are_refused_by_their_leaf(item, says):
    class Source(Files):
        def __getitem__(self, index):
            return {"x": item}

    with pytest.raises(ad.DataError, match=says):
        rows_of(Source())


def test_batches_are_refused_and_the_line_splits_them():
    pytest.importorskip("torch")
    grain = pytest.importorskip("grain")
    names = TORCH.names(None)
    loader = names["DataLoader"](names["Dataset"](), batch_size=8)
    for data in (loader, grain.MapDataset.range(24).to_iter_dataset().batch(8)):
        with pytest.raises(ad.DataError) as error:
            open_data(ad.data.from_iterator(lambda data=data: data), 1, range(1))
        assert str(error.value).endswith(SPLIT)
        stream = Stream(open_data(eval(SPLIT, {**COMMON, "data": data}), 1, range(1)), seed=0, workers=range(1))
        list(steps_of(stream, 5))
        assert (stream.epoch, stream.epoch_length) == (1, 24)
        stream.close()
    with pytest.raises(ad.DataError, match=r"data without \.batch"):
        rows_of(grain.MapDataset.range(24).batch(8))
    with pytest.raises(ad.DataError, match=r"Leave out \.repeat"):
        rows_of(grain.MapDataset.range(24).repeat())


@pytest.mark.parametrize(
    "options",
    [{"num_readers": -1}, {"num_threads": 0}, {"num_threads": math.inf}, {"num_readers": 1, "num_threads": 2}],
)
def test_a_number_of_readers_that_cannot_be_is_refused(options):
    with pytest.raises(ad.DataError, match="num_"):
        ad.data.from_source(range(3), **options)
