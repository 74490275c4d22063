"""Arrays whose rows stay on disk until a batch needs them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


class MappedFile(NamedTuple):
    """A file that is mapped into memory, for another process: pickled as it is, it would be read as a whole."""

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
