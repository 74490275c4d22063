"""Data sets of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import adaptive as ad

from .rows import Group, Row
from .values import DICT, IDS, IMAGES, X


def rows():
    yield from ({"i": i, "x": x} for i, x in zip(IDS, X, strict=True))


def names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import datasets
    import datasets.distributed

    features = datasets.Features(
        {"i": datasets.Value("int32"), "x": datasets.List(datasets.Value("float32"), length=3)}
    )
    data = datasets.Dataset.from_dict({"i": IDS, "x": X}, features=features)
    pixels = datasets.Features({"i": datasets.Value("int32"), "image": datasets.Array2D((4, 4), "uint8")})
    images = datasets.Dataset.from_dict({"i": IDS, "image": IMAGES}, features=pixels)
    text = data.add_column("text", [str(i) for i in IDS])
    nodes = {"split_dataset_by_node": datasets.distributed.split_dataset_by_node}
    return {"ad": ad, "np": np, "data": data, "images": images, "text": text, **nodes}


HUGGING_FACE = Group(
    "Hugging Face datasets",
    ("datasets",),
    "`data` is a `Dataset` with the columns `i`, int32, and `x`, lists of three float32; `images` has a column of "
    '`Array2D((4, 4), "uint8")`, and `text` one of strings.',
    names,
    (
        Row("data", DICT),
        Row('data.with_format("numpy")', DICT),
        Row('data.with_format("torch")', DICT, modules=("torch",)),
        Row("images", {"i": IDS, "image": IMAGES}),
        Row("data.map(lambda row: {'x': [2 * v for v in row['x']]})", {"i": IDS, "x": 2 * X}),
        Row("data.to_iterable_dataset()", DICT),
        Row("text.remove_columns('text')", DICT),
        Row("data.select(range(12)).shuffle(seed=1)", {"i": IDS[:12], "x": X[:12]}),
        Row("text", refused="text"),
        Row("data.to_iterable_dataset().batch(8)", refused="the data set yields batches"),
        Row("split_dataset_by_node(data.to_iterable_dataset(), 0, 3)", refused="one of 3 parts"),
    ),
)
