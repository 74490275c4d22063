"""Hooks: values that leave the graph for Python after the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from adaptive.base.decision import Handler
from adaptive.base.values.arrays import as_jax
from adaptive.base.values.jaxprs import Primitive
from adaptive.base.values.tree_paths import leaf_names

from .context import no_result, only_in_programs, stays

hook_p = Primitive("hook")  # *values ->
hook_p.multiple_results = True
hook_p.def_abstract_eval(lambda *operands, hook: [])
hook_p.def_impl(lambda *operands, hook: [])
only_in_programs(hook_p)
no_result(hook_p)


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook of a driver: its handler, how often it runs, and the structure of its values."""

    name: str
    handler: Handler
    every: int
    tree: jax.tree_util.PyTreeDef
    leaf_names: tuple[str, ...] = ()


def hook(
    name: str, handler: Handler, values: tuple[Any, ...], *, every: int = 1, value_names: Sequence[str] = ()
) -> None:
    """Pass replicated values to `handler` after every `every`-th step.

    Args:
      value_names: names of the values in records of a run; by default their numbers.
    """
    leaves, tree = jax.tree.flatten(values)
    roots = [*value_names[: len(values)], *(f"value_{i}" for i in range(len(value_names), len(values)))]
    names = [name for root, value in zip(roots, values, strict=True) for name in leaf_names(value, root)]
    hook = Hook(name, handler, every, tree, tuple(names))
    stays(f"hook {name!r}", hook)
    hook_p.bind(*map(as_jax, leaves), hook=hook)
