"""Data as other libraries have them: taken by their index, with what they do to each example."""

from __future__ import annotations

import itertools
import logging
import pickle
import time

import jax
import numpy as np
import pytest

import adaptive as ad
from adaptive.data.adapters import examples_of
from adaptive.data.examples import Examples
from adaptive.data.reading import Passes, RowsOfArrays
from adaptive.data.same_data import digests_of_data, steadiness, warn_unless_steady
from adaptive.data.stream import Stream

COVERS = ("adaptive/data/reading.py",)


class Squares:
    """As PyTorch calls it a map-style data set."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": np.float32(index) ** 2, "i": index}


def numbers(data, steps=3, sizes=(4,), seed=0):
    stream = Stream(data, seed=seed, workers=range(len(sizes)))
    try:
        for _ in range(steps):
            share = stream.take(sizes)
            stream.prefetch(sizes)
            stream.advance(sizes)
            yield from (batch for batch in share.batches if batch is not None)
    finally:
        stream.close()


def refused(data, says):
    with pytest.raises(ad.DataError) as error:
        examples_of(data)
    assert says in str(error.value)


# --- sources ----------------------------------------------------------------------------------------------------------


def test_many_examples_are_read_at_once_where_a_source_can():
    class Table:
        calls = ()

        def __len__(self):
            return 10

        def __getitem__(self, index):
            raise AssertionError

        def __getitems__(self, indices):
            self.calls += (indices,)
            return [{"x": i} for i in indices]

    data = Table()
    assert Examples(data).rows(np.array([4, 2]))["x"].tolist() == [4, 2]
    assert data.calls == ([0], [4, 2])


def test_lists_of_numbers_in_the_examples_of_a_source_are_arrays():
    class Rows(Squares):
        def __getitem__(self, index):
            return {"x": [index, 2], "pair": (index, 3)}

    assert Examples(Rows()).rows(np.array([4, 5]))["x"].tolist() == [[4, 2], [5, 2]]
    assert [a.tolist() for a in Examples(Rows()).rows(np.array([4, 5]))["pair"]] == [[4, 5], [3, 3]]


# --- arrays, files, lists ---------------------------------------------------------------------------------------------


def test_files_that_are_mapped_stay_so_and_are_widened_row_by_row(tmp_path):
    wide = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (1000, 3))
    wide[:] = np.arange(3000.0).reshape(1000, 3)
    wide.flush()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = Examples({"x": mapped, "y": np.arange(1000)})
    assert np.shares_memory(data._columns[0], mapped)
    rows = data.rows(np.array([7, 3]))
    assert rows["x"].tolist() == [[21, 22, 23], [9, 10, 11]]
    assert rows["x"].dtype == data.example["x"].dtype == np.float32
    assert digests_of_data(data) == digests_of_data(Examples({"x": np.array(mapped), "y": np.arange(1000)}))


def test_each_reader_opens_a_mapped_file_itself(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4000.0, dtype=np.float32).reshape(1000, 4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    leaves, tree = jax.tree.flatten({"a": mapped[10:, 1:3], "b": np.arange(990)})
    pickled = pickle.dumps(RowsOfArrays(leaves, tree))
    assert len(pickled) < 10_000
    rows = pickle.loads(pickled)
    assert len(rows) == 990
    row = rows[5]
    assert (row["a"].tolist(), int(row["b"])) == ([61, 62], 5)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((i for i in range(3)), "a generator can be iterated over only once"),
        (numbers, "data is a function. If it returns an iterator:  ad.data.from_iterator(numbers)"),
        ({1, 2}, "a set has no order"),
        ("text", "holds text"),
    ],
)
def test_errors_about_unsupported_data_say_what_to_write(data, says):
    refused(data, says)


# --- what is done to each example -------------------------------------------------------------------------------------


def crop(example, rng):
    return {**example, "r": rng.random(2)}


def augmented(data=None, **options):
    return ad.data.from_source(Squares() if data is None else data, random_map=crop, **options)


def by_example(batches, n=12):
    """The random numbers of each example, epoch by epoch."""
    rows = [(int(i), tuple(r)) for batch in batches for i, r in zip(batch["i"], batch["r"].tolist(), strict=True)]
    return [dict(rows[k : k + n]) for k in range(0, len(rows), n)]


def test_random_numbers_of_an_example_depend_on_seed_epoch_and_example_alone():
    first, second = by_example(numbers(augmented(), 6))
    assert first.keys() == second.keys() == set(range(12))
    assert len({*first.values(), *second.values()}) == 24
    assert by_example(numbers(augmented(), 4, (1, 0, 3, 2))) == [first, second]
    assert by_example(numbers(augmented(), 6, seed=1))[0] != first


def test_arrays_are_transformed_row_by_row():
    data = ad.data.from_source({"x": np.arange(4.0)}, map=lambda e: {"y": e["x"] + 1})
    assert data.rows(np.array([3, 0]))["y"].tolist() == [4, 1]


def test_shards_have_random_numbers_of_their_own():
    shards = ad.Shards([augmented(Squares(4)), augmented(Squares(4))])
    (one, two) = itertools.islice(numbers(shards, 1, (4, 4)), 2)
    assert sorted(one["i"].tolist()) == sorted(two["i"].tolist())
    assert not {tuple(r) for r in one["r"].tolist()} & {tuple(r) for r in two["r"].tolist()}


def test_data_that_are_augmented_by_keys_are_the_same_on_all_processes():
    assert digests_of_data(augmented()) == digests_of_data(augmented())
    assert steadiness(augmented(), rank=0) == {}


def random_numbers_of_its_own(example):
    return {**example, "r": np.random.random()}


@pytest.mark.parametrize(
    ("data", "warned"),
    [
        (lambda: ad.data.from_source(Squares(), map=random_numbers_of_its_own), True),
        (lambda: ad.data.from_source({"i": np.arange(12)}, map=random_numbers_of_its_own), True),
        (augmented, False),
        (Squares, False),
        (lambda: {"i": np.arange(12)}, False),
    ],
)
def test_sources_that_draw_random_numbers_of_their_own_are_warned_of_on_one_process(data, warned, caplog):
    with (
        caplog.at_level(logging.WARNING, "adaptive"),
        ad.Program(lambda state, batch: (state, {}), np.zeros(()), data(), global_batch=4),
    ):
        said = [r.getMessage() for r in caplog.records if "when it is read again" in r.getMessage()]
    assert len(said) == warned
    assert all("data[" in text and "random_map=" in text for text in said)


def test_slow_sources_are_read_twice_once():
    class Slow(Squares):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            time.sleep(0.3)
            return super().__getitem__(index)

    data = Slow(100)
    examples = Examples(data)
    data.reads = 0
    warn_unless_steady(examples)
    assert data.reads == 2


def test_an_error_names_the_example():
    def broken(example):
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file") as error:
        ad.data.from_source(Squares(), map=broken)
    assert "in reading example 0 of the data" in error.value.__notes__


@pytest.mark.parametrize("num_readers", [-1, 1.5, "2", True])
def test_a_number_of_processes_that_cannot_be_is_refused(num_readers):
    with pytest.raises(ad.DataError, match="must be a number of processes"):
        ad.data.from_source(Squares(), num_readers=num_readers)


def test_options_are_given_once():
    with pytest.raises(ad.DataError, match="in one call"):
        ad.data.from_source(augmented(), num_readers=2)
    assert ad.data.from_source(done := augmented()) is done


# --- what is fetched ahead --------------------------------------------------------------------------------------------


class Counting(Squares):
    def __init__(self, length):
        super().__init__(length)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def test_prefetched_examples_are_redistributed_when_sizes_change():
    data = Counting(100)
    stream = Stream(Examples(data), seed=0, workers=range(2))
    data.read.clear()
    seen, plan = [], [(4, 4), (3, 5), (6, 1), (1, 1), (8, 8)]
    for sizes in plan:
        seen += [i for batch in stream.take(sizes).batches for i in batch["i"].tolist()]
        stream.prefetch(sizes)
        stream.advance(sizes)
    stream.close()
    assert seen == stream.indices(0, len(seen)).tolist()
    assert len(data.read) == len(set(data.read))


def test_a_step_that_is_taken_again_reads_nothing_again():
    data = Counting(40)
    stream = Stream(Examples(data), seed=0, workers=range(1))
    first = stream.take((4,)).batches[0]["i"].tolist()
    stream.prefetch((4,))
    stream._ahead[2].result()
    data.read.clear()
    assert stream.take((2,)).batches[0]["i"].tolist() == first[:2]
    assert data.read == []
    stream.close()


def test_passes_are_cut_with_their_examples():
    passes = Passes(np.array([0, 1, 2]), 3, 0)
    assert passes.part(slice(1, 3)).epochs.tolist() == [1, 2]
    assert Passes(0, 3).part(slice(1, 3)) == Passes(0, 3)
    assert passes.of(2, np.array([True, False, True])).shard == 2
