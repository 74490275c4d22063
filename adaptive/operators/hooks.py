"""Hooks: values that leave the graph for Python, at the barrier behind the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from adaptive.base.decision import Handler

from .context import only_in_programs, stays
from .inert import inert

hook_p = Primitive("hook")  # *values ->
hook_p.multiple_results = True
hook_p.def_abstract_eval(lambda *operands, hook: [])
hook_p.def_impl(lambda *operands, hook: [])
only_in_programs(hook_p)
inert(hook_p)


@dataclass(frozen=True, eq=False)
class Hook:
    """A value's way out: who handles it, how often, and how the leaves are put together again."""

    name: str
    handler: Handler
    every: int
    tree: jax.tree_util.PyTreeDef


def hook(name: str, handler: Handler, values: tuple[Any, ...], *, every: int = 1) -> None:
    """Hand `values` (replicated) to `handler` at the barrier behind every `every`-th step."""
    leaves, tree = jax.tree.flatten(values)
    hook = Hook(name, handler, every, tree)
    stays(f"hook {name!r}", hook)
    hook_p.bind(*map(jnp.asarray, leaves), hook=hook)
