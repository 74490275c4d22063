"""The parts of a Python object: the variables of a function, the attributes of an instance, the elements of a list.

`value_of` returns a plain value in a form to compare. `parts_of` lists the parts of any other object, each with a
label. `names_in` returns the names that a function's code reads.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import io
import itertools
import logging
import queue
import socket
import subprocess
import sys
import sysconfig
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Set
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.arrays import is_array, numbers_of
from adaptive.base.source_lines import library_folders

_ELEMENTS = 64  # first and last elements of a container that outlives a trace
_SAMPLED = 1 << 20  # bytes; of larger arrays that outlive a trace, only every k-th element is compared
_LIBRARY = frozenset({"adaptive", "collectives", "controllers", "monitors"})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Objects that threads, files and processes change. They hold no data of a driver.
_LIVE = (
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
    logging.Logger,
    logging.Handler,
    io.IOBase,
    socket.socket,
    subprocess.Popen,
    queue.Queue,
    queue.SimpleQueue,
    contextvars.ContextVar,
    contextvars.Context,
    weakref.ReferenceType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)

# Code with these names can read attributes whose names it does not contain.
_ALL_NAMES = frozenset({"vars", "__dict__", "asdict", "astuple", "globals", "eval", "exec"})


class Label(NamedTuple):
    """The location of a part within an object.

    Attributes:
      text: appended to the path so far, such as ".n" or "[3]".
      tail: for a variable, its role, such as ", which grow() closes over". A variable starts a new path.
      alone: replaces `text` if the path so far is empty.
    """

    text: str = ""
    tail: str = ""
    alone: str = ""


Part = tuple[Label, Any]
NOWHERE = Label()


class Opaque(Exception):
    """Raised for an object whose parts cannot be read."""


# --- plain values -----------------------------------------------------------------------------------------------------


def value_of(thing: Any) -> Hashable | None:
    """Return a number, a text, a set, code or a traced array in a form to compare; `None` for objects with parts."""
    if isinstance(thing, bool | int | float | complex | str | bytes | range | type(None) | type(...)):
        return type(thing).__name__, repr(thing)
    if isinstance(thing, np.generic):
        return str(thing.dtype), thing.tobytes()
    if isinstance(thing, jax.core.Tracer):
        return "tracer", str(thing.aval)
    if isinstance(thing, CodeType | np.dtype | jax.tree_util.PyTreeDef):
        return type(thing).__name__, thing
    if isinstance(thing, set | frozenset):
        elements = frozenset(map(value_of, thing))
        return (type(thing).__name__, len(thing), elements)
    return None


def sample_of(array: Any) -> Hashable | None:
    """Return the value by which a numpy array that outlives a trace is compared: its elements, or every k-th."""
    if not isinstance(array, np.ndarray) or array.dtype == object:
        return None
    step = 1 + array.nbytes // _SAMPLED
    elements = array if step == 1 else array.reshape(-1)[::step]
    return str(array.dtype), array.shape, elements.tobytes()


def same_arrays(one: Any, other: Any) -> bool | None:
    """Return whether two arrays are equal; `None` if either is not an array or cannot be read."""
    if not (is_array(one) and is_array(other)):
        return None
    try:
        a, b = numbers_of(one), numbers_of(other)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return bool(a.tolist() == b.tolist()) if a.dtype == object else a.tobytes() == b.tobytes()
    except Exception:  # a deleted array, one of other processes, or a library that refuses
        return None


def is_live(thing: Any) -> bool:
    """Return whether an object changes independently of a driver: a thread, lock, logger, file or module."""
    return isinstance(thing, _LIVE)


# --- parts ------------------------------------------------------------------------------------------------------------


def parts_of(thing: Any, names: Set[str] | None = None) -> list[Part]:
    """Return the parts of an object, with labels.

    Args:
      names: for an object that outlives a trace: return only attributes with these names, and the first and last
        elements. Attributes that no code mentions cannot matter. This library's objects are left out, because worlds
        and programs change independently of a trace.

    Raises:
      Opaque: its parts cannot be read.
    """
    if isinstance(thing, ModuleType):
        own = {} if _is_installed(getattr(thing, "__file__", None)) else vars(thing)
        return _attributes(own, names or frozenset(), thing.__name__)
    if is_live(thing):
        return []
    if isinstance(thing, FunctionType):
        return list(_of_function(thing))
    if isinstance(thing, MethodType | BuiltinFunctionType):
        known = f" of {thing.__name__}()"
        function = getattr(thing, "__func__", thing.__name__)
        return [(Label("self", known), thing.__self__), (Label("code", known), function)]
    if isinstance(thing, functools.partial):
        arguments = [*enumerate(thing.args), *thing.keywords.items()]
        known = ", an argument of functools.partial"
        return [(NOWHERE, thing.func), *((Label(str(k), known), v) for k, v in arguments)]
    if isinstance(thing, staticmethod | classmethod):
        return [(NOWHERE, thing.__func__)]
    if isinstance(thing, property):
        return [(NOWHERE, f) for f in (thing.fget, thing.fset)]
    if isinstance(thing, type):
        return _attributes(_of_class(thing), names, thing.__name__)
    return _of_instance(thing, names)


def _of_function(fn: FunctionType) -> Iterator[Part]:
    owner, code = f"{fn.__name__}()", fn.__code__
    yield Label("code", f" of {owner}"), code
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        yield Label(name, f", which {owner} closes over"), _contents(cell)
    defaults = fn.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in [*zip(last, defaults, strict=True), *(fn.__kwdefaults__ or {}).items()]:
        yield Label(name, f", a default argument of {owner}"), value
    for name, value in vars(fn).items():
        yield Label(f"{fn.__name__}.{name}", ", an attribute of the function"), value
    if not is_installed_code(code):
        for name in sorted(_globals_of(code)):
            if name in fn.__globals__:
                yield Label(name, f", a global that {owner} reads"), fn.__globals__[name]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _of_class(cls: type) -> dict[str, Any]:
    """Return the attributes in the source of a class and its bases, except installed ones."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = sys.modules.get(base.__module__)
        if module is not None and not _is_installed(getattr(module, "__file__", None)):
            found.update(vars(base))
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, FunctionType) or not name.startswith(("__", "_abc_"))
    }


def _of_instance(thing: Any, names: Set[str] | None) -> list[Part]:
    own, found = _own(thing), [(NOWHERE, type(thing))]
    if "__wrapped__" in own:  # jax.jit, functools.cache
        return [(NOWHERE, own["__wrapped__"])]
    if isinstance(thing, Mapping):
        found += _items(thing, names)
    elif isinstance(thing, list | tuple | deque):
        found += _elements(thing, names)
    elif names is None and not is_array(thing):
        found += _reduced(thing, optional=bool(own))
    if names is not None and type(thing).__module__.partition(".")[0] in _LIBRARY:
        return found
    return found + _attributes(own, names, type(thing).__name__)


def _own(thing: Any) -> dict[str, Any]:
    """Return the attributes of an instance, from its `__dict__` and its slots."""
    own = getattr(thing, "__dict__", None)
    own = dict(own) if isinstance(own, dict) else {}
    for base in type(thing).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(base).get(name), MemberDescriptorType) and hasattr(thing, name):
                own[name] = getattr(thing, name)
    return own


def _items(thing: Mapping, names: Set[str] | None) -> list[Part]:
    found: list[Part] = [(Label(" by its length"), len(thing))]
    for i, (key, value) in enumerate(itertools.islice(thing.items(), None if names is None else 2 * _ELEMENTS)):
        plain = value_of(key) is not None
        found.append((Label(f"[{key!r}]" if plain else f"[key {i}]"), value))
        if not plain:
            found.append((Label(f" by key {i}"), key))
    return found


def _elements(thing: Any, names: Set[str] | None) -> list[Part]:
    length = len(thing)
    found: list[Part] = [(Label(" by its length"), length)]
    some = names is not None and length > 2 * _ELEMENTS
    places = [*range(_ELEMENTS), *range(length - _ELEMENTS, length)] if some else range(length)
    fields = getattr(type(thing), "_fields", ())  # of a NamedTuple
    found += [(Label(f".{fields[i]}" if i < len(fields) else f"[{i}]"), thing[i]) for i in places]
    if isinstance(thing, deque):
        found.append((Label(".maxlen"), thing.maxlen))
    if names is not None and isinstance(thing, list | deque) and length:  # a trace may append to it
        found.append((Label("[-1]"), thing[-1]))
    return found


def _reduced(thing: Any, *, optional: bool) -> list[Part]:
    """Return the attributes that pickling would write, if the object's class defines that."""
    own = any("__reduce__" in vars(base) or "__reduce_ex__" in vars(base) for base in type(thing).__mro__[:-1])
    if optional and not own:
        return []
    try:
        with warnings.catch_warnings():  # since Python 3.12 itertools warn that 3.14 cannot pickle them
            warnings.simplefilter("ignore", DeprecationWarning)
            made = thing.__reduce_ex__(4)
    except Exception as error:
        if optional:
            return []
        raise Opaque from error
    if isinstance(made, str):
        return [(NOWHERE, made)]
    return [(NOWHERE, list(part) if isinstance(part, Iterator) else part) for part in made]


def _attributes(own: Mapping[str, Any], names: Set[str] | None, of: str) -> list[Part]:
    some = names is not None and not names & _ALL_NAMES
    return [
        (Label(f".{name}", alone=f"{of}.{name}"), value)
        for name, value in sorted(own.items())
        if not some or name in (names or ()) or name.startswith("__")
    ]


# --- code -------------------------------------------------------------------------------------------------------------


def names_in(thing: Any) -> frozenset[str]:
    """Return the attributes and globals that a function's code reads, and texts in it that may be names."""
    code = getattr(thing, "__code__", None)
    return _names_of(code) if isinstance(code, CodeType) and not is_installed_code(code) else frozenset()


@functools.cache
def _names_of(code: CodeType) -> frozenset[str]:
    texts = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    inner = (_names_of(const) for const in code.co_consts if isinstance(const, CodeType))
    return _loaded(code, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR").union(texts, *inner)


@functools.cache
def _globals_of(code: CodeType) -> frozenset[str]:
    inner = (_globals_of(const) for const in code.co_consts if isinstance(const, CodeType))
    return _loaded(code, "LOAD_GLOBAL", "LOAD_NAME").union(*inner)


def _loaded(code: CodeType, *operations: str) -> frozenset[str]:
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in operations)


def is_installed_code(code: CodeType) -> bool:
    """Return whether code belongs to Python, an installed library or this one, so its globals are not the driver's."""
    return _is_installed(code.co_filename)


@functools.cache
def _is_installed(file: str | None) -> bool:
    return file is None or file.startswith((*_INSTALLED, *library_folders()))
