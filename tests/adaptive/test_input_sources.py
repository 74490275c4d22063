"""Data as other libraries have them: taken by their index, with what they do to each example."""

from __future__ import annotations

import itertools
import pickle
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.adapters import examples_of
from adaptive.data.examples import Examples
from adaptive.data.reading import Passes, Table
from adaptive.data.same_data import digests_of_data, steadiness
from adaptive.data.stream import Stream

grain = pytest.importorskip("grain")


class Squares:
    """As PyTorch calls it a map-style data set."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": np.float32(index) ** 2, "i": index}


def default_collate(examples):
    raise AssertionError("batches are not the loader's")


class SequentialSampler:
    def __init__(self, data):
        self.data_source = data


class RandomSampler(SequentialSampler):
    replacement = False

    @property
    def num_samples(self):
        return len(self.data_source)


class WeightedRandomSampler:
    replacement, num_samples = True, 12


class BatchSampler: ...


class BucketSampler: ...


class DataLoader:
    """What of PyTorch's is looked at. It is too large to be a dependency of tests."""

    def __init__(
        self, dataset, batch_size=4, sampler=None, collate_fn=default_collate, num_workers=0, batch_sampler=None
    ):
        self.dataset, self.batch_size, self.collate_fn, self.num_workers = dataset, batch_size, collate_fn, num_workers
        self.sampler = sampler or SequentialSampler(dataset)
        self.batch_sampler = batch_sampler or BatchSampler()

    def __len__(self):
        return 3

    def __iter__(self):
        for start in range(0, 12, self.batch_size):
            yield {"x": np.arange(start, start + self.batch_size, dtype=np.float32)}


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


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def test_of_a_loader_its_data_set_is_taken_by_its_index_and_that_is_said():
    loader = DataLoader(Squares(), sampler=RandomSampler(Squares()), num_workers=3)
    data = examples_of(loader)
    assert (len(data), data.num_readers) == (12, 3)
    assert "batch_size=4, shuffling and drop_last go unused" in data.notes[0]
    assert "read by 3 processes" in data.notes[0]


def test_a_loader_trains_and_says_so_in_the_first_report_and_in_explain():
    def driver(state, batch):
        return state, {"sum": comm.all_reduce(batch["x"].mean())}

    program = ad.Program(driver, jnp.zeros(()), DataLoader(Squares()), global_batch=6, resizable=False)
    with program:
        reports = list(program.run(epochs=1))
        assert len(reports) == 2
        assert "its data set is taken, by index" in reports[0].notes[0]
        assert not reports[1].notes
        assert "each example once per epoch" in program.explain()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampler": WeightedRandomSampler()}, "sampler is a WeightedRandomSampler, which picks examples"),
        ({"batch_sampler": BucketSampler()}, "batch_sampler is a BucketSampler, which picks examples"),
        ({"collate_fn": lambda rows: {"x": np.zeros(3)}}, "collate_fn makes an array of shape (3,) of one example"),
    ],
)
def test_a_loader_that_means_something_else_is_refused(options, says):
    refused(DataLoader(Squares(), **options), says)


def test_what_a_loader_does_to_its_examples_is_kept():
    def collate(examples):
        return np.stack([e["x"] for e in examples]) + 0.5, [np.array([e["i"] for e in examples])]

    data = examples_of(DataLoader(Squares(), collate_fn=collate))
    x, (i,) = data.rows(np.array([3, 1]))
    assert x.tolist() == [9.5, 1.5]
    assert i.tolist() == [3, 1]
    assert "its collate_fn for each alone" in data.notes[0]


def test_a_loader_without_an_index_is_gone_through(monkeypatch):
    torch = types.ModuleType("torch.utils.data.dataset")
    torch.IterableDataset = type("IterableDataset", (), {"__module__": "torch.utils.data.dataset"})
    data = type("Mine", (torch.IterableDataset,), {"__getitem__": lambda self, index: 1 / 0})()
    found = examples_of(DataLoader(data))
    assert found.batched
    assert [batch["x"].tolist() for batch in numbers(ad.data.iterable.IterableData(found, 1, [0]), 2, (6,))] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]


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


# --- Hugging Face, by their protocol ----------------------------------------------------------------------------------


@pytest.fixture
def datasets(monkeypatch):
    """A library of that name, whose data sets give lists until they are told otherwise."""
    module = types.ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)

    class Dataset:
        def __init__(self, kind=None):
            self.format = {"type": kind}

        def __len__(self):
            return 6

        def __getitem__(self, index):
            assert type(index) is int
            return {"x": np.array([index, 1]) if self.format["type"] == "numpy" else [index, 1]}

        def with_format(self, kind):
            return type(self)(kind)

    Dataset.__module__ = "datasets.arrow_dataset"
    module.Dataset = Dataset
    return module


def test_data_sets_of_hugging_face_give_arrays(datasets):
    assert Examples(datasets.Dataset("numpy")).rows(np.array([2]))["x"].tolist() == [[2, 1]]
    assert examples_of(datasets.Dataset()).rows(np.array([2, 5]))["x"].tolist() == [[2, 1], [5, 1]]


def test_iterable_data_sets_of_hugging_face_are_gone_through():
    class IterableDataset:
        def __iter__(self):
            yield from ({"x": [i, 1.5], "y": i} for i in range(5))

        def __getitem__(self, column):
            raise KeyError(column)

        def set_epoch(self, epoch):
            self.epoch = epoch

    data = IterableDataset()
    (batch,) = numbers(ad.data.iterable.IterableData(examples_of(data), 1, [0]), 1, (7,))
    assert batch["x"].tolist() == [[i % 5, 1.5] for i in range(7)]
    assert data.epoch == 1


def test_lists_of_numbers_in_the_examples_of_a_source_are_arrays():
    class Rows(Squares):
        def __getitem__(self, index):
            return {"x": [index, 2], "pair": (index, 3)}

    assert Examples(Rows()).rows(np.array([4, 5]))["x"].tolist() == [[4, 2], [5, 2]]
    assert [a.tolist() for a in Examples(Rows()).rows(np.array([4, 5]))["pair"]] == [[4, 5], [3, 3]]


# --- grain ------------------------------------------------------------------------------------------------------------


def test_a_map_dataset_is_taken_by_its_index():
    data = grain.MapDataset.range(20).map(lambda i: {"i": i, "x": np.float32(i)})
    seen = np.concatenate([batch["i"] for batch in numbers(examples_of(data), 4, (3, 2))])
    assert sorted(seen.tolist()) == list(range(20))


def test_what_is_repeated_without_end_is_refused_and_not_eaten():
    data = grain.MapDataset.range(20)
    refused(data.repeat(), f"len(data) is {sys.maxsize}: data that are repeated without end. Leave out .repeat()")
    assert len(examples_of(data.repeat(3))) == 60
    endless = examples_of(data.repeat().to_iter_dataset())
    batches = numbers(ad.data.iterable.IterableData(endless, 1, [0]), 3, (16,))
    assert np.concatenate(list(batches)).tolist() == [i % 20 for i in range(48)]


def test_batches_of_grain_are_refused_since_the_program_makes_its_own():
    data = grain.MapDataset.range(20).map(lambda i: {"i": i})
    for batches in (data.batch(4), data.to_iter_dataset().batch(4), data.batch(4).map(lambda b: b).to_iter_dataset()):
        refused(batches, "the data set gives batches: leave out .batch(…)")
    with pytest.raises(ad.DataError, match="the data set gives batches"):
        ad.data.from_iterator(data.to_iter_dataset().batch(4))
    assert ad.data.from_iterator(data.to_iter_dataset().batch(4), batched=True).batched


def test_examples_that_grain_filters_out_are_refused():
    data = grain.MapDataset.range(20).filter(lambda i: i % 2 == 0)
    with pytest.raises(ad.DataError, match="example 3 is built as"):
        examples_of(data).rows(np.array([2, 3]))


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


def test_mapped_files_are_opened_anew_by_those_who_read_them(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4000.0, dtype=np.float32).reshape(1000, 4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    leaves, tree = jax.tree.flatten({"a": mapped[10:, 1:3], "b": np.arange(990)})
    pickled = pickle.dumps(Table(leaves, tree))
    assert len(pickled) < 10_000
    row = pickle.loads(pickled)[5]
    assert (row["a"].tolist(), int(row["b"])) == ([61, 62], 5)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((i for i in range(3)), "a generator can be gone through once only"),
        (numbers, "data is a function. If it begins an iterator:  ad.data.from_iterator(numbers)"),
        ({1, 2}, "a set has no order"),
        ("text", "holds text"),
    ],
)
def test_what_cannot_be_taken_as_it_is_says_what_to_write(data, says):
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


def test_an_error_says_which_example_it_is_of():
    def broken(example):
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file") as error:
        ad.data.from_source(Squares(), map=broken)
    assert "in reading example 0 of the data" in error.value.__notes__


@pytest.mark.parametrize("num_readers", [-1, 1.5, "2", True])
def test_a_number_of_processes_that_cannot_be_is_refused(num_readers):
    with pytest.raises(ad.DataError, match="how many processes read"):
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


def test_what_was_fetched_ahead_is_dealt_out_anew_when_sizes_change():
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
