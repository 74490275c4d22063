"""A check that hooks and callbacks do not capture the size of a microbatch.

Compared between the two traces with which a program is built: closure variables, default arguments, arguments of
partials, one level of attributes of callable objects and the `self` of methods; also of captured functions. Numbers,
strings, arrays and containers of them are copied when a trace ends. Objects of other kinds must outlive the traces.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, EllipsisType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from adaptive.base.errors import DriverError
from adaptive.base.process.source_lines import at, is_library
from adaptive.base.values.jaxprs import Var

from .expressions import Expressions, another_program, sized

_PLAIN = (bool, int, float, complex, str, bytes, range, slice, NoneType, EllipsisType, np.generic, np.dtype, CodeType)
_CONTAINERS = (list, tuple, dict, set, frozenset)
Captured: TypeAlias = "list[list[Variable]]"  # for each end of a graph
_MOST = 2000  # elements of a container or an array that are compared, besides its length or shape


class Variable(NamedTuple):
    """A captured variable: the object; a copy to compare, or `None` for other kinds; whether user code captures it."""

    name: str
    thing: Any
    copy: Hashable | None
    own: bool


def captured_by(traced: Expressions) -> Captured:
    """Return what the functions of each end of a graph capture. Called when the trace has ended."""
    return [list(variables_of(end.functions)) for end in traced.ends()]


def check_functions(ours: Expressions, one: Captured, theirs: Expressions, trace: Callable[[int], Expressions]) -> None:
    """Check that hooks and callbacks capture the same for two microbatch sizes; callbacks on examples need not.

    Counters and clocks, which also differ between two traces for one size, are left out.

    Args:
      one: what functions captured after the trace `ours`. The trace `theirs` has just ended.

    Raises:
      DriverError: a variable depends on the size, or cannot be compared. The error names it.
    """
    other, ends, sizes = captured_by(theirs), list(ours.ends()), (ours.graph.examples, theirs.graph.examples)
    found = list(_differences(one, other))
    again = [captured_by(trace(n)) for n in sizes[::-1]] if found else [other, one]
    changing = {(n, a.name) for n, a, _ in (*_differences(other, again[0]), *_differences(one, again[1]))}
    for number, a, b in found:
        end, comparable = ends[number], a.copy is not None and b.copy is not None
        of_examples = not sized(ours, theirs).isdisjoint(x for x in end.atoms if isinstance(x, Var))
        if of_examples or (comparable and (number, a.name) in changing):
            continue
        here, there = reprlib.repr(a.thing), reprlib.repr(b.thing)
        if comparable:
            how = f" ({end.what} closes over it: {a.name}, is {here} for {sizes[0]} and {there} for {sizes[1]})"
            raise another_program(ours.graph, theirs.graph, end.where, how)
        raise DriverError(
            f"driver {ours.graph.name!r}{at(end.where)}: {end.what} reads an object that each trace of the driver "
            f"creates, and that cannot be compared between two traces: {a.name}, is {here}. Create it once, outside "
            "the driver, or pass its numbers as values of the hook:\n    ctrl.hook(fn, ad.global_batch())"
        )


def check_captured(traced: Expressions, captured: Captured) -> None:
    """Raise a DriverError if a hook or callback captures a traced value."""
    for end, variables in zip(traced.ends(), captured, strict=True):
        for variable in variables:
            if variable.own and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variable.thing)):
                raise DriverError(
                    f"driver {traced.graph.name!r}{at(end.where)}: {end.what} closes over a traced value: "
                    f"{variable.name}. It has no number when the function runs. Pass it as a value of the hook, or as "
                    "an argument of the callback:\n    ctrl.hook(lambda control, value: …, value)"
                )


def _differences(one: Captured, other: Captured) -> Iterator[tuple[int, Variable, Variable]]:
    """Yield the number of the end and both variables where they differ or cannot be compared."""
    for number, pairs in enumerate(map(zip, one, other)):
        for a, b in pairs:
            comparable = a.copy is not None and b.copy is not None
            if a.copy != b.copy if comparable else a.own and a.thing is not b.thing and not _equal(a.thing, b.thing):
                yield number, a, b


def _equal(a: Any, b: Any) -> bool:
    with suppress(Exception):  # whatever a library raises
        return bool(a == b)
    return False


def variables_of(functions: Iterable[Any]) -> Iterator[Variable]:
    """Yield the variables that functions, and tuples of functions, capture."""
    todo, seen = list[Any](), dict[int, Any]()
    _copy(tuple(functions), todo)
    while todo and len(seen) < _MOST:
        function = todo.pop(0)
        if id(function) in seen:
            continue
        seen[id(function)] = function
        code = getattr(getattr(function, "func", function), "__code__", None)
        file = getattr(code, "co_filename", getattr(sys.modules.get(type(function).__module__), "__file__", None))
        own = not is_library(str(file))
        for name, thing in _captured(function):
            yield Variable(name, thing, _copy(thing, todo), own)


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, FunctionType):
        yield f"code of {name}()", function.__code__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                yield f"{variable}, which {name}() closes over", cell.cell_contents
        for p in inspect.signature(function, follow_wrapped=False).parameters.values():
            yield f"{p.name}, a default argument of {name}()", None if p.default is p.empty else p.default
    if isinstance(function, partial):
        parts = (function.func, *function.args, *function.keywords.values())
        yield from (("an argument of functools.partial", part) for part in parts)
    for inner in ("__wrapped__", "__func__"):  # of jax.jit and functools.cache; of methods
        yield f"{inner} of {name}()", getattr(function, inner, None)
    bound = getattr(function, "__self__", None)
    owner, prefix = (function, name) if bound is None or isinstance(bound, ModuleType) else (bound, "self")
    own = {s: getattr(owner, s, None) for s in getattr(owner, "__slots__", ())} | getattr(owner, "__dict__", {})
    yield from ((f"{prefix}.{attribute} of {name}()", value) for attribute, value in own.items())


def _copy(thing: Any, functions: list[Any], depth: int = 8) -> Hashable | None:
    """Return a copy to compare, or `None` for other kinds. Appends functions and callable objects to `functions`."""
    kind = type(thing).__name__
    if isinstance(thing, _PLAIN):
        return kind, thing if isinstance(thing, CodeType) else repr(thing)
    if isinstance(thing, jax.Array):  # immutable
        return kind, str(thing.dtype), thing.shape
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return kind, str(thing.dtype), thing.shape, thing.flat[:: 1 + thing.size // _MOST].tobytes()
    if isinstance(thing, _CONTAINERS) and depth:  # copied in one call, because other threads may write
        flat = [x for item in dict.copy(thing).items() for x in item] if isinstance(thing, dict) else list(thing)
        parts = [_copy(x, functions, depth - 1) for x in flat[:_MOST]]
        if None in parts:
            return None
        return kind, len(flat), frozenset(parts) if isinstance(thing, set | frozenset) else tuple(parts)
    if callable(thing) and not isinstance(thing, type):
        functions.append(thing)
        return "function"
    return None
