"""Find state that functions share although their arguments are copies: global variables and class attributes.

The search follows the names in the functions' code. Instances of library classes, open files above all, count as not
thread-safe; plain values, functions, classes and modules count as thread-safe.
"""

from __future__ import annotations

import dis
import logging
import re
import sys
import sysconfig
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np

# Libraries that are not thread-safe even if each thread opens its own file.
_NOT_FOR_THREADS = ("netCDF4", "tables", "pygrib", "eccodes", "gribapi", "pyhdf")
# Functions that change the process, or the position in a file that copies of a descriptor share.
_OF_THE_PROCESS = {"chdir", "redirect_stdout", "redirect_stderr", "lseek"}
_DEEP = 5
_MANY = 200_000

_ATOMS = {int, float, bool, complex, str, bytes, type(None), date, datetime, time, timedelta}
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, types.MappingProxyType)


def plain(container: Any) -> bool:
    """Return whether a container holds only numbers and text, and lists, tuples and dicts of them."""
    values, atoms = [container], _ATOMS - {type(None)}  # None may be a placeholder that is filled in later
    for _ in range(_DEEP):
        values = list(chain.from_iterable(v.values() if isinstance(v, dict) else v for v in values))
        kinds = set(map(type, values))
        if kinds <= atoms:
            return True
        if not kinds <= atoms | {list, tuple, dict}:
            return False
        values, atoms = [v for v in values if type(v) not in atoms], _ATOMS
    return False


def shared_state(copied: Iterable[types.FunctionType], classes: Iterable[type]) -> str:
    """Return a description of state that user code shares between threads and may change; "" if none is found.

    Args:
      copied: functions of which each thread has a copy, closure included.
      classes: classes of which each thread has its own instances.
    """
    found = set(_NOT_FOR_THREADS) & set(sys.modules)
    if found:
        return f"{found.pop()} has been imported, which must not be used by several threads"
    return _Search(list(copied), list(classes)).run()


class _Search:
    """A search through functions and classes, and through those that their code names."""

    def __init__(self, copied: list[types.FunctionType], classes: list[type]):
        self.functions, self.classes = list(copied), classes
        self._copied, self._seen = set(map(id, copied)), set[int]()

    def run(self) -> str:
        """Return a description of the first shared state that is found, or ""."""
        while self.functions or self.classes:
            thing: Any = self.classes.pop() if self.classes else self.functions.pop()
            if id(thing) in self._seen:
                continue
            self._seen.add(id(thing))
            why = self._of_class(thing) if isinstance(thing, type) else self._of_function(thing)
            if why:
                return why
        return ""

    def _of_class(self, kind: type) -> str:
        for base in kind.__mro__:
            if not _is_users(base.__module__):
                continue
            for name, value in list(vars(base).items()):
                if (name.startswith("__") and not isinstance(value, types.FunctionType)) or name.startswith("_abc_"):
                    continue
                why = self._of_value(value, f"{base.__qualname__}.{name}, which all instances share,")
                if why:
                    return why
        return ""

    def _of_function(self, function: types.FunctionType) -> str:
        if not _is_users(function.__module__):
            return ""
        names, where = set[str](), f"{function.__qualname__}()"
        for code in _codes(function.__code__):
            names |= set(code.co_names)
            changed = _changed_global(code)
            if changed:
                return f"{where} changes the global variable {changed}"
        if names & _OF_THE_PROCESS:
            return f"{where} calls {min(names & _OF_THE_PROCESS)}, which affects all threads"
        for value in () if id(function) in self._copied else contents_of(function):
            why = self._of_value(value, f"what {where} keeps from call to call")
            if why:
                return why
        for owner in _owners(function, names):
            for name in sorted(names & owner.keys()):
                why = self._of_value(owner[name], f"the global variable {name}, which {where} uses,")
                if why:
                    return why
        return ""

    def _of_value(self, value: Any, what: str) -> str:
        value = getattr(value, "__func__", value)  # unwrap staticmethod and classmethod
        if isinstance(value, property):
            self.functions += [f for f in (value.fget,) if isinstance(f, types.FunctionType)]
        elif isinstance(value, cached_property):
            self.functions.append(value.func)  # type: ignore[arg-type]
        elif not self._is_inert(value, _DEEP):
            return f"{what} is a {type(value).__name__}"
        return ""

    def _is_inert(self, value: Any, deep: int) -> bool:
        """Return whether threads may share a value. Queues the value's functions and classes for the search."""
        kind = type(value)
        if kind in _ATOMS or isinstance(value, _INERT):
            return True
        if isinstance(value, types.FunctionType | type):
            (self.classes if isinstance(value, type) else self.functions).append(value)  # type: ignore[arg-type]
            return True
        wrapped = getattr(value, "__wrapped__", None)  # set by lru_cache, jax.jit and the like
        if isinstance(wrapped, types.FunctionType) and not _is_users(kind.__module__):
            self.functions.append(wrapped)
            return True
        if kind.__module__.partition(".")[0] in ("jax", "jaxlib", "pyarrow"):
            return True
        if kind.__module__ == "torch" and kind.__name__ in ("Tensor", "dtype", "device"):
            return True
        if deep == 0:
            return False
        return all(self._is_inert(part, deep - 1) for part in parts) if (parts := _parts(value)) is not None else False


_INERT = (
    *(np.ndarray, np.generic, np.dtype, np.ufunc, re.Pattern, PurePath, logging.Logger, Enum, threading.local),
    *(types.ModuleType, types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.GenericAlias, types.UnionType, types.WrapperDescriptorType, types.MethodDescriptorType, slice, range),
    *(type(threading.Lock()), type(threading.RLock())),
)


_NAMESPACE = types.SimpleNamespace


def _parts(value: Any) -> list[Any] | None:
    """Return the parts of a value; `None` if they are unknown."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, _CONTAINERS):
        if len(value) > _MANY:
            return [] if type(value) in (list, tuple, dict, set, frozenset) and plain(value) else None
        return [*value, *(value.values() if hasattr(value, "values") else ())]
    if (_is_users(type(value).__module__) and not _change_themselves(type(value))) or type(value) is _NAMESPACE:
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        return [type(value), *getattr(value, "__dict__", {}).values(), *(getattr(value, s, None) for s in slots)]
    return None


def contents_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a function keeps between calls, besides globals: closure, defaults and attributes.

    Raises:
      ValueError: the closure has a variable without a value.
    """
    yield from (cell.cell_contents for cell in function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def _changed_global(code: types.CodeType) -> str:
    """Return the first global variable, or attribute of one, that code assigns to; "" if there is none."""
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return str(step.argval)
        if step.opname == "STORE_ATTR" and before is not None and before.opname == "LOAD_GLOBAL":
            return f"{before.argval}.{step.argval}"
        before = step
    return ""


def _change_themselves(kind: type) -> bool:
    """Return whether methods of a class assign to attributes after construction."""
    methods = [value for base in kind.__mro__ for name, value in vars(base).items() if name not in _MAKING]
    found = [value for value in methods if isinstance(value, types.FunctionType)]
    steps = [step.opname for method in found for code in _codes(method.__code__) for step in dis.get_instructions(code)]
    return "STORE_ATTR" in steps


_MAKING = ("__init__", "__post_init__", "__setstate__", "__setattr__", "__delattr__")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and, recursively, those of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _owners(function: types.FunctionType, names: set[str]) -> list[dict[str, Any]]:
    """Return the namespaces of a function's names: its globals, and the user's modules that it uses or imports."""
    package = function.__globals__.get("__package__") or ""
    kept = [value for value in contents_of(function) if isinstance(value, types.ModuleType)]
    modules = kept + [sys.modules[name] for name in names if name in sys.modules]
    modules += [sys.modules[f"{package}.{name}"] for name in names if f"{package}.{name}" in sys.modules]
    found, owners = dict[str, types.ModuleType](), [function.__globals__]
    for owner in owners:  # the list grows meanwhile
        modules += [owner[name] for name in names & owner.keys() if isinstance(owner[name], types.ModuleType)]
        new = {module.__name__: module for module in modules if _is_users(module.__name__)}
        owners += [vars(module) for name, module in new.items() if name not in found]
        found |= new
    return owners


@lru_cache
def _is_users(module: str) -> bool:
    """Return whether a module is user code: not of Python, not installed, and not of this library."""
    found = sys.modules.get(module)
    if module == "__main__" or found is None:
        return True
    file = getattr(found, "__file__", None)
    if file is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return False
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(file.startswith(path) for path in installed)
