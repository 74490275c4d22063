"""Data sets and loaders of grain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adaptive as ad

from .plain import Files
from .rows import Group, Row
from .values import DICT, IDS, X


def even(example):
    return example["i"] % 2 == 0


def double(example):
    return {**example, "x": 2 * example["x"]}


def names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import grain

    def loader(*operations: Any, shards: Any = None, **options: Any) -> Any:
        shards = grain.sharding.NoSharding() if shards is None else shards
        sampler = grain.samplers.IndexSampler(24, num_epochs=1, shard_options=shards, seed=0)
        return grain.DataLoader(data_source=Files(), sampler=sampler, operations=operations, **options)

    theirs = {"Batch": grain.transforms.Batch, "ShardOptions": grain.sharding.ShardOptions}
    own = {"data": grain.MapDataset.source(Files()), "loader": loader, "even": even, "double": double}
    return {"ad": ad, "grain": grain, **theirs, **own}


TWICE = {"i": IDS, "x": 2 * X}

GRAIN = Group(
    "grain",
    ("grain",),
    "`data` is `grain.MapDataset.source(Files())`; `loader(*operations)` is a `grain.DataLoader` whose `IndexSampler` "
    "has one epoch.",
    names,
    (
        Row("data", DICT),
        Row("data.shuffle(seed=1).map(double)", TWICE),
        Row("data.slice(slice(0, 24, 2))", {"i": IDS[::2], "x": X[::2]}),
        Row("data.to_iter_dataset()", DICT, quick=True),
        Row("data.shuffle(seed=1).to_iter_dataset().map(double)", TWICE),
        Row("ad.data.from_iterator(data.to_iter_dataset().batch(8), batched=True)", DICT),
        Row("data.filter(even).to_iter_dataset()", {"i": IDS[::2], "x": X[::2]}),
        Row("loader()", DICT),
        Row("ad.data.from_iterator(loader(Batch(8)), batched=True)", DICT),
        Row("loader(shards=ShardOptions(0, 3))", refused="one of 3 parts"),
        Row("data.batch(8)", refused="the data set yields batches"),
        Row("data.to_iter_dataset().batch(8)", refused="the data set yields batches"),
        Row("loader(Batch(8, drop_remainder=True))", refused="the data set yields batches"),
        Row("data.filter(even)", refused=".to_iter_dataset()"),
        Row("data.repeat()", refused="repeated without end. Leave out .repeat()"),
    ),
)
