"""Checks that no traced value is kept where Python code would read it after the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import jax

from adaptive.base.errors import DriverError
from adaptive.base.process.source_lines import at

from .closures import Captured, variables_of
from .driver_errors import kept
from .expressions import Expressions


def check_captured(traced: Expressions, captured: Captured) -> None:
    """Check that no hook or callback captures a traced value.

    Raises:
      DriverError: one does. The error names the variable.
    """
    for end, variables in zip(traced.ends(), captured, strict=True):
        for variable in variables:
            if variable.own and has_tracer(variable.thing):
                raise DriverError(
                    f"driver {traced.graph.name!r}{at(end.where)}: {end.what} closes over a traced value: "
                    f"{variable.name}. It has no number when the function runs. Pass it as a value of the hook, or as "
                    "an argument of the callback:\n    ctrl.hook(lambda control, value: …, value)"
                )


def check_left(driver: Callable, name: str) -> None:
    """Check that the driver has left no traced value in an attribute, a closure variable, a global or a list.

    Looks at what the driver captures, at the globals that it names, and at one level of attributes of these.

    Args:
      name: the driver's name.

    Raises:
      DriverError: it has. The error names the place.
    """
    for place, thing in _within_reach(driver):
        if has_tracer(thing):
            raise kept(name, f" in {place}")


def has_tracer(thing: Any) -> bool:
    """Return whether an object is a traced value, or a pytree that holds one."""
    try:
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(thing))
    except Exception:  # keys that cannot be sorted
        return False


def _within_reach(driver: Callable) -> Iterator[tuple[str, Any]]:
    found = [(variable.name, variable.thing) for variable in variables_of([driver]) if variable.own]
    functions = [thing for _, thing in [("", driver), *found]]
    for function in (getattr(f, "__func__", f) for f in functions):
        if isinstance(function, FunctionType):
            names = [name for name in function.__code__.co_names if name in function.__globals__]
            found += [(f"the global {name}", function.__globals__[name]) for name in names]
    for place, thing in found:
        yield place, thing
        if not isinstance(thing, ModuleType | FunctionType):
            own = {**getattr(thing, "__dict__", {})}
            yield from ((f"attribute {name!r} of {place}", value) for name, value in own.items())
