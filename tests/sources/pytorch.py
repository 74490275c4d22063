"""PyTorch's tensors, data sets and loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

import adaptive as ad

from .rows import Group, Row
from .values import DICT, IDS, LENGTH, PAIR, X


def names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import torch
    from torch.utils import data as torch_data

    from .torch_sets import Dataset, Pairs, Stream, doubled

    own = {f.__name__: f for f in (Dataset, Pairs, Stream, doubled)}
    theirs = (
        "DistributedSampler",
        "ConcatDataset",
        "DataLoader",
        "Subset",
        "TensorDataset",
        "WeightedRandomSampler",
        "random_split",
    )
    tensors = {"ids": torch.arange(LENGTH), "x": torch.from_numpy(X)}
    return {"ad": ad, "torch": torch, **tensors, **{name: getattr(torch_data, name) for name in theirs}, **own}


HALVES = "ConcatDataset([TensorDataset(ids[:9], x[:9]), TensorDataset(ids[9:], x[9:])])"

TORCH = Group(
    "PyTorch",
    ("torch",),
    "`ids` is `torch.arange(24)` and `x` a float32 tensor of shape (24, 3). `Dataset` is map-style, and `Stream` is an "
    "`IterableDataset` that divides its examples among a loader's workers, by `get_worker_info()`.",
    names,
    (
        Row('{"i": ids, "x": x}', DICT),
        Row("(ids, x)", PAIR),
        Row('{"i": ids, "x": x.clone().requires_grad_()}', DICT),
        Row('{"i": ids, "x": x.to(torch.bfloat16)}', {"i": IDS, "x": X.astype(jnp.bfloat16)}),
        Row("Dataset()", DICT),
        Row("Pairs()", (X, IDS)),
        Row("TensorDataset(ids, x)", PAIR),
        Row("Subset(TensorDataset(ids.repeat(2), x.repeat(2, 1)), range(24))", PAIR),
        Row(HALVES, PAIR),
        Row("DataLoader(Dataset(), batch_size=8, shuffle=True)", DICT, noted=True),
        Row(
            "DataLoader(Dataset(), batch_size=8, sampler=DistributedSampler(Dataset(), 3, 0))",
            DICT,
            "the whole data set",
        ),
        Row("DataLoader(Dataset(), batch_size=8, collate_fn=doubled)", {"i": IDS, "x": 2 * X}),
        Row("DataLoader(TensorDataset(ids, x), batch_size=8, num_workers=2)", PAIR, long=True),
        Row("Stream()", DICT),
        Row("DataLoader(Stream(), batch_size=8)", DICT),
        Row("DataLoader(Stream(), batch_size=8, num_workers=2)", DICT, quick=True),
        Row("ad.data.from_iterator(DataLoader(Dataset(), batch_size=8), batched=True)", DICT),
        Row("ad.data.from_iterator(DataLoader(Dataset(), batch_size=8, shuffle=True), batched=True)", DICT),
        Row("ad.data.from_iterator(DataLoader(Dataset(), batch_size=8, num_workers=2), batched=True)", DICT, long=True),
        Row(
            "DataLoader(Dataset(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 24, 24))",
            refused="sampler is a WeightedRandomSampler, which picks examples",
        ),
        Row("ad.data.from_iterator(DataLoader(Dataset(), batch_size=8))", refused="batched=True"),
        Row(
            "ad.data.from_iterator(DataLoader(Dataset(), sampler=DistributedSampler(Dataset(), 3, 0)), batched=True)",
            refused="one of 3 parts",
        ),
        Row('{"i": ids, "x": x.to_sparse()}', refused="sparse"),
    ),
)
