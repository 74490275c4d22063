"""Groups the leaves of a model by a function of their paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line

Path = tuple[str, ...]
By = Callable[[Path], str | None]


def layer_sets(tree: Any, by: By) -> dict[str, list[int]]:
    """Return the indices of the leaves in each set; `by` maps a leaf's path to its set, or to None to leave it out.

    Raises:
      CollectiveError: `by` fails, returns something else than text or None, or puts all of several leaves into one set.
    """
    sets: dict[str, list[int]] = {}
    keys = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    paths = [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path in keys]
    for index, path in enumerate(paths):
        name = _name(by, path)
        if name is not None:
            sets.setdefault(name, []).append(index)
    if len(paths) > 1 and len(sets) < 2:
        found = f"all {len(paths)} leaves are in the set {next(iter(sets))!r}" if sets else "no leaf is in any set"
        choices = [dict.fromkeys(path[i] for path in paths if len(path) > i) for i in range(max(map(len, paths)))]
        parts = [f"path[{i}]: {', '.join(names)}" for i, names in enumerate(choices)]
        raise CollectiveError(
            f"noise_scale{at(current_line())}: by= cannot tell layers apart: {found}. Return another name for each "
            "layer, such as a part of the path:\n    " + "\n    ".join(parts)
        )
    return sets


def _name(by: By, path: Path) -> str | None:
    try:
        name = by(path)
    except Exception as error:
        raise CollectiveError(
            f"noise_scale{at(current_line())}: by({path!r}) raised {type(error).__name__}: {error}. It receives the "
            "path of each leaf, as a tuple of text."
        ) from error
    if name is not None and not isinstance(name, str):
        raise CollectiveError(
            f"noise_scale{at(current_line())}: by({path!r}) returned {name!r}. Return the name of the leaf's set as "
            "text, or None to leave the leaf out."
        )
    return name
