"""One row of the table of sources in docs/input.md: the expression a user writes as data, and what must come of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Row:
    """A kind of source.

    Attributes:
      data: the expression; the table shows it, and `Group.build` evaluates it.
      examples: what the program must take, a pytree of arrays with a row for each; see `checks.ids` for how an
        example is known. A leaf that is a `jax.ShapeDtypeStruct` can have any values. None: data are refused.
      note: what the table says besides.
      noted: whether the table has the library's notes, too.
      refused: words that the error must have.
      per_worker: whether each worker has an iterator of its own, so that nothing can be resized.
      quick: whether `make test` tests this source on ranks, not only `make test-all`.
      long: whether only `make test-all` tests it on one worker.
      modules: what must be installed, besides the group's modules.
    """

    data: str
    examples: Any = None
    note: str = ""
    noted: bool = False
    refused: str = ""
    per_worker: bool = False
    quick: bool = False
    long: bool = False
    modules: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """The number of examples."""
        return jax.tree.leaves(self.examples)[0].shape[0]

    @property
    def taken(self) -> bool:
        """Whether the data are not refused."""
        return not self.refused


@dataclass(frozen=True)
class Group:
    """Sources of one library.

    Attributes:
      title: the heading of the table.
      modules: what must be installed.
      about: a sentence on the names in the expressions.
      names: returns these names; files are written to the folder that it is given.
    """

    title: str
    modules: tuple[str, ...]
    about: str
    names: Callable[[Path], dict[str, Any]]
    rows: tuple[Row, ...]

    def build(self, row: Row) -> Any:
        """The data of a row; new objects in each call."""
        return eval(row.data, self.names(self._folder))

    @cached_property
    def _folder(self) -> Path:
        self.__dict__["_temporary"] = temporary = tempfile.TemporaryDirectory(prefix="adaptive-sources-")
        return Path(temporary.name)

    def missing(self, *rows: Row) -> str:
        """Why these rows cannot be built here; "" if they can."""
        modules = dict.fromkeys((*self.modules, *(module for row in rows for module in row.modules)))
        missing = [module for module in modules if find_spec(module) is None]
        return f"{', '.join(missing)} not installed" if missing else ""


def name(group: Group, row: Row) -> str:
    """What tests and jobs call a row."""
    return f"{group.title}: {row.data}"


def like(examples: Any) -> Any:
    """The shape and dtype of each leaf of one example."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), examples)
