"""Operator state: values that an operator carries from step to step, such as a moving average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.arrays import NotAnArrayError, check_not_sharded
from adaptive.base.values.jaxprs import Primitive

from .context import no_result, only_in_programs, stays


class Frozen:
    """Arrays as a parameter of a primitive: hashable, compared by content."""

    def __init__(self, leaves: Sequence[Any]):
        self.leaves = [np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)) for leaf in leaves]
        self._key = tuple((a.shape, str(a.dtype), a.tobytes()) for a in self.leaves)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._key == other._key

    def __repr__(self) -> str:
        return f"Frozen({', '.join(f'{a.dtype}{list(a.shape)}' for a in self.leaves)})"


state_read_p = Primitive("state_read")  # -> handle, *values. The handle ties a write to its read.
state_write_p = Primitive("state_write")  # handle, *values ->
for _p in (state_read_p, state_write_p):
    _p.multiple_results = True
    only_in_programs(_p)

_HANDLE = jax.core.ShapedArray((), np.dtype(np.int32))
state_read_p.def_abstract_eval(
    lambda *, label, init: [_HANDLE, *(jax.core.ShapedArray(a.shape, a.dtype) for a in init.leaves)]
)
state_read_p.def_impl(lambda *, label, init: [np.int32(0), *map(jnp.asarray, init.leaves)])
state_write_p.def_abstract_eval(lambda *operands, written: [])
state_write_p.def_impl(lambda *operands, written: [])


def operator_state(label: str, init: Any, update: Callable[[Any], tuple[Any, Any]]) -> Any:
    """Carry state from step to step.

    Args:
      label: its name in `explain()` and in checkpoints. Several states with one label are numbered.
      init: the state before the first step: a pytree of arrays and numbers (no tracers).
      update: traced; takes the state, returns `(new state, result)`.

    Returns:
      `result`. The new state is replicated if everything that it is computed from is.

    Raises:
      CollectiveError: `init` is not known before the first step, or is sharded over devices; or `update` returns a
        state of another structure or shape.
    """
    leaves, tree = jax.tree.flatten(init)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise CollectiveError(
            f"operator state {label!r}{at(current_line())}: its initial state must be known before the first step, but "
            "it is traced. Pass concrete arrays; their shapes may come from traced values (np.zeros(x.shape))."
        )
    for leaf in leaves:
        try:
            check_not_sharded(leaf)
        except NotAnArrayError as error:
            raise CollectiveError(f"operator state {label!r}{at(current_line())}: its initial state {error}") from error
    handle, *old = state_read_p.bind(label=label, init=Frozen(leaves))
    new, result = update(jax.tree.unflatten(tree, old))
    new_leaves, new_tree = jax.tree.flatten(new)
    if new_tree != tree or any(jnp.shape(n) != jnp.shape(o) for n, o in zip(new_leaves, old, strict=True)):
        raise CollectiveError(
            f"operator state {label!r}{at(current_line())}: update() must return a state shaped like its initial one; "
            f"got {jax.tree.map(jnp.shape, new)} for {jax.tree.map(jnp.shape, init)}."
        )
    cast = [jnp.asarray(n).astype(o.dtype) for n, o in zip(new_leaves, old, strict=True)]
    state_write_p.bind(handle, *cast, written=stays(f"operator state {label!r}"))
    return result


no_result(state_write_p)
