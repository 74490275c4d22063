"""One kind of data: the expression a user writes, and what must come of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

import adaptive as ad
from adaptive.data.rows import rows_of


@dataclass(frozen=True)
class Row:
    """A kind of data.

    Attributes:
      data: the expression, which `Group.build` evaluates.
      examples: what the program must take, a pytree of arrays with a row for each; see `checks.ids` for how an
        example is known. A leaf that is a `jax.ShapeDtypeStruct` can have any values.
      refused: whether the data are refused, with an error whose last words are the line to write. The program takes
        what that line says.
      in_program: whether it is tested in programs, too.
    """

    data: str
    examples: Any
    refused: bool = False
    in_program: bool = False

    @property
    def length(self) -> int:
        """The number of examples."""
        return jax.tree.leaves(self.examples)[0].shape[0]


@dataclass(frozen=True)
class Group:
    """Data of one library.

    Attributes:
      title: its name.
      modules: what must be installed.
      names: returns the names in the expressions; files are written to the folder that it is given.
    """

    title: str
    modules: tuple[str, ...]
    names: Callable[[Path], dict[str, Any]]
    rows: tuple[Row, ...]

    def build(self, row: Row) -> Any:
        """What a program takes for a row, which is the advice where the data are refused; new objects in each call."""
        names = self.names(self._folder)
        data = eval(row.data, names)
        return eval(advice(data), {**names, "data": data}) if row.refused else data

    @cached_property
    def _folder(self) -> Path:
        self.__dict__["_temporary"] = temporary = tempfile.TemporaryDirectory(prefix="adaptive-sources-")
        return Path(temporary.name)

    def missing(self) -> str:
        """Why these rows cannot be built here; "" if they can."""
        missing = [module for module in self.modules if find_spec(module) is None]
        return f"{', '.join(missing)} not installed" if missing else ""


def advice(data: Any) -> str:
    """The line that the error about these data says to write."""
    with pytest.raises(ad.DataError) as error:
        rows_of(data)
    return str(error.value).rpartition("  ")[2]


def name(group: Group, row: Row) -> str:
    """Return what tests call a row."""
    return f"{group.title}: {row.data}"


def like(examples: Any) -> Any:
    """The shape and dtype of each leaf of one example."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), examples)
