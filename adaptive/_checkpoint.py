"""All that a program is between two steps, as one pytree of host arrays, and back.

What is equal on all workers is kept once; what belongs to a worker (state marked as local, slots of local values) is
kept for each, on a leading axis. Any library that stores pytrees can store it: orbax, or pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._barrier import Barrier, Sizes
from ._engine import Engine, copied
from ._errors import DataError, DriverError
from ._flow import Scope
from ._sizes import equal
from ._world import World

Checkpoint = dict[str, Any]


def save(engine: Engine, barrier: Barrier, sizes: Sizes, *, step: int, cursor: Any, tree: Any) -> Checkpoint:
    """A checkpoint. Communicates if anything is local, so all processes have to call it. Replicated."""
    plan, world = engine.plan, engine.world
    about = f"a checkpoint of {engine.name} behind step {step}"
    barrier.catch_up(sizes)
    state = [
        _of_all(world, [s[i] for s in engine.states], about) if i in plan.local_state else _host(engine.states[0][i])
        for i in range(len(engine.states[0]))
    ]
    slots = {
        slot.name: [
            _host(engine.slots[0][k][leaf])
            if slot.scope == Scope.ALL
            else _of_all(world, [s[k][leaf] for s in engine.slots], about)
            for leaf in range(len(slot.init))
        ]
        for k, slot in enumerate(plan.slots)
    }
    return {
        "state": jax.tree.unflatten(tree, state),
        "slots": slots,
        "hooks": jax.tree.map(_plain, dict(zip(barrier.names, barrier.states, strict=True))),
        "step": step,
        "cursor": cursor,
        "batch_sizes": list(sizes.target),
        "shares": list(sizes.shares),
    }


def load(checkpoint: Checkpoint, engine: Engine, barrier: Barrier, sizes: Sizes) -> None:
    """Put a checkpoint's arrays, sizes and hook states in the place of those there are; of all, or, if it does not fit,
    of none.

    The number of workers may be another than it was: then batches begin equal, and hooks begin anew, because what they
    have learned is about workers that may be gone. Local state has no meaning then, and is refused.
    """
    plan, world = engine.plan, engine.world
    leaves = jax.tree.leaves(checkpoint["state"])
    if len(leaves) != len(engine.states[0]):
        raise DriverError(f"the checkpoint's state has {len(leaves)} leaves, this program's {len(engine.states[0])}.")
    missing = {s.name for s in plan.slots} ^ set(checkpoint["slots"])
    if missing:
        raise DriverError(f"the checkpoint is of another driver: slots {sorted(missing)} are not in both.")
    same_workers = len(checkpoint["batch_sizes"]) == world.size
    has_local = plan.local_state or any(s.scope != Scope.ALL for s in plan.slots)
    if has_local and not same_workers:
        raise DataError(
            f"the checkpoint holds local state of {len(checkpoint['batch_sizes'])} workers; here are {world.size}."
        )
    states: list[list[jax.Array]] = []
    slots: list[list[list[jax.Array]]] = []
    for worker, device, old, old_slots in zip(world.workers, world.devices, engine.states, engine.slots, strict=True):
        mine = [leaf[worker] if i in plan.local_state else leaf for i, leaf in enumerate(leaves)]
        states.append([_placed(leaf, device, like) for leaf, like in zip(mine, old, strict=True)])
        slots.append([])
        for slot, likes in zip(plan.slots, old_slots, strict=True):
            kept = checkpoint["slots"][slot.name]
            mine = kept if slot.scope == Scope.ALL else [leaf[worker] for leaf in kept]
            slots[-1].append([_placed(leaf, device, like) for leaf, like in zip(mine, likes, strict=True)])
    if same_workers:
        sizes.restart(checkpoint["batch_sizes"], checkpoint["shares"])
    else:
        sizes.restart(equal(sum(checkpoint["batch_sizes"]), sizes.limits))
    engine.states, engine.slots = states, slots
    barrier.forget()
    if same_workers:
        barrier.states = [
            checkpoint["hooks"].get(name, s) for name, s in zip(barrier.names, barrier.states, strict=True)
        ]


def _host(leaf: jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def _plain(leaf: Any) -> Any:
    """Of a hook's state, which is of whatever its policy is written in."""
    return _host(leaf) if isinstance(leaf, jax.Array) else np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _placed(value: Any, device: jax.Device, like: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        value = jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))
    elif np.shape(value) != like.shape:
        raise DriverError(f"the checkpoint holds an array of shape {np.shape(value)} for one of shape {like.shape}.")
    else:
        value = np.asarray(value, like.dtype)
    return copied(value, device)


def _of_all(world: World, own: Sequence[jax.Array], about: str) -> np.ndarray:
    """Every worker's value, on a leading axis."""
    rows = [pickle.loads(b) for b in world.share(pickle.dumps([_host(leaf) for leaf in own]), about)]
    return np.stack([row for process in rows for row in process])
