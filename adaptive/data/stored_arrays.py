"""Arrays on disk, of which only the rows of a batch are read: memory-mapped files, HDF5 and zarr."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.arrays import NotAnArrayError, on_host
from adaptive.base.errors import DataError


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


class MappedFile(NamedTuple):
    """A reference to a memory-mapped array, for another process: pickling the array would read the whole file."""

    name: str
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> MappedFile | None:
        mapped: Any = array
        while isinstance(mapped, np.ndarray) and not (isinstance(mapped, np.memmap) and mapped.filename):
            mapped = mapped.base
        if not isinstance(mapped, np.memmap):
            return None
        while isinstance(mapped.base, np.memmap):
            mapped = mapped.base
        place = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0] + mapped.offset
        return cls(str(mapped.filename), place, array.dtype, array.shape, array.strides)

    def opened(self) -> np.ndarray:
        whole = np.memmap(self.name, np.uint8, "r")
        return np.ndarray(self.shape, self.dtype, whole, self.offset, self.strides)


def is_stored(value: Any) -> bool:
    """Return whether `value` is an array of h5py or zarr."""
    return any(
        kind.__name__ in ("Dataset", "Array") and kind.__module__.partition(".")[0] in ("h5py", "zarr")
        for kind in type(value).__mro__
    )


def arrays_of_group(value: Any) -> Any:
    """Return the arrays of an HDF5 file, HDF5 group or zarr group by name, subgroups as dicts; other values unchanged.

    Raises:
      DataError: the HDF5 file is closed.
    """
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    if ("zarr", "Group") in kinds:
        members = {**dict(value.arrays()), **dict(value.groups())}
    elif ("h5py", "Group") in kinds:
        if not value:
            raise DataError(_CLOSED.format(f"data is a {type(value).__name__}", "its file"))
        members = dict(value)
    else:
        return value
    return {name: arrays_of_group(member) for name, member in sorted(members.items())}


class StoredArray:
    """An array of h5py or zarr, of which only requested rows are read.

    Args:
      array: an `h5py.Dataset` or a `zarr.Array`.
      name: name of the array in the data, for errors.

    Attributes:
      shape: shape of the array.
      ndim: number of axes.
      dtype: dtype of the array, in native byte order.

    Raises:
      DataError: the file is closed, or the array does not hold numbers.
    """

    def __init__(self, array: Any, name: str):
        self._array, self._name = array, name
        self._hdf5 = not hasattr(array, "get_orthogonal_selection")
        self._check_open()
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype).newbyteorder("=")
        self.ndim = len(self.shape)
        self._check_numbers()

    def __getitem__(self, rows: int | np.ndarray) -> np.ndarray:
        """Return the row at an index, or the rows at several indices in their order.

        Raises:
          DataError: the file is closed.
        """
        self._check_open()
        if isinstance(rows, int | np.integer):
            return np.asarray(self._array[int(rows)], self.dtype)
        if not self._hdf5:
            return np.asarray(self._array.get_orthogonal_selection((np.asarray(rows),)), self.dtype)
        return rows_of_hdf5(self._array, np.asarray(rows)).astype(self.dtype, copy=False)

    def _check_open(self) -> None:
        if self._hdf5 and not self._array:
            raise DataError(_CLOSED.format(f"{self._name} is a dataset", "the file"))

    def _check_numbers(self) -> None:
        kinds = self.dtype.metadata or {}  # h5py describes object dtypes here
        if "vlen" in kinds:
            what = "text" if kinds["vlen"] in (str, bytes) else "rows of different lengths"
            raise DataError(f"{self._name} holds {what}; it must be an array of numbers.")
        try:
            on_host(np.empty(0, self.dtype))
        except NotAnArrayError as error:
            raise DataError(f"{self._name} {error}") from None

    def __getstate__(self) -> tuple[Any, ...]:
        """Return a zarr array, or the path and name of an HDF5 dataset, whose handles cannot be pickled.

        Raises:
          DataError: the file is closed, or another process cannot open it by its name.
        """
        self._check_open()
        if not self._hdf5:
            return self._array, self._name
        file = self._array.file
        if file.driver not in _BY_NAME or self._array.name is None:
            raise DataError(
                f"{self._name} is in an HDF5 file with driver={file.driver!r}, which another process cannot open by "
                "its name. Leave out num_readers=, or save the file to a disk."
            )
        # Unpickling the class imports h5py, so that this module need not.
        return type(file), os.path.abspath(file.filename), self._array.name, self._name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if len(state) == 2:
            array, name = state
        else:
            file, path, place, name = state
            try:
                array = file(path, "r")[place]
            except OSError as error:
                raise DataError(
                    f"{name}: a reader process cannot open {path}: {error}. Open it for reading, "
                    'h5py.File(path, "r"), before the program is built: HDF5 locks a file that is being written.'
                ) from error
        self.__init__(array, name)  # type: ignore[misc]


_BY_NAME = ("sec2", "stdio", "windows")
_CLOSED = "{} of an HDF5 file that is closed. Leave {} open as long as the program reads it."
_FANCY = 1000  # largest number of rows to select at once; HDF5 is slow at large selections


def rows_of_hdf5(array: Any, rows: np.ndarray) -> np.ndarray:
    """Read rows of an HDF5 dataset, in any order and with repetitions; shape=(len(rows), *array.shape[1:]).

    HDF5 requires increasing indices. Adjacent rows are read at once; others one by one, which is faster than h5py's
    selection of several (measured: 34 ms instead of 73 ms for 512 compressed rows of 1 kB), except in files without
    chunks (13 ms instead of 4 ms). Reading in increasing order unpacks each chunk once.

    Raises:
      IndexError: an index is out of range.
    """
    numbers, back = np.unique(rows, return_inverse=True)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= array.shape[0]):
        raise IndexError(f"rows {numbers[0]} to {numbers[-1]} of {array.shape[0]}")
    found = np.empty((len(numbers), *array.shape[1:]), array.dtype)
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    stops = np.append(starts[1:], len(numbers))[: len(starts)]
    if array.chunks is None and len(starts) > 1 and len(numbers) <= _FANCY:
        found[:] = array[numbers]
    else:
        for start, stop in zip(starts, stops, strict=True):
            one, first = stop == start + 1, int(numbers[start])
            found[start:stop] = array[first] if one else array[first : first + stop - start]
    return found if len(numbers) == len(rows) and np.array_equal(numbers, rows) else found[back.reshape(-1)]
