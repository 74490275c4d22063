"""Checkpoints: the state of a program between two steps as one pytree of host arrays and numbers.

Replicated values are saved once. Values per worker (local state, and operator states of local values) have a leading
axis of workers. Any library that stores pytrees can store a checkpoint: orbax, or pickle. `parse_checkpoint.py` reads
them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import DriverError, NonFiniteError
from adaptive.base.tree_paths import by_name, leaf_names
from adaptive.control.hooks import Hooks
from adaptive.graph.flow import Scope
from adaptive.runtime.engine import Engine

from .checkpoint_form import (
    HALF_OF_RUN_ID,
    VERSION,
    form_of,
    forms_of_op_states,
    forms_of_state,
    host_copy,
    leaf_mismatch,
    local_indices,
    tree_mismatch,
)
from .parts import ProgramParts

NAMED = 5  # leaves that an error lists
Checkpoint = dict[str, Any]


def snapshot(parts: ProgramParts, *, writes: bool = True) -> Checkpoint:
    """Return a checkpoint. Replicated. Communicates if anything is local, so all processes call it. If members are lost
    meanwhile, it is invalid; call this function again.

    Args:
      writes: whether this process uses the checkpoint; otherwise replicated arrays are not copied to the host.
    """
    p, run, engine, like, stream, sizes = parts, parts.run, parts.engine, parts.form.shapes, parts.stream, parts.sizes
    plan, copy = engine.plan, _copied if writes else _uncopied
    about = f"a checkpoint of {engine.name} after step {run.step}"
    p.hooks.catch_up(sizes)
    wanted_state, wanted_op_states = forms_of_state(engine, like), forms_of_op_states(engine)
    one = engine.workers.some_present
    state = [
        _of_all(engine, [s[i] for s in engine.states], engine.workers.initial(i), about)
        if wanted.local
        else copy(engine.states[one][i])
        for i, wanted in enumerate(wanted_state.values())
    ]
    op_states = {
        op_state.name: [
            copy(engine.op_states[one][k][leaf])
            if op_state.scope == Scope.ALL
            else _of_all(engine, [s[k][leaf] for s in engine.op_states], op_state.init[leaf], about)
            for leaf in range(len(op_state.init))
        ]
        for k, op_state in enumerate(plan.op_states)
    }
    return {
        "version": VERSION,
        "state": jax.tree.unflatten(jax.tree.structure(like), state),
        "slots": op_states,
        "local": {"state": local_indices(wanted_state), "slots": local_indices(wanted_op_states)},
        "hooks": hooks_to_keep(p.hooks),
        "step": run.step,
        # Some libraries store no text, or only int32.
        "run_id": [int(run.run_id[:HALF_OF_RUN_ID], 16), int(run.run_id[HALF_OF_RUN_ID:], 16)],
        "cursor": stream.cursors[0] if len(stream.shard_ranges) == 1 else list(stream.cursors),
        "batch_sizes": list(sizes.target),
        "global_batch": sizes.wanted,
        "shares": list(sizes.shares),
        "members": list(sizes.members),
        "workers": p.membership.asked or 0,
        "seed": stream.seed,
        "examples": [shard.length for shard in stream.shard_ranges],
        **({"place": place} if (place := stream.place()) else {}),
    }


def _copied(leaf: jax.Array) -> np.ndarray:
    """Return a copy on the host, by way of another object with the same memory: a numpy view of `leaf` itself would
    prevent the next step from reusing its memory.
    """
    return host_copy(leaf.addressable_data(0))


def _uncopied(leaf: jax.Array) -> jax.Array:
    return leaf


def leaves_with_nans(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the names of the state's leaves that hold NaNs: "state['w']"."""
    named = zip(leaf_names(checkpoint["state"], "state"), jax.tree.leaves(checkpoint["state"]), strict=True)
    return [name for name, leaf in named if _holds_nans(leaf)]


def refuse_nans(checkpoint: Mapping[str, Any]) -> None:
    """Raise a NonFiniteError if the state of a checkpoint holds NaNs. The same on all processes."""
    leaves = leaves_with_nans(checkpoint)
    if leaves:
        more = f" and {len(leaves) - NAMED} more" if len(leaves) > NAMED else ""
        raise NonFiniteError(
            f"no checkpoint of step {checkpoint['step']}: {', '.join(leaves[:NAMED])}{more} "
            f"{'holds' if len(leaves) == 1 else 'hold'} NaNs. Continue from an earlier checkpoint: "
            "program.restore(checkpoint). A leaf that may be unknown by design can hold infinities instead, or build "
            'the program with nonfinite="allow".'
        )


def _holds_nans(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, np.inexact) and bool(np.isnan(leaf).any())


def hooks_to_keep(hooks: Hooks) -> dict[str, Any]:
    """Return the hooks' states, by the hooks' names.

    Raises:
      DriverError: a state's structure, shapes or dtypes differ from the hook's initial state, so it could not be
        restored.
    """
    each = zip(hooks.names, hooks.hooks, hooks.states, hooks.first_states, strict=True)
    for name, hook, state, first in each:
        found = by_name(state, "state")
        wanted = {path: form_of(leaf) for path, leaf in by_name(first, "state").items()}
        of_leaves = (leaf_mismatch(found[path], want) for path, want in wanted.items())
        wrong = tree_mismatch(found, wanted) or next(filter(None, of_leaves), None)
        if wrong:
            raise DriverError(
                f"the state of hook {name!r} differs in form from its initial state: {wrong}. It could not be "
                f"restored from a checkpoint. Make init of {hook.name} return a state with the structure, shapes and "
                "dtypes of later states."
            )
    return jax.tree.map(_plain, dict(zip(hooks.names, hooks.states, strict=True)))


def _plain(leaf: Any) -> Any:
    """Return a hook's state as plain arrays, without empty ones, which some libraries cannot store."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return host_copy(leaf) if np.size(leaf) else None
    return leaf


def _of_all(engine: Engine, own: Sequence[jax.Array], first: Any, about: str) -> np.ndarray:
    """Return the values of all workers, stacked; the initial value for worker slots of no process."""
    world = engine.world
    here = {slot: host_copy(leaf) for slot, leaf in zip(world.workers, own, strict=True)}
    everyone = [pickle.loads(theirs) for theirs in world.all_gather_bytes(pickle.dumps(here), about)]
    rows = {slot: row for process in everyone for slot, row in process.items()}
    return np.stack([rows[slot] if slot in rows else host_copy(first) for slot in range(world.capacity)])
