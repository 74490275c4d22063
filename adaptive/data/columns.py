"""Convert one column of a data frame or table of pandas, polars or pyarrow to an array, without importing them.

A column keeps its dtype, and shares its memory if its library allows that. A column that is not an array of numbers,
such as text or missing values, raises a `ColumnError`, for which `tables` writes the message.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from adaptive.base.arrays import NotAnArrayError, as_numpy

Why = Literal["text", "bytes", "times", "categories", "missing", "ragged", "other"]


class ColumnError(Exception):
    """A column is not an array of numbers.

    Args:
      why: the kind of the column's contents.
      what: the kind as text.
      row: the index of the first row of this kind, if only some rows are.
    """

    def __init__(self, why: Why, what: str, row: int | None = None):
        super().__init__(what)
        self.why, self.what, self.row = why, what, row


def column_of_pandas(column: Any) -> Any:
    """Return a `Series`, an `Index` or an extension array of pandas as an array; shape=(rows, *cell).

    Raises:
      ColumnError: the column does not hold numbers.
    """
    dtype = column.dtype
    if isinstance(dtype, np.dtype):
        if dtype.kind == "O":
            return column_of_cells(list(column))
        return _checked(column.to_numpy())
    kind = type(dtype).__name__
    if kind == "ArrowDtype":
        return column_of_arrow(sys.modules["pyarrow"].array(getattr(column, "array", column)))
    if kind == "CategoricalDtype":
        raise ColumnError("categories", "categories")
    if kind == "StringDtype":
        raise ColumnError("text", "text")
    if getattr(dtype, "kind", "") in "mM":
        raise ColumnError("times", f"times ({dtype})")
    missing = np.asarray(column.isna())
    if kind != "SparseDtype" and missing.any():
        raise _missing(int(missing.argmax()))
    if hasattr(dtype, "numpy_dtype"):  # Int64, Float64, boolean
        return column.to_numpy(dtype=dtype.numpy_dtype)
    return _checked(np.asarray(column), str(dtype))


def column_of_cells(cells: Sequence[Any]) -> np.ndarray:
    """Return a column of Python objects as an array; the cells are numbers, or lists or arrays of one shape.

    Raises:
      ColumnError: the cells are something else.
    """
    kinds = set(map(type, cells))
    for kind, why in ((str, "text"), (bytes, "bytes")):
        if any(issubclass(k, kind) for k in kinds):
            raise ColumnError(why, why)  # type: ignore[arg-type]
    for row, cell in enumerate(cells):
        if cell is None or type(cell).__name__ in ("NAType", "NaTType") or (cell != cell) is True:
            raise _missing(row)
    arrays = []
    for row, cell in enumerate(cells):
        try:
            arrays.append(as_numpy(np.asarray(cell) if isinstance(cell, list | tuple) else cell))
        except (NotAnArrayError, ValueError) as error:
            raise ColumnError("other", f"objects of Python ({type(cell).__name__})", row) from error
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise _ragged(arrays[0].shape, array.shape, row)
    return np.stack(arrays) if arrays else np.zeros(0)


def column_of_arrow(column: Any) -> Any:
    """Return an `Array` or a `ChunkedArray` of pyarrow as an array; structs become dicts of arrays by field, lists of
    equal lengths one more dimension.

    Raises:
      ColumnError: the column does not hold numbers.
    """
    pa = sys.modules["pyarrow"]
    types = pa.types
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    kind = column.type
    _refuse_arrow_type(kind, types)
    if column.null_count:
        raise _missing(int(column.is_null().to_numpy(zero_copy_only=False).argmax()))
    if isinstance(kind, pa.BaseExtensionType):
        return column.to_numpy_ndarray() if hasattr(column, "to_numpy_ndarray") else column_of_arrow(column.storage)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_struct(kind):
        return {kind.field(i).name: column_of_arrow(child) for i, child in enumerate(column.flatten())}
    if types.is_fixed_size_list(kind):
        return _unflattened(column.flatten(), len(column), kind.list_size, column_of_arrow)
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        return _unflattened(column.flatten(), len(column), _common(lengths), column_of_arrow)
    raise ColumnError("other", f"elements of {kind}")


def _refuse_arrow_type(kind: Any, types: Any) -> None:
    """Raise for Arrow types that never hold numbers."""
    if types.is_dictionary(kind):
        raise ColumnError("categories", "dictionary-encoded")
    if types.is_temporal(kind):
        raise ColumnError("times", f"times ({kind})")
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        raise ColumnError("bytes", "bytes")
    if str(kind) in ("string", "large_string", "string_view"):
        raise ColumnError("text", "text")


def column_of_polars(column: Any) -> Any:
    """Return a `Series` of polars as an array; structs become dicts of arrays by field, lists of equal lengths one more
    dimension.

    Raises:
      ColumnError: the column does not hold numbers.
    """
    dtype = column.dtype
    kind = dtype.base_type().__name__
    if kind in ("Categorical", "Enum"):
        raise ColumnError("categories", "categories")
    if dtype.is_temporal():
        raise ColumnError("times", f"times ({dtype})")
    if kind in ("String", "Binary"):
        raise ColumnError("text", "text") if kind == "String" else ColumnError("bytes", "bytes")
    if column.null_count():
        raise _missing(int(column.is_null().arg_max()))
    if kind == "Boolean" or dtype.is_integer() or dtype.is_float():
        return _checked(column.to_numpy(), str(dtype))
    if kind == "Struct":
        return {field.name: column_of_polars(column.struct.field(field.name)) for field in dtype.fields}
    if kind in ("List", "Array"):
        lengths = column.list.len().to_numpy() if kind == "List" else np.full(len(column), dtype.shape[0])
        length = _common(lengths)
        if length == 0:  # explode() would turn empty lists into nulls
            return np.zeros((len(column), 0), np.float32)
        return _unflattened(_exploded(column, kind), len(column), length, column_of_polars)
    raise ColumnError("other", f"elements of {dtype}")


def _exploded(column: Any, kind: str) -> Any:
    """Flatten one level of a polars column of lists or arrays."""
    return column.list.explode() if kind == "List" else column.arr.explode()


def _unflattened(elements: Any, rows: int, length: int, read: Any) -> Any:
    """Convert the flattened elements of lists of equal length to an array; shape=(rows, length, *element)."""
    try:
        found = read(elements)
    except ColumnError as error:
        row = None if error.row is None or not length else error.row // length
        what = error.what if error.why in ("ragged", "missing") else f"lists of {error.what}"
        raise ColumnError(error.why, what, row) from error
    return jax.tree.map(lambda a: a.reshape(rows, length, *a.shape[1:]), found)


def _common(lengths: np.ndarray) -> int:
    """Return the common length of all lists of a column; raise if the lengths differ."""
    if not len(lengths):
        return 0
    other = np.flatnonzero(lengths != lengths[0])
    if len(other):
        raise _ragged((int(lengths[0]),), (int(lengths[other[0]]),), int(other[0]))
    return int(lengths[0])


def _checked(array: np.ndarray, what: str = "") -> np.ndarray:
    if array.dtype.kind in "mM":
        raise ColumnError("times", f"times ({array.dtype})")
    if array.dtype.kind in "OUSVT":
        raise ColumnError("other", f"elements of {what or array.dtype}")
    return array


def _missing(row: int) -> ColumnError:
    return ColumnError("missing", "missing values", row)


def _ragged(first: tuple[int, ...], other: tuple[int, ...], row: int) -> ColumnError:
    sizes = (first[0], other[0]) if len(first) == len(other) == 1 else (first, other)
    return ColumnError("ragged", f"lists of different lengths ({sizes[0]} in row 0, {sizes[1]} in row {row})", row)
