"""Checkpoints: the state of a program between two steps as one pytree of host arrays and numbers.

Replicated values are saved once. Values per worker (local state, and operator states of local values) have a leading
axis of workers. Any library that stores pytrees can store a checkpoint, since leaves are found by name. `restore.py`
reads them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import CheckpointError, NonFiniteError
from adaptive.base.values.arrays import NotAnArrayError, as_numpy, is_key, numbers_of
from adaptive.base.values.tree_paths import Leaf, Name, by_name
from adaptive.control.hooks import Hooks
from adaptive.graph.flow import Scope
from adaptive.runtime.engine import Engine

from .parts import ProgramParts

VERSION = 2


def snapshot(parts: ProgramParts, *, writes: bool = True) -> dict[str, Any]:
    """Return a checkpoint. Replicated. Communicates if anything is local, so all processes call it. If members are lost
    meanwhile, it is invalid; call this function again.

    Args:
      writes: whether this process uses the checkpoint; otherwise replicated arrays are not copied to the host.
    """
    p, run, engine, stream, sizes = parts, parts.run, parts.engine, parts.stream, parts.sizes
    p.hooks.catch_up(sizes)
    rows = _of_all_workers(p) if p.plan.has_local else {}
    leaves = enumerate(_leaves_of_worker(engine, engine.workers.some_present))
    # A view of the leaf itself would prevent the next step from reusing its memory; one of its data does not.
    whole = ((i, x.addressable_data(0) if x.is_fully_replicated else x) for i, x in leaves)
    copies = (rows[i] if i in rows else host_copy(x) if writes else x for i, x in whole)
    return {
        "version": VERSION,
        "state": jax.tree.map(lambda _: next(copies), p.form.shapes),
        "slots": {op_state.name: [next(copies) for _ in op_state.init] for op_state in engine.plan.op_states},
        "hooks": hooks_to_keep(p.hooks),
        "step": run.step,
        "run_id": np.frombuffer(run.run_id.encode(), np.uint8).copy(),  # some libraries store no text
        "cursor": np.array(stream.cursors),
        "batch_sizes": np.array(sizes.target),
        "global_batch": sizes.wanted,
        "shares": np.array(sizes.shares),
        "members": np.array(sizes.members),
        "workers": p.membership.asked or 0,
        "seed": stream.seed,
        "examples": np.array(stream.lengths),
        **({"place": place} if (place := stream.place()) else {}),
    }


def _leaves_of_worker(engine: Engine, local_index: int) -> list[jax.Array]:
    """Return the leaves of `leaves_of_program` on a worker of this process."""
    return [*engine.states[local_index], *(x for each in engine.op_states[local_index] for x in each)]


def _of_all_workers(p: ProgramParts) -> dict[int, np.ndarray]:
    """Return the local leaves of all workers by number, stacked; the initial values for worker slots of no process."""
    engine, world = p.engine, p.world
    first = {i: host_copy(leaf.like) for i, leaf in enumerate(leaves_of_program(p).values()) if leaf.local}
    workers = {slot: _leaves_of_worker(engine, k) for k, slot in enumerate(world.workers)}
    own = pickle.dumps({slot: {i: host_copy(leaves[i]) for i in first} for slot, leaves in workers.items()})
    rows: dict[int, dict[int, np.ndarray]] = {}
    for theirs in world.all_gather_bytes(own, f"a checkpoint of {engine.name} after step {p.run.step}"):
        rows |= pickle.loads(theirs)
    return {i: np.stack([rows.get(slot, first)[i] for slot in range(world.capacity)]) for i in first}


def host_copy(leaf: Any) -> np.ndarray:
    """Return a copy of a leaf in the host's memory; of a key, its numbers."""
    if not isinstance(leaf, jax.Array) or is_key(leaf) or leaf.is_fully_replicated:
        return np.array(numbers_of(leaf))
    whole = np.empty(leaf.shape, leaf.dtype)  # `np.asarray` would leave another copy with the leaf
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


def hooks_to_keep(hooks: Hooks) -> dict[str, Any]:
    """Return the hooks' states by the hooks' names, without empty arrays, which some libraries cannot store."""
    return jax.tree.map(_plain, dict(zip(hooks.names, hooks.states, strict=True)))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return host_copy(leaf) if np.size(leaf) else None
    return leaf


def refuse_nans(checkpoint: Mapping[str, Any]) -> None:
    """Raise a NonFiniteError if the state of a checkpoint holds NaNs. The same on all processes."""
    leaves = by_name(checkpoint["state"], "state").values()
    wrong = [x.label for x in leaves if jnp.issubdtype(x.value.dtype, np.inexact) and np.isnan(x.value).any()]
    if wrong:
        raise NonFiniteError(
            f"no checkpoint of step {checkpoint['step']}: {_listed(wrong)} {'holds' if len(wrong) == 1 else 'hold'} "
            "NaNs. Continue from an earlier checkpoint: program.restore(checkpoint). A leaf that may be unknown by "
            'design can hold infinities instead, or build the program with nonfinite="allow".'
        )


# --- what a checkpoint of this program has ----------------------------------------------------------------------------


class ProgramLeaf(NamedTuple):
    """A leaf of a program's checkpoints.

    Attributes:
      like: its initial value on one worker; of a replicated leaf of the state, only shape and dtype.
      local: whether a checkpoint has it with a leading axis of workers.
    """

    label: str
    like: Any
    local: bool = False


def leaves_of_program(p: ProgramParts) -> dict[Name, ProgramLeaf]:
    """Return the leaves of the state, of operator states in the order of the plan, and of the hooks' states."""
    plan, first, found = p.engine.plan, p.engine.workers.initial, {}
    for i, (name, leaf) in enumerate(by_name(p.form.shapes, "state").items()):
        local = i in plan.local_state
        found["state", *name] = ProgramLeaf(leaf.label, first(i) if local else leaf.value, local)
    for op_state in plan.op_states:
        for name, leaf in by_name({op_state.name: list(op_state.init)}, "slots").items():
            found["slots", *name] = ProgramLeaf(*leaf, op_state.scope != Scope.ALL)
    return found | leaves_of_hooks(p.hooks)


def leaves_of_hooks(hooks: Hooks) -> dict[Name, ProgramLeaf]:
    """Return the leaves of the hooks' states."""
    first = dict(zip(hooks.names, hooks.first_states, strict=True))
    return {("hooks", *name): ProgramLeaf(*leaf) for name, leaf in by_name(first, "hooks").items()}


def matched(
    checkpoint: Mapping[str, Any], trees: Sequence[str], leaves: Mapping[Name, ProgramLeaf], workers: int = 1
) -> dict[Name, np.ndarray]:
    """Return copies of the arrays of a checkpoint, in the order of this program's `leaves`. Empty ones may be missing.

    Args:
      trees: those to read, of `state`, `slots` and `hooks`.
      workers: rows of local arrays.

    Raises:
      CheckpointError: a leaf is missing, unknown, no array, or of another dtype or shape. Nothing is cast.
    """
    found = {(tree, *name): leaf for tree in trees for name, leaf in by_name(checkpoint[tree], tree).items()}
    wanted = {name: leaf for name, leaf in leaves.items() if name[0] in trees}
    forms = {name: _form(leaf.like, (workers,) * leaf.local) for name, leaf in wanted.items()}
    missing = [wanted[name].label for name, (shape, _) in forms.items() if name not in found and np.prod(shape)]
    unknown = [leaf.label for name, leaf in found.items() if name not in wanted]
    if missing or unknown:
        texts = [f"no {_listed(missing)}"] * bool(missing) + [_listed(unknown)] * bool(unknown)
        raise CheckpointError(f"it is of another program: it has {', but '.join(texts)}.")
    arrays: dict[Name, np.ndarray] = {}
    for name, (shape, dtype) in forms.items():
        leaf = found[name] if name in found else Leaf("", np.zeros(shape, dtype))
        label = leaf.label
        try:
            array = host_copy(leaf.value if is_key(leaf.value) else as_numpy(leaf.value))
        except NotAnArrayError as error:
            raise CheckpointError(error.about(f"its {label}")) from error
        if array.shape != shape:
            raise CheckpointError(f"its {label} has shape {array.shape} for one of shape {shape}.")
        if array.dtype != dtype:
            convert = f"To convert it on purpose:  .astype({dtype.name!r})"
            raise CheckpointError(f"its {label} is {array.dtype} for {dtype}. {convert}")
        arrays[name] = array
    return arrays


def _form(like: Any, axis: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype]:
    value = jax.eval_shape(jax.random.key_data, like) if is_key(like) else like
    return (*axis, *np.shape(value)), np.dtype(getattr(value, "dtype", None) or np.asarray(value).dtype)


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + f" and {len(labels) - 4} more" * (len(labels) > 4)
