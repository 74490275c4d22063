"""`merge_metrics`: combines metrics of microbatches and workers into the metric of all examples."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._all_reduce import all_reduce
from ._leaves import error

M = TypeVar("M")

# The ways in which a metric's `merge` combines a leaf, detected by merging a with b and b with a.
_WAYS = {
    "sum": lambda a, b: (a + b, a + b),
    "max": lambda a, b: (np.maximum(a, b), np.maximum(a, b)),
    "min": lambda a, b: (np.minimum(a, b), np.minimum(a, b)),
    "kept": lambda a, b: (a, b),
}


def merge_metrics(metrics: M) -> M:
    """Merge metrics over all workers and microbatches, as their own `merge` method would.

    For metrics that are not means over examples, such as precision or the area under a curve. Supports metrics of `clu`
    and `google-metrax`, and any object whose `merge` sums its leaves or takes their maximum or minimum. The leaves are
    sent in the step's message. For metrics that collect examples use `program.evaluate` instead.

    Args:
      metrics: a metric, or a pytree of them. Local.

    Returns:
      The metrics of all examples of the step. Replicated. Call `compute()` on them in the driver or after the step.

    Raises:
      CollectiveError: a metric has no `merge`, or one that is not a sum, maximum or minimum.

    Example:
      >>> found = metrax.Precision.from_model_output(predictions, labels)     # doctest: +SKIP
      >>> metrics = {"precision": comm.merge_metrics(found)}                          # doctest: +SKIP

      After the step: `report.metrics["precision"].compute()`.
    """
    return jax.tree.map(_merged, metrics, is_leaf=lambda node: hasattr(node, "merge"))


def _merged(metric: Any) -> Any:
    name = "an array" if hasattr(metric, "dtype") else type(metric).__name__
    if not hasattr(metric, "merge"):
        raise error(
            "merge_metrics",
            f'{name} cannot be merged: it has no merge(other). Sums are merged by\n    comm.all_reduce(x, op="sum")',
        )
    paths, tree = jax.tree.flatten_with_path(metric)
    labels = [name + jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    ways = _ways(metric, leaves, tree)
    merged: list[Any] = [None] * len(leaves)
    for label, leaf, way in zip(labels, leaves, ways, strict=True):
        if way is None or (way == "kept" and isinstance(leaf, jax.core.Tracer)):
            what = (
                "is merged neither by a sum nor by a maximum"
                if way is None
                else "is taken from one of the two metrics, and the other one is lost"
            )
            raise error(
                "merge_metrics",
                f"{label} {what}, so it cannot be merged by a collective. Merge its statistics, or evaluate it:\n"
                f"    program.evaluate(lambda state, batch: {name}.from_model_output(...), data)",
            )
    for op in ("sum", "max", "min"):  # one collective for each operation
        places = [i for i, way in enumerate(ways) if way == op]
        for place, value in zip(places, all_reduce([leaves[i] for i in places], op=op), strict=True):
            merged[place] = value
    return tree.unflatten([leaf if way == "kept" else new for leaf, way, new in zip(leaves, ways, merged, strict=True)])


def _ways(metric: Any, leaves: list[Any], tree: jax.tree_util.PyTreeDef) -> list[str | None]:
    """Find by merging test values how each leaf is merged; `None` if it is not by a sum, maximum or minimum."""
    a, b = ([_made_up(leaf, which) for leaf in leaves] for which in (0, 1))
    with jax.ensure_compile_time_eval():
        found = []
        for first, second in ((a, b), (b, a)):
            result = tree.unflatten([jnp.asarray(x) for x in first]).merge(
                tree.unflatten([jnp.asarray(x) for x in second])
            )
            found.append([np.asarray(x) for x in jax.tree.leaves(result)])
    if len(found[0]) != len(leaves):
        return [None] * len(leaves)
    return [_way(*four) for four in zip(a, b, *found, strict=True)]


def _way(a: np.ndarray, b: np.ndarray, of_a_and_b: np.ndarray, of_b_and_a: np.ndarray) -> str | None:
    for name, way in _WAYS.items():
        expected = way(a, b)
        if np.array_equal(of_a_and_b, expected[0]) and np.array_equal(of_b_and_a, expected[1]):
            return name
    return None


def _made_up(leaf: Any, which: int) -> np.ndarray:
    """Return test values of the leaf's shape and dtype: small integers, whose sums are exact in any dtype."""
    shape, dtype = np.shape(leaf), jnp.result_type(leaf)
    return (1 + 2 * which + np.arange(np.prod(shape, dtype=int)) % 3).reshape(shape).astype(dtype)
