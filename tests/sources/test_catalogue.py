"""Every kind of data on one worker, with the real libraries; what is refused, by the line that the error says."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.advice import SPLIT
from adaptive.data.rows import rows_of
from adaptive.data.stream import Stream, open_data
from tests.sources.catalogue import COMMON, TORCH, cases, rows
from tests.sources.checks import GLOBAL_BATCH, check, numbers_of, program_of

STEPS, KEPT = 11, 3  # two epochs and a part of the third; the checkpoint is in mid-epoch


@pytest.mark.parametrize(("group", "row"), cases(lambda row: row.in_program))
def test_each_example_occurs_once_per_epoch_and_a_restored_program_repeats_the_steps(group, row):
    with program_of(row, group.build(row), world=comm.SoloWorld()) as program:
        seen = [check(row, program, program.step()) for _ in range(KEPT)]
        kept = program.checkpoint()
        seen += [check(row, program, program.step()) for _ in range(STEPS - KEPT)]
    # While the first one is held, its kernels are not compiled again.
    with program_of(row, group.build(row), world=comm.SoloWorld()) as restored:
        restored.restore(kept)
        assert [check(row, restored, restored.step()) for _ in range(STEPS - KEPT)] == seen[KEPT:]


@pytest.mark.parametrize(("group", "row"), cases(lambda row: not row.in_program))
def test_data_or_the_line_that_an_error_says_to_write_give_each_example_once_per_epoch(group, row):
    stream = Stream(open_data(group.build(row), 1, range(1)), seed=3, workers=range(1))
    seen = np.zeros(row.length, int)
    for _ in range(2 * row.length // GLOBAL_BATCH):
        (batch,) = stream.take((GLOBAL_BATCH,)).batches
        stream.advance((GLOBAL_BATCH,))
        numbers = np.asarray(numbers_of(batch, row.examples))
        seen[numbers] += 1
        jax.tree.map(lambda leaf, table: np.testing.assert_array_equal(leaf, table[numbers]), batch, row.examples)  # noqa: B023
        assert seen.max() == -(-seen.sum() // row.length)
    stream.close()


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


@pytest.mark.parametrize("kind", ["Lists", "Text"])
def test_items_that_hold_no_arrays_are_refused_by_their_leaf(kind):
    class Source:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"x": [1.0, 2.0] if kind == "Lists" else "words"}

    says = r"data\[0\]\['x'\] is a list of numbers.*np.asarray" if kind == "Lists" else r"data\[0\]\['x'\] holds text"
    with pytest.raises(ad.DataError, match=says):
        rows_of(Source())


def test_batches_are_refused_and_the_line_splits_them():
    pytest.importorskip("torch")
    grain = pytest.importorskip("grain")
    names = TORCH.names(None)
    loader = names["DataLoader"](names["Dataset"](), batch_size=8)
    for data in (loader, grain.MapDataset.range(24).to_iter_dataset().batch(8)):
        with pytest.raises(ad.DataError) as error, program_on(ad.data.from_iterator(lambda data=data: iter_of(data))):
            pass
        assert str(error.value).endswith(SPLIT)
        split = eval(SPLIT, {**COMMON, "data": data})
        with program_on(split) as program:
            assert sum(report.global_batch for report in program.run(epochs=1)) == 24
    with pytest.raises(ad.DataError, match=r"data without \.batch"):
        rows_of(grain.MapDataset.range(24).batch(8))
    with pytest.raises(ad.DataError, match=r"Leave out \.repeat"):
        rows_of(grain.MapDataset.range(24).repeat())


def iter_of(data):
    return data


def program_on(data):
    return ad.Program(lambda state, batch: (state, {}), {}, data, global_batch=6, world=comm.SoloWorld())


def test_a_number_of_readers_that_cannot_be_is_refused():
    for options in (
        {"num_readers": -1},
        {"num_threads": 0},
        {"num_threads": math.inf},
        {"num_readers": 1, "num_threads": 2},
    ):
        with pytest.raises(ad.DataError, match="num_"):
            ad.data.from_source(range(3), **options)
