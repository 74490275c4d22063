"""A checkpoint for the disk: its arrays by key, and a table, as JSON, of the name of each leaf with its key or value.

Containers are not stored, so their order does not matter, and no pickle is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import CheckpointError
from adaptive.base.tree_paths import Name, by_name
from adaptive.disk import folders

_TREES = ("state", "slots", "hooks")


def table_of(checkpoint: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the non-empty arrays of a checkpoint by key, and its table.

    Raises:
      CheckpointError: a leaf is of a type that cannot be stored, or two leaves have one name.
    """
    arrays: dict[str, np.ndarray] = {}
    leaves = [
        {"of": tree, "name": name, **_entry(leaf.label, leaf.value, arrays)}
        for tree in _TREES
        for name, leaf in by_name(checkpoint[tree], tree).items()
    ]
    fields = {name: _plain(value) for name, value in checkpoint.items() if name not in _TREES}
    return arrays, {"fields": fields, "leaves": leaves, "arrays": list(arrays)}


def _entry(label: str, value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic):
        return {"value": value}
    array = np.asarray(value)
    dtype = array.dtype
    if dtype.hasobject or dtype.names or dtype.kind in "USMm":
        kind = f"an array of {dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"{label} is {kind}, which cannot be stored on disk: only arrays of numbers, numbers and text can be."
        )
    entry: dict[str, Any] = {"dtype": dtype.name, "shape": array.shape}
    if array.size:  # orbax stores no empty arrays
        entry["array"] = f"{len(arrays):05}"
        arrays[entry["array"]] = array
    return entry


def load(folder: Path) -> dict[str, Any]:
    """Return the checkpoint in a folder, as `program.checkpoint()` returned it, with dicts for all containers.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        arrays, table = folders.read(folder)
        leaves = list(_leaves(table["leaves"], arrays))
        return {**table["fields"], **{tree: _tree(tree, leaves) for tree in _TREES}}
    except CheckpointError:
        raise
    except Exception as error:  # raised by any library, for instance of another version
        why = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {why}") from error


def _leaves(table: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Name, Any]]:
    for entry in table:
        if "value" in entry:
            value = entry["value"]
        else:
            dtype, shape = jnp.dtype(entry["dtype"]), tuple(entry["shape"])
            value = arrays[entry["array"]] if "array" in entry else np.zeros(shape, dtype)
            if value.dtype != dtype or value.shape != shape:
                raise CheckpointError(f"{entry['name']} is {value.dtype}{value.shape}, and was {dtype}{shape}.")
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
