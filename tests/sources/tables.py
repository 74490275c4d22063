"""Data frames and tables: pandas, polars, pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .rows import Group, Row
from .values import IDS, LENGTH, X

BIG = IDS + np.int32(2**24 + 1)  # float32 cannot hold these
Y = (IDS / 3).astype(np.float32)
TABLE = {"i": BIG, "y": Y, "seen": IDS > 3}


def pandas_names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import pandas as pd

    frame = pd.DataFrame(TABLE)
    return {"pd": pd, "frame": frame, "x": X, "some": [None, *range(1, LENGTH)]}


def polars_names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import polars as pl

    frame = pl.DataFrame(TABLE)
    return {"pl": pl, "frame": frame}


def arrow_names(folder: Path) -> dict[str, Any]:
    """The names of the table."""
    import pyarrow as pa

    return {"pa": pa, "table": pa.table(TABLE)}


PANDAS = Group(
    "pandas",
    ("pandas",),
    "`frame` has the columns `i`, int32 beyond 2²⁴, `y`, float32, and `seen`, bool. `some` is a list with "
    "a None in it.",
    pandas_names,
    (
        Row("frame", TABLE),
        Row("frame.sample(frac=1)[['y', 'i']].sort_values('i')", {"i": BIG, "y": Y}),
        Row('frame.astype({"i": "Int32"})', TABLE),
        Row('frame["i"]', BIG),
        Row("dict(frame)", TABLE),
        Row("frame.assign(v=list(x))", {**TABLE, "v": X}, "a column of arrays of one shape"),
        Row('{"frame": frame, "x": x}', {"frame": TABLE, "x": X}),
        Row("[frame, frame]", refused="Say what they are"),
        Row('frame.assign(n=pd.array(some, "Int32"))', refused="missing"),
        Row('frame.assign(kind=frame["seen"].astype("category"))', refused="categor"),
        Row("frame.assign(name='a')", refused="text"),
        Row("frame.assign(when=pd.Timestamp(0))", refused="times"),
    ),
)
POLARS = Group(
    "polars",
    ("polars",),
    "`frame` has the same columns.",
    polars_names,
    (
        Row("frame", TABLE),
        Row('frame["i"]', BIG),
        Row("frame.with_columns(name=pl.lit('a'))", refused="text"),
        Row("frame.with_columns(n=pl.lit(None, pl.Int32))", refused="missing"),
        Row("frame.lazy()", refused="collect"),
    ),
)
ARROW = Group(
    "pyarrow",
    ("pyarrow",),
    "`table` has the same columns.",
    arrow_names,
    (
        Row("table", TABLE),
        Row("table.to_batches()[0]", TABLE),
        Row('table["i"]', BIG),
        Row("table.append_column('name', pa.array(['a'] * 24))", refused="text"),
        Row("table.append_column('n', pa.array([None] * 24, pa.int32()))", refused="missing"),
    ),
)
