"""Arrays in files that are read by slices: h5py, zarr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adaptive as ad

from .rows import Group, Row
from .values import DICT, IDS, IMAGES, PAIR, X


def hdf5_names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import h5py

    path = folder / "data.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.update({"i": IDS, "x": X, "images": IMAGES})
        with h5py.File(folder / "text.h5", "w") as file:
            file.update({"i": IDS, "name": ["a"] * len(IDS)})
    return {"h5py": h5py, "file": h5py.File(path), "text": h5py.File(folder / "text.h5"), "ad": ad}


def zarr_names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import zarr

    path = folder / "data.zarr"
    if not path.exists():
        group = zarr.open_group(path, mode="w")
        for name, array in {"i": IDS, "x": X, "images": IMAGES}.items():
            group.create_array(name, data=array, chunks=(5, *array.shape[1:]))
    return {"zarr": zarr, "group": zarr.open_group(path, mode="r")}


HDF5 = Group(
    "h5py",
    ("h5py",),
    "`file` is an open `h5py.File` with the data sets `i`, `x` and `images`; `text` has one of strings.",
    hdf5_names,
    (
        Row('{"i": file["i"], "x": file["x"]}', DICT, quick=True),
        Row('file["images"]', IMAGES),
        Row('ad.data.from_source({"i": file["i"], "x": file["x"]}, num_readers=1)', DICT, long=True),
        Row("file", {**DICT, "images": IMAGES}),
        Row("text", refused="data['name'] holds text"),
    ),
)
ZARR = Group(
    "zarr",
    ("zarr",),
    "`group` is a `zarr.Group` with the arrays `i`, `x` and `images`, in chunks of 5 examples.",
    zarr_names,
    (
        Row('{"i": group["i"], "x": group["x"]}', DICT),
        Row('(group["i"], group["x"])', PAIR),
        Row('group["images"]', IMAGES),
        Row("group", {**DICT, "images": IMAGES}),
    ),
)
