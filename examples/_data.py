"""The data sets of the examples: arrays in memory, read from installed packages and never downloaded."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

# The folder of Debian's package; set FASHION_MNIST to another folder with the same four files.
FASHION_MNIST = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))


class Dataset(NamedTuple):
    """Images, float32 in [0, 1] with shape=(examples, height, width, 1), and labels, int32 with shape=(examples,)."""

    train: dict[str, np.ndarray]  # "image" and "label"
    test: dict[str, np.ndarray]
    classes: int
    name: str


def load(name: Literal["digits", "fashion-mnist"] = "digits") -> Dataset:
    """Load a data set, with the same arrays in the same order every time.

    Args:
      name: "digits", 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, split 80/20; or
        "fashion-mnist", 60,000 + 10,000 pictures of clothes of 28x28 pixels, from Debian's package
        dataset-fashion-mnist.
    """
    if name == "digits":
        return _digits()
    if name == "fashion-mnist":
        return _fashion_mnist()
    raise ValueError(f"no data set {name!r}; there are 'digits' and 'fashion-mnist'")


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    # The file is ordered by writer: without shuffling, the test digits would be by other writers.
    order = np.random.default_rng(0).permutation(len(images))
    n_train = len(order) * 4 // 5
    train, test = (
        {"image": images[i], "label": labels[i].astype(np.int32)} for i in (order[:n_train], order[n_train:])
    )
    return Dataset(train, test, classes=10, name="digits")


def _fashion_mnist() -> Dataset:
    if not FASHION_MNIST.is_dir():
        raise FileNotFoundError(
            f"Fashion-MNIST is not in {FASHION_MNIST}. On Debian and Ubuntu:\n"
            "    apt-get install dataset-fashion-mnist\n"
            "Elsewhere set FASHION_MNIST to a folder with its four idx*.gz files."
        )
    train, test = (
        {
            "image": (_idx(f"{part}-images-idx3-ubyte.gz") / np.float32(255))[..., None],
            "label": _idx(f"{part}-labels-idx1-ubyte.gz").astype(np.int32),
        }
        for part in ("train", "t10k")
    )
    return Dataset(train, test, classes=10, name="fashion-mnist")


def _idx(file: str) -> np.ndarray:
    """Read the IDX format: two zeros, type (8: bytes), rank; the shape as big-endian int32; then the elements."""
    raw = gzip.decompress((FASHION_MNIST / file).read_bytes())
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{FASHION_MNIST / file} is no IDX file of bytes: it starts with {raw[:4].hex(' ')}")
    rank = raw[3]
    shape = np.frombuffer(raw, ">i4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)
