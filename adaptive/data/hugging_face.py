"""Read data sets of Hugging Face in the dtypes of their features, without importing datasets.

Without a format, these data sets return Python lists and numbers, which become int64 arrays for any integer feature: an
image of uint8 would take eight times the memory. So their Arrow tables are read instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from adaptive.base.arrays import GIVE_A_MASK
from adaptive.base.errors import DataError

from .columns import ColumnError, column_of_arrow, column_of_cells
from .grain_pipelines import module_of

_OWN_DTYPES = (None, "numpy", "arrow", "pandas", "polars")  # formats in which the same numbers are handed over


def is_hugging_face(data: Any) -> bool:
    """Return whether `data` is a `datasets.Dataset` whose rows are to be read in the dtypes of its features."""
    return (
        module_of(data) == "datasets"
        and hasattr(data, "with_format")
        and data.format["type"] in _OWN_DTYPES
        and not data.format["format_kwargs"]
    )


def refuse_splits(data: Any) -> None:
    """Raise if `data` is a dict of splits.

    Raises:
      DataError: `data` is a dict of splits.
    """
    if module_of(data) == "datasets" and isinstance(data, dict):
        name = next(iter(data), "train")
        raise DataError(
            f"data is a {type(data).__name__} of splits: {', '.join(map(repr, data))}. Pass one:  data[{name!r}]"
        )


class HuggingFaceRows:
    """A source of the rows of a `datasets.Dataset`: dicts of arrays, in the dtypes of its features.

    Lists of equal lengths are arrays; a list of dicts is a dict of arrays.

    Args:
      dataset: the data set.
      strict: whether all columns must be arrays of numbers; otherwise text, None and other objects stay unchanged, for
        a function that is applied to each example.

    Raises:
      DataError: `strict`, and a column does not hold numbers.
    """

    def __init__(self, dataset: Any, *, strict: bool):
        names = dataset.format["columns"] or dataset.column_names
        if strict:
            _refuse_text(dataset.features, names)
        decoded = [name for name in names if _is_decoded(dataset.features[name])]
        arrow = [name for name in names if name not in decoded]
        self._length, self._names, self._strict = len(dataset), list(names), strict
        self._arrow = dataset.with_format("arrow", columns=arrow) if arrow else None
        self._decoded = dataset.with_format(None, columns=decoded) if decoded else None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Return the row at an index, as a dict of arrays by column."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows at these indices.

        Raises:
          DataError: a row holds None or something other than numbers, and the rows are strict.
        """
        numbers = list(indices)
        columns: dict[str, list[Any]] = {}
        if self._arrow is not None:
            table = self._arrow[numbers]
            columns |= {name: self._rows_of(table[name], name, numbers) for name in table.column_names}
        if self._decoded is not None:
            for name, cells in self._decoded[numbers].items():
                columns[name] = [self._decoded_cell(cell, name, n) for cell, n in zip(cells, numbers, strict=True)]
        return [{name: columns[name][k] for name in self._names} for k in range(len(numbers))]

    def _rows_of(self, column: Any, name: str, numbers: Sequence[int]) -> list[Any]:
        """Return the rows of one column, as arrays.

        Raises:
          DataError: a row holds None or something other than numbers, and the rows are strict.
        """
        try:
            found = column_of_arrow(column)
        except ColumnError as error:
            if len(numbers) > 1:  # one by one: lists may differ in length between rows, and an error names its row
                return [self._rows_of(column.slice(k, 1), name, numbers[k : k + 1])[0] for k in range(len(numbers))]
            if not self._strict:
                return column.to_pylist()
            raise DataError(f"data[{numbers[0]}][{name!r}] {_sentence(error)}") from error
        return [jax.tree.map(lambda a, k=k: a[k], found) for k in range(len(numbers))]

    def _decoded_cell(self, cell: Any, name: str, number: int) -> Any:
        if cell is None and self._strict:
            raise DataError(f"data[{number}][{name!r}] is None. {GIVE_A_MASK}")
        return np.asarray(cell) if hasattr(cell, "__array_interface__") else cell  # an image of Pillow


def _sentence(error: ColumnError) -> str:
    return f"holds None. {GIVE_A_MASK}" if error.why == "missing" else f"holds {error.what}."


def column_of_hugging_face(column: Any) -> Any:
    """Return a `datasets.Column`, such as `dataset["x"]`, as an array of its feature's dtype.

    Raises:
      ColumnError: the column does not hold numbers.
    """
    dataset, name = column.source, column.column_name
    if not hasattr(dataset, "with_format"):  # a column of a column
        return column_of_cells(list(column))
    if _is_decoded(dataset.features[name]):
        return column_of_cells(list(dataset.with_format(None, columns=[name])[name]))
    return column_of_arrow(dataset.with_format("arrow", columns=[name])[:][name])


# --- data sets without an index ---------------------------------------------------------------------------------------


class TypedExamples:
    """The examples of a `datasets.IterableDataset` with known features, with lists and numbers as arrays of the dtypes
    of these features.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        features = self._dataset.features
        return ({name: _typed(x, features.get(name)) for name, x in row.items()} for row in self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch by which the data set shuffles."""
        self._dataset.set_epoch(epoch)


def typed_examples(data: Any, *, strict: bool) -> Any:
    """Return `TypedExamples` of an `IterableDataset` of Hugging Face whose features are known; other data unchanged.

    Args:
      data: any data.
      strict: whether all columns must be arrays of numbers.

    Raises:
      DataError: `strict`, and a column does not hold numbers.
    """
    if module_of(data) != "datasets" or not isinstance(data, Iterable) or hasattr(data, "with_transform"):
        return data
    features = getattr(data, "features", None)
    if not features:
        return data
    if strict:
        _refuse_text(features, list(features))
    return TypedExamples(data)


def _typed(value: Any, feature: Any) -> Any:
    """Convert a Python value to an array of its feature's dtype; arrays and text stay unchanged."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return {name: _typed(x, feature.get(name)) for name, x in value.items()}
    parts = getattr(feature, "feature", None)
    if isinstance(parts, dict) and isinstance(value, list) and all(isinstance(x, dict) for x in value):
        return {name: _typed([x.get(name) for x in value], part) for name, part in parts.items()}
    dtype = _dtype_of(feature)
    if dtype is None or not isinstance(value, list | bool | int | float):
        return value
    with suppress(ValueError, TypeError):  # ragged lists and None are refused later, with the name of the leaf
        return np.asarray(value, dtype)
    return value


def _dtype_of(feature: Any) -> np.dtype | None:
    """Return the dtype of a feature's numbers, also of numbers in its lists; None if it does not hold numbers."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    with suppress(TypeError):
        dtype = np.dtype(getattr(feature, "dtype", "O"))
        return dtype if dtype.kind in "biuf" else None
    return None


# --- features ---------------------------------------------------------------------------------------------------------


def _refuse_text(features: Any, names: Sequence[str]) -> None:
    """Raise if columns hold text, bytes or times.

    Raises:
      DataError: names all such columns.
    """
    wrong = {name: kinds for name in names if (kinds := [k for k in _kinds(features[name]) if k.startswith(_NOT)])}
    if not wrong:
        return
    rest = [name for name in names if name not in wrong]
    listed = ", ".join(f"{name!r} ({kinds[0]})" for name, kinds in wrong.items())
    raise DataError(
        f"data has columns that hold no numbers: {listed}. "
        + (f"Leave them out:  data.select_columns({rest})" if rest else "Make numbers of them:  data.map(…)")
    )


_NOT = ("string", "large_string", "binary", "large_binary", "date", "time", "duration", "decimal", "null")


def _kinds(feature: Any) -> Iterator[str]:
    """Yield the names that datasets gives to the dtypes of a feature's values."""
    if isinstance(feature, dict):
        for part in feature.values():
            yield from _kinds(part)
    elif isinstance(feature, list):
        yield from _kinds(feature[0])
    elif hasattr(feature, "feature"):
        yield from _kinds(feature.feature)
    elif type(feature).__name__.startswith("Translation"):
        yield "string"
    elif not hasattr(feature, "decode_example"):
        yield str(getattr(feature, "dtype", ""))


def _is_decoded(feature: Any) -> bool:
    """Return whether reading a value decodes it, as for images."""
    if isinstance(feature, dict):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, list):
        return _is_decoded(feature[0])
    if hasattr(feature, "feature"):
        return _is_decoded(feature.feature)
    return hasattr(feature, "decode_example") and getattr(feature, "decode", True)
