"""Modules that are imported when a test first uses them, so that collecting the tests does not wait for them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class _OnUse:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest looks whether it is a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def on_use(name: str) -> Any:
    """Return a stand-in for a module, which imports it at the first use; without the module, skip the calling file."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _OnUse(name)
