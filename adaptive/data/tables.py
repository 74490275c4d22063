"""Convert data frames and tables of pandas, polars and pyarrow to dicts of columns, without importing them.

Each column becomes its own array: a matrix of one dtype would round integer identifiers to floats and lose the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax

from adaptive.base.arrays import PAD_THEM, NotAnArrayError, is_sparse, on_host
from adaptive.base.errors import DataError
from adaptive.base.tree_paths import leaf_names

from .columns import ColumnError, column_of_arrow, column_of_pandas, column_of_polars
from .hugging_face import column_of_hugging_face

_CLASSES = {
    ("pandas", "DataFrame"): "table",
    ("pandas", "Series"): "column",
    ("pandas", "Index"): "column",
    ("pandas", "ExtensionArray"): "column",
    ("polars", "DataFrame"): "table",
    ("polars", "Series"): "column",
    ("pyarrow", "Table"): "table",
    ("pyarrow", "RecordBatch"): "table",
    ("pyarrow", "Array"): "column",
    ("pyarrow", "ChunkedArray"): "column",
    ("datasets", "Column"): "column",
}
_LAZY = {
    ("polars", "LazyFrame"): "x.collect()",
    ("dask", "DataFrame"): "x.compute()",
    ("dask", "FrameBase"): "x.compute()",
    ("pyarrow", "Dataset"): "x.to_table()",
}


class _Library(NamedTuple):
    """The column converter of a library, and code in that library for the advice in errors."""

    read: Callable[[Any], Any]
    table: str
    drop: str
    codes: str
    fill: str
    drop_missing: str
    join: str


_LIBRARIES = {
    "pandas": _Library(
        column_of_pandas,
        *("df", "df.drop(columns={names})", "{x}.cat.codes", "{x}.fillna(0)", "df.dropna(subset={names})"),
        "pandas.concat(data, ignore_index=True)",
    ),
    "polars": _Library(
        column_of_polars,
        *("df", "df.drop({names})", "{x}.to_physical()", "{x}.fill_null(0)", "df.drop_nulls({names})"),
        "polars.concat(data)",
    ),
    "pyarrow": _Library(
        column_of_arrow,
        *("table", "table.drop_columns({names})", "{x}.combine_chunks().indices"),
        *("pyarrow.compute.fill_null({x}, 0)", "table.drop_null()", "pyarrow.concat_tables(data)"),
    ),
    "datasets": _Library(
        column_of_hugging_face,
        *("data", "data.remove_columns({names})", "data.map(…)", "data.map(…)", "data.filter(…)"),
        "datasets.concatenate_datasets(data)",
    ),
}


@lru_cache(maxsize=1024)
def _class_of(cls: type) -> tuple[Literal["table", "column", "lazy", ""], str]:
    """Return what instances of a class are, and their library; for lazy ones, the code that makes a table of them."""
    for base in cls.__mro__:
        key = (base.__module__.partition(".")[0], base.__name__)
        if key in _CLASSES:
            return _CLASSES[key], key[0]  # type: ignore[return-value]
        if key in _LAZY:
            return "lazy", _LAZY[key]
    return "", ""


def is_tabular(value: object) -> bool:
    """Return whether `value` is a table or a column of pandas, polars or pyarrow, or a query of one."""
    return bool(_class_of(type(value))[0])  # type: ignore[arg-type]  # mypy: a class is not hashable


def is_table(value: object) -> bool:
    """Return whether `value` is a data frame or a table."""
    return _class_of(type(value))[0] == "table"  # type: ignore[arg-type]


def by_column(data: Any, root: str = "data") -> Any:
    """Return data with a dict of arrays in place of each table, and an array in place of each single column.

    Args:
      data: a pytree; anything else is returned unchanged.
      root: name of the data in errors.

    Raises:
      DataError: a column does not hold numbers; names of columns are missing or repeated; data are a list of tables.
    """
    if isinstance(data, list):
        _refuse_list_of_tables(data)
        if data and isinstance(data[0], dict):  # a list of examples, whose tables are converted one by one later
            return data
    if jax.tree_util.all_leaves([data]) and not is_tabular(data) and not is_sparse(data):
        return data
    leaves, tree = jax.tree.flatten(data, is_leaf=is_sparse)
    if not any(is_tabular(leaf) or is_sparse(leaf) for leaf in leaves):
        return data
    found = []
    for number, leaf in enumerate(leaves):
        try:
            found.append(arrays_of(leaf) if is_tabular(leaf) else on_host(leaf) if is_sparse(leaf) else leaf)
        except NotAnArrayError as error:
            name = leaf_names(tree.unflatten(range(len(leaves))), root)[number]
            raise DataError(error.about(name)) from error
    return tree.unflatten(found)


def arrays_of(value: Any) -> Any:
    """Return a table as a dict of arrays by column name, and a column as an array.

    Raises:
      NotAnArrayError: a column does not hold numbers; a table has no columns, or unsuitable names; a query is lazy.
    """
    kind, library = _class_of(type(value))  # type: ignore[arg-type]
    if kind == "lazy":
        raise NotAnArrayError(f"is a {type(value).__name__}, which has not been read. Pass {library}.")
    if kind == "table":
        return _arrays_of_table(value, _LIBRARIES[library])
    try:
        return _LIBRARIES[library].read(value)
    except ColumnError as error:
        (advice,) = _advice([("x", error)], _LIBRARIES[library], alone=True)
        raise NotAnArrayError(f"holds {advice}") from error


def _arrays_of_table(table: Any, library: _Library) -> dict[str, Any]:
    names = _names_of(table)
    arrays, wrong = {}, []
    for name in names:
        try:
            arrays[name] = library.read(table[name])
        except ColumnError as error:
            wrong.append((name, error))
    if wrong:
        lines = "\n    ".join(_advice(wrong, library))
        raise NotAnArrayError(f"has columns that are not arrays of numbers:\n    {lines}")
    return arrays


def _names_of(table: Any) -> list[str]:
    """Return the names of a table's columns, which must be unique texts."""
    columns = getattr(table, "column_names", None)  # pyarrow; its `columns` are the arrays
    columns = table.columns if columns is None else columns
    if getattr(columns, "nlevels", 1) > 1:
        raise NotAnArrayError(
            "has column names of several levels. Join them:  df.columns = ['_'.join(map(str, c)) for c in df.columns]"
        )
    names = list(columns)
    if not names:
        raise NotAnArrayError("is a table without columns.")
    other = [name for name in names if not isinstance(name, str)]
    if other:
        raise NotAnArrayError(
            f"has column names that are not text: {', '.join(map(repr, other[:8]))}. A batch is a dict of columns by "
            "name. Name them,  df.rename(columns=str),  or pass one array of all,  df.to_numpy()"
        )
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise NotAnArrayError(f"has several columns of one name: {', '.join(map(repr, repeated))}. Rename them.")
    return names


_ORDER = ("text", "bytes", "other", "times", "categories", "missing", "ragged")


def _advice(wrong: Sequence[tuple[str, ColumnError]], library: _Library, alone: bool = False) -> list[str]:
    """Return a line for each kind of error: the columns, their contents, and the code to write.

    Args:
      wrong: the columns with errors.
      library: their library.
      alone: whether the column was passed without its table.
    """
    lines = []
    for why in _ORDER:
        those = [(name, error) for name, error in wrong if error.why == why]
        if not those:
            continue
        names = [name for name, _ in those]
        x = "x" if alone else f"{library.table}[{names[0]!r}]"
        drop = "" if alone else f", or leave {_it(names)} out:  {library.drop.format(names=names)}"
        what = "; ".join(dict.fromkeys(error.what for _, error in those))
        listed = ", ".join(repr(name) + f" (row {error.row})" * (why == "missing") for name, error in those)
        first = f", the first in row {those[0][1].row}" if alone and why == "missing" else ""
        lines.append(
            ("" if alone else f"{listed}: ")
            + f"{what}{first}. "
            + {
                "categories": f"Pass the codes:  {library.codes.format(x=x)}",
                "missing": f"Fill them:  {library.fill.format(x=x)}"
                + ("" if alone else f",  or leave the rows out:  {library.drop_missing.format(names=names)}"),
                "ragged": PAD_THEM,
            }.get(why, f"Make numbers of {'it' if alone else _it(names)}{drop}")
        )
    return lines


def _it(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _refuse_list_of_tables(data: list[Any]) -> None:
    """Raise for a list of tables, which would be mistaken for a list of examples."""
    if data and all(map(is_table, data)):
        library = _LIBRARIES[_class_of(type(data[0]))[1]]  # type: ignore[arg-type]
        raise DataError(
            f"data is a list of {len(data)} of {type(data[0]).__name__}. Say what they are:\n"
            f"    {library.join}     one data set, the rows of all\n"
            "    ad.Shards(data)     a data set for each worker\n"
            "    tuple(data)     tables that lie side by side, with a row of each in an example"
        )
