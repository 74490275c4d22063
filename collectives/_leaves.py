"""Helpers for collective operators: flatten and check a tree, apply a collective to its leaves, make errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.arrays import NotAnArrayError, as_jax, is_key
from adaptive.base.values.current import check_not_forked, current_world
from adaptive.operators.collectives import Collective, collective
from adaptive.operators.context import tracing

T = TypeVar("T")


def combine(
    how: Collective,
    tree: T,
    leaves: dict[str, jax.Array],
    weight: jax.Array | None = None,
    when: jax.Array | None = None,
) -> T:
    """Apply a collective to a tree's leaves, which are given by name, and return the resulting tree."""
    if not leaves:
        return tree
    results = collective(how, list(leaves.values()), weight=weight, names=list(leaves), when=when)
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def leaves_of(
    what: str, tree: Any, problem_of_dtype: Callable[[Any], str | None] = lambda dtype: None
) -> dict[str, jax.Array]:
    """Return the tree's leaves as arrays, keyed by their paths.

    Args:
      what: name of the operator, for errors.
      problem_of_dtype: returns why values of a dtype cannot be sent, or None.

    Raises:
      CollectiveError: a leaf cannot be sent, the message names the first one; or this is a forked child.
    """
    check_not_forked()
    leaves = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        problem = _problem(value) or problem_of_dtype(as_jax(value).dtype)
        if problem:
            raise error(what, f"{name or 'the value'} is {problem}")
        leaves[name] = as_jax(value)
    return leaves


def name_of_all(leaves: dict[str, jax.Array]) -> str:
    """Return a name for leaves that are sent as one vector."""
    first = next(iter(leaves))
    return first if len(leaves) == 1 else f"{first} and {len(leaves) - 1} more"


def _problem(value: Any) -> str | None:
    """Return why `value` cannot be sent and what to write instead, or None if it can be sent."""
    dtype = getattr(value, "dtype", None)
    if dtype == jax.dtypes.float0:
        return (
            "the gradient of an integer (float0), which has no values. Differentiate only with respect to floats, or "
            "leave it out of the tree."
        )
    if is_key(value):
        return "a PRNG key. Send its data:\n    jax.random.wrap_key_data(comm.broadcast(jax.random.key_data(key)))"
    try:
        as_jax(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, NotAnArrayError):
            return f"a tensor that {error}"
        text = str(error).splitlines()[0] if isinstance(error, OverflowError) else "neither an array nor a number"
        return f"{value!r}: {text}. Leave it out of the tree."
    return None


def error(what: str, text: str) -> CollectiveError:
    """Return an error about a call of the operator `what`, with the driver's source line."""
    return CollectiveError(f"{what}{at(current_line())}: {text}")


def known_capacity() -> int | None:
    """Return the capacity of the program that is being traced, or of the current world; None if there is neither."""
    trace, world = tracing(), current_world.get()
    return trace.capacity if trace else world.capacity if world else None
