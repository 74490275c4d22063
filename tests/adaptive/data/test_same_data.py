"""Whether processes have the same data: what is compared, and sources that cannot be compared."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
from adaptive.data import same_data as _same_data
from adaptive.data.rows import rows_of
from adaptive.data.same_data import digests_of_data
from tests.adaptive.drivers import make_data


class Source:
    """Rows of an array, read one by one; with noise, if any."""

    def __init__(self, array, noise=0.0):
        self.array, self.noise, self.read = array, noise, []
        self.rng = np.random.default_rng()

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": self.array[index] + np.float32(self.noise * self.rng.random())}


def differ(a, b):
    one, other = digests_of_data(rows_of(a)), digests_of_data(rows_of(b))
    return [name for name in one if one[name] != other.get(name)]


def test_each_leaf_is_compared_and_named():
    data = make_data(50)
    assert digests_of_data(rows_of(data))["data"] == "50 examples"
    assert differ(data, make_data(50)) == []
    assert differ(data, make_data(51)) == ["data", "data['x']", "data['y']"]
    assert differ(data, {**data, "y": data["y"][::-1]}) == ["data['y']"]
    assert differ(data, {**data, "y": data["y"].astype(np.float16)}) == ["data['y']"]
    assert differ(make_data(1), make_data(1)) == []


@pytest.mark.parametrize("block", [1, 100, 16 << 20])
def test_of_arrays_every_row_is_compared(monkeypatch, block):
    monkeypatch.setattr(_same_data, "_BLOCK_BYTES", block)
    data = np.zeros((1000, 3), np.float32)
    for row in (0, 1, 500, 999):
        odd = data.copy()
        odd[row, 1] = 1
        assert differ({"x": data}, {"x": odd}) == ["data['x']"]
    assert differ(data, np.asfortranarray(data)) == []


def test_rows_that_differ_at_regular_distances_are_found():
    """As when every row but each sixteenth is another: rows that are looked at must not lie evenly."""
    data = np.zeros((4096, 2), np.float32)
    odd = data.copy()
    odd[np.arange(4096) % 16 != 0] = 1
    assert differ(Source(data), Source(odd)) == ["data['x']"]


def test_of_data_larger_than_memory_some_rows_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(_same_data, "_ROWS_OF_LARGE", 8)
    data = np.memmap(tmp_path / "x", np.float32, "w+", shape=(1000, 2))
    in_memory = np.array(data)
    assert digests_of_data(rows_of(data)) == digests_of_data(rows_of(in_memory))
    few = in_memory.copy()
    few[_same_data._sample(1000, 8)[0] + 1] = 1
    assert differ({"x": few}, {"x": in_memory}) == ["data['x']"]
    monkeypatch.setattr(_same_data, "_ALL_BYTES", 7999)
    assert differ({"x": few}, {"x": in_memory}) == []
    assert differ({"x": np.ones_like(few)}, {"x": in_memory}) == ["data['x']"]


def test_shards_are_compared_as_one_data_set():
    shards = [ad.Shards([make_data(5), make_data(n, seed=1)]) for n in (7, 7, 8)]
    digests = [digests_of_data(s) for s in shards]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0]["data"] == "5 + 7 examples"
    assert digests_of_data(ad.Shards([make_data(7), make_data(5)]))["data"] == "7 + 5 examples"
