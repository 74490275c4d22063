"""What the examples stand on: their data and their model."""

from __future__ import annotations

import gzip

import jax
import numpy as np
import pytest

from examples import _data
from examples._models import ConvNet


@pytest.mark.long  # importing scikit-learn takes seconds
def test_digits_are_scaled_and_split():
    digits = _data.load("digits")
    assert digits.train["image"].shape == (1437, 8, 8, 1)
    assert digits.test["image"].shape == (360, 8, 8, 1)
    assert (digits.train["image"].dtype, digits.train["label"].dtype) == (np.float32, np.int32)
    assert (digits.train["image"].min(), digits.train["image"].max()) == (0, 1)
    assert set(digits.test["label"]) == set(range(digits.classes))


def test_fashion_mnist_is_read_from_idx_files(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    written = {}
    for part, n in (("train", 6), ("t10k", 2)):
        pixels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, n, dtype=np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
        written[part] = pixels, labels
    monkeypatch.setattr(_data, "FASHION_MNIST", tmp_path)

    fashion = _data.load("fashion-mnist")

    for part, (pixels, labels) in ((fashion.train, written["train"]), (fashion.test, written["t10k"])):
        assert part["image"].dtype == np.float32
        np.testing.assert_array_equal(np.rint(part["image"][..., 0] * 255), pixels)
        np.testing.assert_array_equal(part["label"], labels)


def test_the_error_about_a_missing_data_set_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(_data, "FASHION_MNIST", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        _data.load("fashion-mnist")
    with pytest.raises(ValueError, match="no data set 'mnist'"):
        _data.load("mnist")  # type: ignore[arg-type]


@pytest.mark.parametrize(("pixels", "n_params"), [(8, 78_058), (28, 121_258)])
def test_the_model_has_the_stated_size(pixels, n_params):
    shapes = jax.eval_shape(ConvNet(10).init, jax.random.key(0), np.zeros((1, pixels, pixels, 1), np.float32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == n_params
