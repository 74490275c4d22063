"""Arrays of HDF5 and zarr: no more is read than a batch needs, and what cannot be read is refused by name."""

from __future__ import annotations

import os
import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.adapters import examples_of
from adaptive.data.reading import RowsOfArrays
from adaptive.data.same_data import digests_of_data, steadiness
from adaptive.data.stored_arrays import MappedFile, StoredArray, rows_of_hdf5
from adaptive.data.stream import Stream
from tests.on_use import on_use

h5py, zarr = on_use("h5py"), on_use("zarr")

ROWS = 5000
IMAGES = np.random.default_rng(0).integers(0, 255, (ROWS, 32, 32), dtype=np.uint8)
LABELS = np.arange(ROWS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("plain", data=IMAGES)
        file.create_dataset("packed", data=IMAGES, chunks=(16, 32, 32), compression="gzip")
        file.create_dataset("group/labels", data=LABELS)
        file.create_dataset("group/wide", data=IMAGES[:, 0].astype(float))
        file.create_dataset("swapped", data=LABELS.astype(">i4"))
        file.create_dataset("text", data=["a", "b"])
        file.create_dataset("ragged", (2,), dtype=h5py.vlen_dtype(np.int32))
        file.create_dataset("compound", data=np.zeros(3, [("a", "f4"), ("b", "i4")]))
        file.create_dataset("number", data=1.0)
        file.create_dataset("large", data=np.array([*range(40), 2**40]))
    return path


@pytest.fixture
def file(path):
    with h5py.File(path, "r") as file:
        yield file


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    group = zarr.open_group(tmp_path_factory.mktemp("stored") / "data.zarr", mode="w")
    group.create_array("x", data=IMAGES, chunks=(64, 32, 32))
    group.create_array("y", data=LABELS, chunks=(512,))
    return group


@pytest.mark.parametrize("name", ["plain", "packed"])
@pytest.mark.parametrize(
    "rows",
    [[3], [4, 5, 6, 7], [7, 3, 3, 4999, 0], [9, 8, 7], list(range(1500, 0, -1)), []],
    ids=["one", "side by side", "twice", "backwards", "many", "none"],
)
def test_hdf5_rows_are_returned_in_the_requested_order(file, name, rows):
    rows = np.array(rows, int)
    assert np.array_equal(rows_of_hdf5(file[name], rows), IMAGES[rows])


def test_rows_of_hdf5_that_do_not_exist_are_an_error(file):
    for rows in ([-1, 3], [3, ROWS]):
        with pytest.raises(IndexError, match="of 5000"):
            rows_of_hdf5(file["plain"], np.array(rows))


class Recorded:
    """A dataset that counts how many numbers are read of it."""

    def __init__(self, dataset):
        self._dataset, self.read = dataset, 0
        self.shape, self.dtype, self.chunks = dataset.shape, dataset.dtype, dataset.chunks

    def __getitem__(self, which):
        found = self._dataset[which]
        self.read += found.size
        return found


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_no_more_of_hdf5_is_read_than_the_rows(file, name):
    recorded = Recorded(file[name])
    rows_of_hdf5(recorded, np.array([17, 3, 3, 4000, 4001]))
    assert recorded.read == 4 * 32 * 32


def batches(data, steps=4, size=16):
    stream = Stream(data, seed=3, workers=range(1))
    try:
        for _ in range(steps):
            (batch,) = stream.take([size]).batches
            stream.prefetch([size])
            stream.advance([size])
            yield batch
    finally:
        stream.close()


def sources(file, group):
    return {
        "a dataset": (file["packed"], IMAGES),
        "leaves of a dict": ({"x": file["plain"], "y": file["group/labels"]}, {"x": IMAGES, "y": LABELS}),
        "an HDF5 group": (file["group"], {"labels": LABELS, "wide": IMAGES[:, 0].astype(np.float32)}),
        "a zarr array": (group["x"], IMAGES),
        "a zarr group": (group, {"x": IMAGES, "y": LABELS}),
        "beside an array": ((file["plain"], LABELS), (IMAGES, LABELS)),
        "of another byte order": ({"x": file["swapped"]}, {"x": LABELS}),
    }


KINDS = ["a dataset", "leaves of a dict", "an HDF5 group", "a zarr array", "a zarr group", "beside an array"]


@pytest.mark.parametrize("kind", [*KINDS, "of another byte order"])
def test_they_are_read_as_the_same_arrays_in_memory_would_be(file, group, kind):
    stored, arrays = sources(file, group)[kind]
    data, alike = examples_of(stored), examples_of(arrays)
    assert len(data) == ROWS
    for batch, like in zip(batches(data), batches(alike), strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, like)
        assert [leaf.dtype for leaf in jax.tree.leaves(batch)] == [leaf.dtype for leaf in jax.tree.leaves(like)]
    assert jax.tree.leaves(data.example)[0].dtype == jax.tree.leaves(alike.example)[0].dtype
    assert not steadiness(data, 0)


def test_bytes_stay_bytes_until_they_are_on_the_device(file):
    seen = []

    def driver(state, batch):
        seen.append(batch["x"].dtype)
        return state + comm.all_reduce(batch["x"].astype(jnp.float32).mean()), {}

    with ad.Program(driver, jnp.zeros(()), {"x": file["packed"]}, global_batch=8, resizable=False) as program:
        program.step()
        assert "each example once per epoch" in program.explain()
    assert set(seen) == {jnp.dtype("uint8")}


@pytest.mark.parametrize("kind", ["an HDF5 dataset", "a zarr array"])
def test_memory_stays_flat(file, group, kind):
    array = file["packed"] if kind == "an HDF5 dataset" else group["x"]
    tracemalloc.start()
    try:
        data = examples_of({"x": array})
        digests_of_data(data)
        for _ in batches(data, steps=10):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < IMAGES.nbytes / 2


def test_the_comparison_between_processes_reads_a_sample(file, monkeypatch):
    read = []
    get = StoredArray.__getitem__
    monkeypatch.setattr(StoredArray, "__getitem__", lambda self, rows: read.append(np.size(rows)) or get(self, rows))
    digests_of_data(examples_of(file["packed"]))
    assert 500 < sum(read) < ROWS / 5


def mean(example):
    return {"mean": np.float32(example["x"].mean()), "pid": os.getpid()}


@pytest.mark.parametrize("kind", ["an HDF5 dataset", "a zarr array"])
def test_processes_that_read_open_them_for_themselves(file, group, kind):
    array = file["packed"] if kind == "an HDF5 dataset" else group["x"]
    data = ad.data.from_source({"x": array}, map=mean, num_readers=1)
    try:
        found = data.rows(np.array([7, 2, 2]))
        assert os.getpid() not in found["pid"]
        assert np.allclose(found["mean"], [IMAGES[i].mean() for i in (7, 2, 2)])
    finally:
        data.close()


def test_a_function_of_each_example_is_given_the_rows_that_were_read_at_once(file, monkeypatch):
    read = []
    get = StoredArray.__getitem__
    monkeypatch.setattr(StoredArray, "__getitem__", lambda self, rows: read.append(np.size(rows)) or get(self, rows))
    data = ad.data.from_source({"x": file["packed"]}, map=mean)
    read.clear()
    assert np.allclose(data.rows(np.array([7, 2]))["mean"], [IMAGES[7].mean(), IMAGES[2].mean()])
    assert read == [2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text", r"data\['text'\] holds text; it must be an array of numbers"),
        ("ragged", r"data\['ragged'\] holds rows of different lengths; it must be"),
        ("compound", r"data\['compound'\] is a structured array. Pass its fields"),
        ("number", r"data\['number'\] is a single number; every leaf needs a leading axis"),
    ],
)
def test_a_file_without_numeric_rows_is_refused_by_name(file, name, says):
    with pytest.raises(ad.DataError, match=says):
        examples_of({name: file[name]})


def test_arrays_of_a_group_of_different_lengths_are_refused(file):
    with pytest.raises(ad.DataError, match="different numbers of examples: data\\['group'\\]\\['labels'\\]: 5000, "):
        examples_of({"group": dict(file["group"]), "large": file["large"]})


def test_the_error_about_a_too_large_number_names_its_row(file):
    data = examples_of({"n": file["large"]})
    assert data.rows(np.array([3, 1]))["n"].tolist() == [3, 1]
    with pytest.raises(ad.DataError, match=r"data\['n'\]\[40\] holds 1099511627776, which int32 cannot"):
        data.rows(np.array([3, 40]))


def test_a_closed_file_is_named_in_the_error(path):
    with h5py.File(path, "r") as file:
        data, dataset = examples_of({"x": file["plain"]}), file["plain"]
    says = r"data\['x'\] is a dataset of an HDF5 file that is closed. Leave the file open"
    with pytest.raises(ad.DataError, match=says):
        data.rows(np.arange(3))
    with pytest.raises(ad.DataError, match=says):
        examples_of({"x": dataset})
    with pytest.raises(ad.DataError, match="data is a File of an HDF5 file that is closed"):
        examples_of(file)


def test_a_file_in_memory_cannot_be_sent_to_another_process():
    with h5py.File("nowhere", "w", driver="core", backing_store=False) as file:
        file["x"] = LABELS
        data = ad.data.from_source({"x": file["x"]}, num_readers=1)
        with pytest.raises(ad.DataError, match="driver='core', which another process cannot open"):
            data.rows(np.arange(3))
        data.close()


VIEWS = {
    "whole": lambda x: x,
    "from a row on": lambda x: x[3:],
    "every second row": lambda x: x[1::2],
    "columns": lambda x: x[:, 1:3],
    "backwards": lambda x: x[::-1, ::-1],
    "transposed": lambda x: x.T[1:],
    "an array": lambda x: np.asarray(x)[2:][1:],
    "other numbers": lambda x: x[1:].view(np.int16),
}


@pytest.mark.parametrize("offset", [0, 24, 5000])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_another_process_maps_the_same_rows(tmp_path, view, offset):
    numbers = np.arange(10_000, dtype=np.int32)
    numbers.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.int32, "r", offset, (200, 6))
    (column,) = RowsOfArrays([view(mapped)], jax.tree.structure(0)).__getstate__()[0]
    assert isinstance(column, MappedFile), "the numbers would be copied"
    opened = pickle.loads(pickle.dumps(column)).opened()
    assert opened.dtype == view(mapped).dtype
    np.testing.assert_array_equal(opened, view(mapped))
    np.testing.assert_array_equal(opened, view(numbers[offset // 4 :][:1200].reshape(200, 6)))
