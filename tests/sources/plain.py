"""Arrays, lists and user-defined objects."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

import adaptive as ad

from .rows import Group, Row
from .values import DICT, IDS, IMAGES, LENGTH, PAIR, X


class Batch(NamedTuple):
    i: Any
    x: Any


class Files:
    """A source: `len()` and `[i]`."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"i": IDS[index], "x": X[index]}


class Lines:
    """Can be iterated again and again, and has no index."""

    def __iter__(self):
        yield from (Files()[i] for i in range(LENGTH))


def double(example):
    return {**example, "x": 2 * example["x"]}


def noise(example, rng):
    return {**example, "noise": rng.normal(size=2).astype(np.float32)}


def rows(epoch):
    yield from Lines()


def batches(epoch):
    for start in range(0, LENGTH, 7):
        yield {name: leaf[start : start + 7] for name, leaf in DICT.items()}


def endless():
    for i in itertools.count():
        yield Files()[i % LENGTH]


def rows_of_worker(worker, workers, epoch):
    yield from (Files()[i] for i in range(worker, LENGTH, workers))


def arrays(folder: Path) -> dict[str, Any]:
    """The names of the first table."""
    np.save(folder / "images.npy", IMAGES)
    X.tofile(folder / "x.bin")
    libraries = {"np": np, "jnp": jnp, "jax": jax, "sparse": scipy.sparse}
    keys = jax.random.split(jax.random.key(0), LENGTH)
    return {
        **libraries,
        "ids": IDS,
        "x": X,
        "images": IMAGES,
        "keys": keys,
        "Batch": Batch,
        "folder": folder,
        "npz": npz(folder),
    }


@cache
def npz(folder: Path) -> Any:
    """A file of arrays; opened once, because it is never closed."""
    np.savez(folder / "data.npz", i=IDS, x=X)
    return np.load(folder / "data.npz")


@cache
def lines(folder: Path) -> Any:
    """A file of text; opened once, because it is never closed."""
    (folder / "data.jsonl").write_text("{}\n")
    return (folder / "data.jsonl").open()


def own(folder: Path) -> dict[str, Any]:
    """The names of the table of user-defined objects."""
    names = {f.__name__: f for f in (Files, Lines, double, noise, rows, batches, endless, rows_of_worker)}
    return {"ad": ad, "math": math, "ids": IDS, "x": X, "lines": lines(folder), **names}


HALF = X.astype(jnp.bfloat16)

ARRAYS = Group(
    "Arrays and lists",
    (),
    "`ids` is int32 of shape (24,), `x` float32 of shape (24, 3), `images` uint8 of shape (24, 4, 4). `npz` is the "
    "result of `np.load` for a file that `np.savez` wrote.",
    arrays,
    (
        Row('{"i": ids, "x": x}', DICT, quick=True),
        Row("(ids, x)", PAIR),
        Row("Batch(ids, x)", Batch(IDS, X), "a NamedTuple"),
        Row('{"i": ids, "more": {"x": x, "flags": (ids > 3,)}}', {"i": IDS, "more": {"x": X, "flags": (IDS > 3,)}}),
        Row("images", IMAGES),
        Row('{"i": ids, "x": x.astype("float16")}', {"i": IDS, "x": X.astype(np.float16)}),
        Row('{"i": ids.astype(">i8"), "x": x.astype(">f4")}', DICT, "byte order is converted"),
        Row('{"i": ids.astype("int64"), "x": x.astype("float64")}', DICT, noted=True),
        Row('{"i": jnp.asarray(ids), "x": jnp.asarray(x, "bfloat16")}', {"i": IDS, "x": HALF}),
        Row('np.load(folder / "images.npy", mmap_mode="r")', IMAGES),
        Row('{"i": ids, "x": np.memmap(folder / "x.bin", "float32", "r", shape=(24, 3))}', DICT),
        Row("dict(npz)", DICT),
        Row('[{"i": i, "x": row} for i, row in zip(ids, x)]', DICT),
        Row('[{"i": int(i), "x": row.tolist()} for i, row in zip(ids, x)]', DICT, "as rows of JSON"),
        Row("[(i, row) for i, row in zip(ids, x)]", PAIR),
        Row("[(int(i), row.tolist()) for i, row in zip(ids, x)]", PAIR),
        Row("npz", refused="takes for a single leaf. Pass dict(data)"),
        Row("list(x)", refused="Say which"),
        Row("x.tolist()", refused="Say which"),
        Row('{"i": ids, "x": x[:-1]}', refused="different numbers of examples"),
        Row('{"i": ids, "x": x, "n": 24}', refused="is a single number"),
        Row('{"x": x[:0]}', refused="the data set is empty"),
        Row('{"i": ids, "x": x.astype(object)}', refused="holds Python objects"),
        Row('{"i": ids, "name": ids.astype(str)}', refused="holds text"),
        Row('{"i": ids, "when": ids.astype("datetime64[s]")}', refused="holds times"),
        Row('{"i": ids, "x": np.ma.masked_less(x, 0)}', refused="is masked"),
        Row('np.zeros(24, [("i", "i4"), ("x", "f4")])', refused="is a structured array"),
        Row('{"i": ids, "keys": keys}', refused="holds PRNG keys"),
        Row('{"i": ids.astype("int64") + 2**31}', refused="which int32 cannot"),
        Row('{"i": ids, "x": np.full(24, 1e40)}', refused="1e+40"),
        Row('[{"i": 0, "x": [1.0]}, {"i": 1, "x": [1.0, 2.0]}]', refused="pad"),
        Row('[{"i": 0, "x": 1.0}, {"i": 1, "x": None}]', refused="None"),
        Row("sparse.csr_array(x)", refused="sparse"),
        Row("{0, 1, 2}", refused="a set has no order"),
        Row('"data.csv"', refused="holds text"),
        Row("None", refused="the data set has no arrays"),
    ),
)

OWN = Group(
    "Sources and iterators of your own",
    (),
    "`Files` has `__len__` and `__getitem__`, `Lines` has `__iter__`, and `rows` and `batches` are generator "
    "functions. Their examples are dicts of a number and an array. `lines` is an open text file.",
    own,
    (
        Row("Files()", DICT),
        Row("ad.data.from_source(Files(), num_threads=4)", DICT, quick=True),
        Row("range(24)", IDS),
        Row("ad.data.from_source(Files(), map=double)", {"i": IDS, "x": 2 * X}),
        Row(
            "ad.data.from_source(Files(), random_map=noise)",
            {**DICT, "noise": jax.ShapeDtypeStruct((LENGTH, 2), np.float32)},
        ),
        Row("ad.data.from_source(Files(), num_readers=2)", DICT, quick=True),
        Row(
            'ad.data.from_source({"i": ids, "x": x}, random_map=noise, num_readers=1)',
            {**DICT, "noise": jax.ShapeDtypeStruct((LENGTH, 2), np.float32)},
            long=True,
        ),
        Row("Lines()", DICT),
        Row("ad.data.from_iterator(rows)", DICT, quick=True),
        Row("ad.data.from_iterator(rows, map=double, length=24)", {"i": IDS, "x": 2 * X}),
        Row(
            "ad.data.from_iterator(rows, random_map=noise)",
            {**DICT, "noise": jax.ShapeDtypeStruct((LENGTH, 2), np.float32)},
        ),
        Row("ad.data.from_iterator(batches, batched=True)", DICT, "batches of any sizes are taken apart"),
        Row("ad.data.from_iterator(endless, length=math.inf)", DICT, "no epochs"),
        Row("ad.data.from_iterator(rows_of_worker)", DICT, per_worker=True),
        Row("rows", refused="data is a function"),
        Row("rows(0)", refused="a generator can be iterated over only once"),
        Row("zip(ids, x)", refused="a zip can be iterated over only once"),
        Row("lines", refused="can be iterated over only once"),
        Row("42", refused="is a single number"),
    ),
)
