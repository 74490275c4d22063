"""pytest rewrites the assertions of test files, and keeps the result: once, and not in each process of pytest-xdist.

These collect side by side, so that in a fresh clone each of them would rewrite all files, for seven seconds.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class _Compiled(Exception):
    """The code of a module is there and kept."""


class _Module:
    """What pytest's import hook is given for a module: it asks for the names of the module to run its code in them."""

    def __init__(self, file: Path):
        self.__spec__ = SimpleNamespace(origin=str(file))
        self.__name__ = file.stem

    @property
    def __dict__(self) -> Any:
        raise _Compiled


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Rewrite what the processes are to collect, before they start."""
    for argument in config.args:
        path = Path(argument.split("::")[0])
        for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
            with suppress(_Compiled):
                config.pluginmanager.rewrite_hook.exec_module(_Module(file.absolute()))
