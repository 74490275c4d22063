"""The form of a checkpoint: its fields, and the name, shape and dtype of each array.

Shared by what writes and what reads checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.arrays import NotAnArrayError, check_not_sharded, is_key, numbers_of
from adaptive.base.errors import CheckpointError
from adaptive.base.torch_tensors import is_tensor
from adaptive.base.tree_paths import Leaf, Name, by_name
from adaptive.graph.flow import Scope
from adaptive.runtime.engine import Engine

VERSION = 1
FIELDS = (
    *("version", "state", "slots", "local", "hooks", "step", "run_id", "cursor"),
    *("batch_sizes", "global_batch", "shares", "members", "workers", "seed", "examples"),
)
_MOST = 2**63 - 1
HALF_OF_RUN_ID = 6  # digits of a run's id


class LeafForm(NamedTuple):
    """The expected form of a leaf in checkpoints of this program."""

    label: str
    shape: tuple[int, ...]  # as stored: local leaves have a row per worker
    dtype: np.dtype
    local: bool = False


def forms_of_state(engine: Engine, like: Any, rows: int | None = None) -> dict[Name, LeafForm]:
    """Return the form of each leaf of the state. `rows`: workers in the checkpoint, if not as here."""
    n, local = rows or engine.world.capacity, engine.plan.local_state
    leaves = enumerate(by_name(like, "state").items())
    return {name: form_of(leaf, n if i in local else None) for i, (name, leaf) in leaves}


def forms_of_op_states(engine: Engine, rows: int | None = None) -> dict[Name, LeafForm]:
    """Return the form of each array of the operator states, in the order of the plan. `rows`: as above."""
    op_states, n = engine.plan.op_states, rows or engine.world.capacity
    counts = {op_state.name: None if op_state.scope == Scope.ALL else n for op_state in op_states}
    leaves = by_name({op_state.name: list(op_state.init) for op_state in op_states}, "slots")
    ordered = [(s.name, str(k)) for s in op_states for k in range(len(s.init))]  # a dict's leaves are sorted
    return {name: form_of(leaves[name], counts[name[0]]) for name in ordered}


def form_of(leaf: Leaf, rows: int | None = None) -> LeafForm:
    """Return a leaf's form; with a leading axis of `rows` workers, if it is local."""
    value = leaf.value
    if is_key(value):
        value = jax.eval_shape(jax.random.key_data, value)
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    shape = tuple(np.shape(value))
    return LeafForm(leaf.label, shape if rows is None else (rows, *shape), np.dtype(dtype), rows is not None)


def local_indices(wanted: Mapping[Name, LeafForm]) -> list[int]:
    """Return the indices of local leaves, in the order of their names."""
    return [number for number, name in enumerate(sorted(wanted)) if wanted[name].local]


def has_local(engine: Engine) -> bool:
    """Return whether any state is local to a worker, so that a checkpoint communicates. Replicated."""
    return bool(engine.plan.local_state) or any(op_state.scope != Scope.ALL for op_state in engine.plan.op_states)


def host_copy(leaf: Any) -> np.ndarray:
    """Return a copy of a leaf in the host's memory; of a key, its numbers."""
    return np.array(numbers_of(leaf))


def matched_arrays(fields: Mapping[str, Any], field: str, wanted: Mapping[Name, LeafForm]) -> dict[str, np.ndarray]:
    """Return the arrays of a field by label, matched by name, after checking dtypes and shapes.

    Raises:
      CheckpointError: a leaf is missing, unknown, or has another dtype or shape.
    """
    found = by_name(fields[field], field)
    others = tree_mismatch(found, wanted)
    if others:
        raise CheckpointError(f"the checkpoint is of another program: {others}.")
    _check_local(fields, field, wanted)
    for name, want in wanted.items():
        wrong = name in found and leaf_mismatch(found[name], want)
        if wrong:
            raise CheckpointError(f"the checkpoint's {wrong}.")
    return {
        want.label: host_copy(found[name].value) if name in found else np.zeros(want.shape, want.dtype)
        for name, want in wanted.items()
    }


def tree_mismatch(found: Mapping[Name, Leaf], wanted: Mapping[Name, LeafForm]) -> str:
    """Return a description of the leaves that are in only one of two trees. Empty leaves may be missing."""
    missing = [w.label for name, w in wanted.items() if name not in found and np.prod(w.shape)]
    unknown = [leaf.label for name, leaf in found.items() if name not in wanted]
    if missing and unknown:
        return f"it has no {_listed(missing)}, but {_listed(unknown)}"
    if unknown:
        return f"it has {_listed(unknown)}, which this program does not have"
    return f"it has no {_listed(missing)}" if missing else ""


def _listed(labels: Sequence[str]) -> str:
    labels = [label if set(label) & set(".[") else f"single array as its {label}" for label in labels]
    return ", ".join(labels[:4]) + f" and {len(labels) - 4} more" * (len(labels) > 4)


def leaf_mismatch(leaf: Leaf, want: LeafForm) -> str:
    """Return why an array does not fit, or "". Arrays are not cast implicitly."""
    try:
        check_not_sharded(leaf.value)
    except NotAnArrayError as error:
        return f"{leaf.label} {error}"
    if is_tensor(leaf.value):
        return f"{leaf.label} is a tensor of PyTorch. Pass x.numpy()"
    found = form_of(leaf)
    if found.shape != want.shape:
        return f"{leaf.label} has shape {found.shape} for one of shape {want.shape}"
    if found.dtype == want.dtype:
        return ""
    text = f"{leaf.label} is {found.dtype} for {want.dtype}"
    kinds = "fiub"  # complex numbers, text and objects cannot be converted
    return f"{text}. To convert it on purpose:  .astype({want.dtype.name!r})" if found.dtype.kind in kinds else text


def _check_local(fields: Mapping[str, Any], field: str, wanted: Mapping[Name, LeafForm]) -> None:
    if field not in ("state", "slots"):
        return
    if not isinstance(fields["local"], Mapping) or field not in fields["local"]:
        raise CheckpointError(f"the checkpoint does not say which leaves of its {field} are local. It is damaged.")
    names, numbers = sorted(wanted), {whole_number(n, "local") for n in number_list(fields["local"][field], "local")}
    for number in numbers ^ set(local_indices(wanted)):
        label = wanted[names[number]].label if number < len(names) else field
        there, here = ("local", "not") if number in numbers else ("not local", "it is")
        raise CheckpointError(
            f"the checkpoint's {label} is {there}, and {here} in this program. Local leaves have a value for each "
            "worker."
        )


def as_leaf(array: np.ndarray, leaf: Any) -> Any:
    """Return an array as a value of the leaf's type: a number, or an array."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jnp.asarray(array)
    if isinstance(leaf, np.generic):
        return array[()]
    return array if isinstance(leaf, np.ndarray) else array.item()


def number_list(value: Any, what: str) -> list[Any]:
    """Return a list of numbers from a number, list, tuple, array, or dict with the keys "0", "1", …

    Raises:
      CheckpointError: it is none of these.
    """
    leaves = {name: leaf.value for name, leaf in by_name(value, what).items()}
    if () in leaves and np.ndim(leaves[()]) <= 1:
        return list(host_copy(leaves[()])) if np.ndim(leaves[()]) else [leaves[()]]
    if leaves.keys() != {(str(k),) for k in range(len(leaves))}:
        raise CheckpointError(f"the checkpoint's {what} is not a list of numbers: {value!r}.")
    return [leaves[str(k),] for k in range(len(leaves))]


def text(value: Any, what: str) -> str:
    """Return `value`, a string.

    Raises:
      CheckpointError: it is no string.
    """
    if not isinstance(value, str):
        raise CheckpointError(f"the checkpoint's {what} is not text: {value!r}.")
    return value


def whole_number(value: Any, what: str, *, least: int | None = 0, most: int | None = _MOST) -> int:
    """Return `value` as an int.

    Raises:
      CheckpointError: it is no whole number from `least` to `most`.
    """
    array = np.asarray(value)
    whole = isinstance(value, int) or (array.ndim == 0 and array.dtype.kind in "iu")
    if not whole or isinstance(value, bool):
        raise CheckpointError(f"the checkpoint's {what} is not a whole number: {value!r}.")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise CheckpointError(f"the checkpoint's {what} cannot be {number}.")
    return number
