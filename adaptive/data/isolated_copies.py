"""Copies of a source and its functions, one per reader thread, so that no thread changes what another one reads.

Data sets are rarely thread-safe: two threads that seek in one open file read each other's rows. Each copy has its own
instances of all objects that a read can change. Large objects that reads do not change are shared, so that memory stays
flat: arrays with a row per example, read-only arrays, mapped files, long lists of plain values, strings, and objects of
thread-safe libraries. Sources that cannot be copied in this way are refused with a reason.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from .shared_state import contents_of, plain, shared_state
from .stored_arrays import is_mapped

MOST_BYTES = 16 << 20  # largest size of a copy
_LONG_TEXT = 256  # least number of characters of a shared string
_LONG = 1024  # least number of entries of a shared container: so many plain values are data, not a read's working state
_LARGE = 1 << 20  # least number of bytes of a shared array
_MADE_FOR_THREADS = ("grain", "h5py", "jax", "jaxlib", "pyarrow", "zarr")


class CannotCopyError(Exception):
    """A source cannot be copied for other threads; the message is the reason, such as "it holds …"."""


class SourceCopies:
    """A template of a source and its functions, in their state before the first read, from which copies are made.

    Args:
      source: the source; has a length.
      functions: the functions that are applied to each example, or `None`.

    Raises:
      CannotCopyError: the source or a function cannot be copied.
    """

    def __init__(self, source: Any, functions: tuple[Callable[..., Any] | None, ...]):
        file = _Bounded()
        self._pickler = _Copier(file, len(source))
        try:
            self._pickler.dump((source, functions))
        except CannotCopyError:
            raise
        except Exception as error:  # raised by a class's own __reduce__, or by too deep a nesting
            raise CannotCopyError(f"it cannot be copied: {error}") from error
        self._pickler.clear_memo()
        self._pickled = file.getvalue()

    def make(self) -> tuple[Any, tuple[Callable[..., Any] | None, ...]]:
        """Return another copy."""
        return _Restorer(io.BytesIO(self._pickled), self._pickler.shared).load()

    def shared(self) -> str:
        """Return the reason why reads by several threads could interfere although each has a copy, or ""."""
        for kind in self._pickler.classes:
            if hasattr(kind, "__del__"):
                return f"a {kind.__name__} has a __del__, which would be called for each copy"
        return shared_state(self._pickler.functions, self._pickler.classes)


class _Shared(NamedTuple):
    """An object that a copy of a function shares with the function."""

    value: Any


class _Copier(pickle.Pickler):
    """A pickler for copies within one process, which stores references to shared objects."""

    def __init__(self, file: io.BytesIO, length: int):
        super().__init__(file, protocol=5)
        self._length = length
        self.shared: list[Any] = []
        self.functions: list[FunctionType] = []
        self.classes: set[type] = set()

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a shared object in `shared`; `None` for an object to copy."""
        kind = type(value)
        if kind in _SMALL:
            return None
        if kind is _Shared:
            value = value.value
        elif not self._is_shared(value, kind):
            self.classes.add(kind)
            return None
        self.shared.append(value)
        return len(self.shared) - 1

    def reducer_override(self, value: Any) -> Any:
        """Copy a function together with the values of its closure."""
        if type(value) is not FunctionType:
            return NotImplemented
        contents = tuple(cell.cell_contents for cell in value.__closure__ or ())
        own = (_Shared(value.__code__), _Shared(value.__globals__), value.__name__, value.__defaults__, contents)
        return _function, own, (vars(value), {"__kwdefaults__": value.__kwdefaults__})

    def _is_shared(self, value: Any, kind: type) -> bool:
        if kind in (str, bytes):
            return len(value) >= _LONG_TEXT
        if kind is FunctionType:
            self.functions.append(value)
            return not any(map(_has_state, contents_of(value)))
        if kind in _CONTAINERS:
            return len(value) >= _LONG and plain(value)
        if isinstance(value, np.ndarray):
            return is_mapped(value) or not value.flags.writeable or self._is_data(value.shape, value.nbytes)
        package = kind.__module__.partition(".")[0]
        if package == "torch" and kind.__name__ in ("Tensor", "Parameter"):
            return self._is_data(tuple(value.shape), value.nbytes)
        return isinstance(value, _NEVER_CHANGED) or package in _MADE_FOR_THREADS

    def _is_data(self, shape: tuple[int, ...], size: int) -> bool:
        """Return whether an array has a row per example, and is large."""
        return size >= _LARGE and shape[:1] == (self._length,)


class _Restorer(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: Any) -> Any:
        """Return the shared object at this index."""
        return self._shared[place]


class _Bounded(io.BytesIO):
    def write(self, data: Any, /) -> int:
        """Write up to `MOST_BYTES` in total.

        Raises:
          CannotCopyError: the copy is larger.
        """
        written = super().write(data)
        if self.tell() > MOST_BYTES:
            raise CannotCopyError(f"it holds more than {MOST_BYTES >> 20} MiB that each thread would have a copy of")
        return written


_SMALL = (int, float, bool, complex, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NEVER_CHANGED = (type, ModuleType, CodeType, BuiltinFunctionType, np.ufunc, threading.local)


def _has_state(value: Any) -> bool:
    return not (isinstance(value, (*_SMALL, str, bytes, *_NEVER_CHANGED)) or (type(value) is tuple and plain(value)))


def _function(code: CodeType, globals_: dict, name: str, defaults: tuple | None, contents: tuple) -> FunctionType:
    return FunctionType(code, globals_, name, defaults, tuple(map(CellType, contents)) or None)
