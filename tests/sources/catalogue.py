"""The kinds of data that a program takes, and types of other libraries with the line that the advice says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
from adaptive.data.rows import rows_of

LENGTH = 24
IDS = np.arange(LENGTH, dtype=np.int32)
X = np.random.default_rng(0).normal(size=(LENGTH, 3)).astype(np.float32)
IMAGES = np.broadcast_to(IDS.astype(np.uint8)[:, None, None], (LENGTH, 4, 4)) + np.eye(4, dtype=np.uint8)[::-1]
DICT, PAIR = {"i": IDS, "x": X}, (IDS, X)
HALF = X.astype(jnp.bfloat16)
NOISY = {**DICT, "noise": jax.ShapeDtypeStruct((LENGTH, 2), np.float32)}


@dataclass(frozen=True)
class Row:
    """A kind of data.

    Attributes:
      data: the expression that a user writes.
      examples: what the program must take, a pytree of arrays with a row for each; see `ids` for how an example is
        known. A leaf that is a `jax.ShapeDtypeStruct` can have any values.
      refused: whether the data are refused, with an error whose last words are the line to write. The program takes
        what that line says.
    """

    data: str
    examples: Any
    refused: bool = False


@dataclass(frozen=True)
class Group:
    """Data of one library: its title, the modules that must be installed, and the names in the expressions."""

    title: str
    modules: tuple[str, ...]
    names: Callable[[Path], dict[str, Any]]
    rows: tuple[Row, ...]

    def build(self, row: Row, folder: Path) -> Any:
        """What a program takes for a row, which is the advice where the data are refused. Writes files to `folder`."""
        for module in self.modules:
            pytest.importorskip(module)
        names = self.names(folder)
        data = eval(row.data, names)
        return eval(advice(data), {**names, "data": data}) if row.refused else data


def advice(data: Any) -> str:
    """The line that the error about these data says to write."""
    with pytest.raises(ad.DataError) as error:
        rows_of(data)
    return str(error.value).rpartition("  ")[2]


class Files:
    """A source of one's own."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"i": IDS[i], "x": X[i]}


class Lines:
    """An iterable of one's own."""

    def __iter__(self) -> Any:
        return rows(0)


def rows(epoch: int) -> Any:
    for i in range(LENGTH):
        yield {"i": IDS[i], "x": X[i]}


def rows_of_worker(worker: int) -> Any:
    return rows(0)


def batches() -> Any:
    for start in range(0, LENGTH, 8):
        yield {"i": IDS[start : start + 8], "x": X[start : start + 8]}


def noise(example: Any, rng: np.random.Generator) -> Any:
    return {**example, "noise": rng.random(2).astype(np.float32)}


def double(example: Any) -> Any:
    return {**example, "x": 2 * example["x"]}


OWN_NAMES = {f.__name__: f for f in (Files, Lines, rows, rows_of_worker, batches, noise, double)}
COMMON = {"ad": ad, "jax": jax, "jnp": jnp, "np": np, "ids": IDS, "x": X, "images": IMAGES, **OWN_NAMES}


def plain(folder: Path) -> dict[str, Any]:
    np.save(folder / "images.npy", IMAGES)
    np.savez(folder / "both.npz", i=IDS, x=X)
    return {**COMMON, "folder": folder, "npz": np.load(folder / "both.npz")}


PLAIN = Group(
    "arrays and one's own",
    (),
    plain,
    (
        Row('{"i": ids, "x": x}', DICT),
        Row('{"i": ids.astype("int64"), "x": x.astype(">f8")}', DICT),
        Row('{"i": jnp.asarray(ids), "x": jnp.asarray(x, "bfloat16")}', {"i": IDS, "x": HALF}),
        Row('np.load(folder / "images.npy", mmap_mode="r")', IMAGES),
        Row('ad.data.from_source({"i": ids, "x": x}, random_map=noise)', NOISY),
        Row("Files()", DICT),
        Row("ad.data.from_source(Files(), map=double)", {"i": IDS, "x": 2 * X}),
        Row("ad.data.from_source(Files(), random_map=noise)", NOISY),
        Row("ad.data.from_source(Files(), num_threads=4)", DICT),
        Row("ad.data.from_source(Files(), num_readers=1)", DICT),
        Row("ad.data.from_iterator(rows)", DICT),
        Row("ad.data.from_iterator(rows, map=double, length=24)", {"i": IDS, "x": 2 * X}),
        Row("ad.data.from_iterator(rows_of_worker)", DICT),
        Row("npz", DICT, refused=True),
        Row('[{"i": i, "x": row} for i, row in zip(ids, x)]', DICT, refused=True),
        Row("Lines()", DICT, refused=True),
        Row("rows", DICT, refused=True),
    ),
)


def torch_names(folder: Path) -> dict[str, Any]:
    import torch
    from torch.utils import data
    from torch.utils.data import DataLoader, Subset, TensorDataset

    class Dataset(data.Dataset):
        def __len__(self):
            return LENGTH

        def __getitem__(self, index):
            return {"i": torch.tensor(index, dtype=torch.int32), "x": torch.from_numpy(X)[index]}

    class Pairs(Dataset):
        def __getitem__(self, index):
            return torch.from_numpy(X)[index], index

    class Stream(data.IterableDataset):
        def __iter__(self):
            yield from (Dataset()[i] for i in range(LENGTH))

    kinds = (DataLoader, Subset, TensorDataset, Dataset, Pairs, Stream)
    return {**COMMON, "torch": torch, **{kind.__name__: kind for kind in kinds}, "t": torch.from_numpy(X)}


TORCH = Group(
    "torch",
    ("torch",),
    torch_names,
    (
        Row('{"i": torch.arange(24), "x": t}', DICT),
        Row('{"i": torch.arange(24), "x": t.to(torch.bfloat16)}', {"i": IDS, "x": HALF}),
        Row("Dataset()", DICT),
        Row("Pairs()", (X, IDS)),
        Row("Subset(TensorDataset(torch.arange(24).repeat(2), t.repeat(2, 1)), range(24))", PAIR),
        Row("ad.data.from_iterator(lambda: iter(DataLoader(Dataset(), batch_size=None)))", DICT),
        Row("DataLoader(Dataset(), batch_size=8, shuffle=True)", DICT, refused=True),
        Row("DataLoader(Stream(), batch_size=8)", DICT, refused=True),
        Row("Stream()", DICT, refused=True),
    ),
)


def grain_names(folder: Path) -> dict[str, Any]:
    import grain

    source = grain.MapDataset.source(Files())
    sampler = grain.samplers.IndexSampler(LENGTH, grain.sharding.NoSharding(), num_epochs=1, seed=0)
    loader = grain.DataLoader(data_source=Files(), sampler=sampler)
    return {**COMMON, "data": source, "loader": loader, "even": lambda e: True}


GRAIN = Group(
    "grain",
    ("grain",),
    grain_names,
    (
        Row("data", DICT),
        Row("data.shuffle(seed=1).map(double)", {"i": IDS, "x": 2 * X}),
        Row("data.filter(even)", DICT, refused=True),
        Row("data.to_iter_dataset()", DICT, refused=True),
        Row("loader", DICT, refused=True),
    ),
)


def hugging_face_names(folder: Path) -> dict[str, Any]:
    import datasets

    features = datasets.Features({"i": datasets.Value("int32"), "x": datasets.Sequence(datasets.Value("float32"), 3)})
    data = datasets.Dataset.from_dict({"i": IDS.tolist(), "x": X.tolist()}, features=features)
    return {**COMMON, "data": data, "splits": datasets.DatasetDict(train=data.with_format("numpy"))}


HUGGING_FACE = Group(
    "Hugging Face",
    ("datasets",),
    hugging_face_names,
    (
        Row('data.with_format("numpy")', DICT),
        Row("data", DICT, refused=True),
        Row("data.to_iterable_dataset()", DICT, refused=True),
        Row("splits", DICT, refused=True),
    ),
)


HUGGING_FACE_TORCH = Group(
    "Hugging Face and PyTorch",
    ("datasets", "torch"),
    hugging_face_names,
    (Row('data.with_format("torch")', DICT),),
)


def table_names(folder: Path) -> dict[str, Any]:
    import h5py
    import pandas
    import polars
    import pyarrow
    import zarr

    columns = {"i": IDS, "x": X[:, 0]}
    file = h5py.File(folder / "data.h5", "w")
    group = zarr.open_group(folder / "data.zarr", mode="w")
    for key, column in columns.items():
        file[key] = column
        group.create_array(key, data=column)
    return {
        **COMMON,
        "pandas": pandas.DataFrame(columns),
        "polars": polars.DataFrame(columns),
        "arrow": pyarrow.table(columns),
        "hdf5": file,
        "zarr": group,
    }


COLUMNS = {"i": IDS, "x": X[:, 0]}
TABLES = Group(
    "tables and files",
    ("pandas", "polars", "pyarrow", "h5py", "zarr"),
    table_names,
    (
        Row("pandas", COLUMNS, refused=True),
        Row("polars", COLUMNS, refused=True),
        Row("arrow", COLUMNS, refused=True),
        Row("hdf5", COLUMNS, refused=True),
        Row('hdf5["i"]', IDS, refused=True),
        Row("zarr", COLUMNS, refused=True),
        Row('zarr["i"]', IDS, refused=True),
    ),
)

GROUPS = (PLAIN, TORCH, GRAIN, HUGGING_FACE, HUGGING_FACE_TORCH, TABLES)
CASES = [pytest.param(group, row, id=f"{group.title}: {row.data}") for group in GROUPS for row in group.rows]
