"""A checkpoint as a folder: leaves by their names in a table, arrays by orbax, no pickle.

    program.json   step, cursor, sizes and other fields; and the table: for each leaf of the state, operator states and
                   hooks its path, and its number, text, or array with dtype and shape
    arrays/        by orbax: the arrays, by the keys in the table

Containers are not stored, so their order does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import CheckpointError
from adaptive.base.tree_paths import Name, by_name
from adaptive.disk import arrays
from adaptive.disk.directory import step_of
from adaptive.disk.manifest import DamagedError, write_through

_FORMAT = 1
_TREES = ("state", "slots", "hooks")


class CheckpointTable:
    """A checkpoint as a table of numbers and arrays by name.

    Args:
      checkpoint: a result of `program.checkpoint()`.

    Attributes:
      arrays: the arrays by key.

    Raises:
      CheckpointError: a leaf is of a type that cannot be stored, or two leaves have one name.
    """

    def __init__(self, checkpoint: Mapping[str, Any]):
        self.arrays: dict[str, np.ndarray] = {}
        self.step = int(checkpoint["step"])
        self._leaves = [
            {"of": tree, "name": name, **self._entry(leaf.label, leaf.value)}
            for tree in _TREES
            for name, leaf in by_name(checkpoint[tree], tree).items()
        ]
        self._fields = {name: _plain(value) for name, value in checkpoint.items() if name not in _TREES}

    def write(self, folder: Path) -> None:
        """Write the table to an existing, empty folder."""
        if self.arrays:
            arrays.write(self.arrays, folder / "arrays")
        content = {"format": _FORMAT, "fields": self._fields, "leaves": self._leaves}
        write_through(folder / "program.json", json.dumps(content, indent=1).encode())

    def _entry(self, label: str, value: Any) -> dict[str, Any]:
        if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic):
            return {"value": value}
        array = np.asarray(value)
        dtype = array.dtype
        if dtype.hasobject or dtype.names or dtype.kind in "USMm":
            raise CheckpointError(
                f"{label} is {_said(value)}, which cannot be stored on disk: only arrays of numbers, numbers and text "
                "can be."
            )
        entry: dict[str, Any] = {"dtype": dtype.name, "shape": array.shape}
        if not array.size:
            return entry
        key = f"{len(self.arrays):05}"
        self.arrays[key] = array
        return {**entry, "array": key}


def check_step(folder: Path) -> None:
    """Raise a DamagedError if a folder's name has another step than its content."""
    named = step_of(folder)
    try:
        step = json.loads((folder / "program.json").read_bytes())["fields"]["step"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # `load` raises the error
    if named is not None and step != named:
        raise DamagedError(
            f"it holds step {step}, but its name says step {named}: it was renamed. Rename it to the name of its step"
        )


def load(folder: Path) -> dict[str, Any]:
    """Return the checkpoint in a folder, as `program.checkpoint()` returned it, with dicts for all containers.

    Raises:
      CheckpointError: it cannot be read, although it is complete.
    """
    try:
        content = json.loads((folder / "program.json").read_bytes())
        form = content["format"]
        if form != _FORMAT:
            raise CheckpointError(f"{folder} is of format {form!r}; this library reads format {_FORMAT}.")
        stored = arrays.read(folder / "arrays") if (folder / "arrays").exists() else {}
        leaves = list(_leaves(content["leaves"], stored))
        return {**content["fields"], **{tree: _tree(tree, leaves) for tree in _TREES}}
    except CheckpointError:
        raise
    except Exception as error:  # raised by any library, for instance of another version
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def _leaves(table: list[dict[str, Any]], stored: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Name, Any]]:
    for entry in table:
        if "value" in entry:
            value = entry["value"]
        else:
            dtype, shape = jnp.dtype(entry["dtype"]), tuple(entry["shape"])
            value = stored[entry["array"]] if "array" in entry else np.zeros(shape, dtype)
            if value.dtype != dtype or value.shape != shape:
                raise CheckpointError(
                    f"{entry['of']}{entry['name']} was stored as {dtype}{shape}, and is read as "
                    f"{value.dtype}{value.shape}."
                )
        yield entry["of"], tuple(entry["name"]), value


def _tree(tree: str, leaves: list[tuple[str, Name, Any]]) -> Any:
    """Return nested dicts whose leaves have these names; a leaf without a name is the whole tree."""
    root: dict[str, Any] = {}
    for of, name, value in leaves:
        if of != tree:
            continue
        if not name:
            return value
        place = root
        for part in name[:-1]:
            place = place.setdefault(part, {})
        place[name[-1]] = value
    return root


def _plain(value: Any) -> Any:
    """Return numbers, lists and dicts with Python numbers in place of numpy's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _said(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
