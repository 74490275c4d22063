"""Lazy re-exports: a package imports a module when one of its names is first used, which saves start-up time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_use(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that re-exports names of modules.

        __getattr__, __dir__ = on_use(__name__, {"median": "._robust"})

    Args:
      package: `__name__` of the package.
      modules: maps each name to the module that defines it, relative to the package; "." for a module of this name.

    Returns:
      The functions that Python calls for missing names (PEP 562) and for `dir()`.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        value = import_module(f".{name}", package) if module == "." else getattr(import_module(module, package), name)
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
