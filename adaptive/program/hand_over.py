"""What newcomers have to know: all that a program is between two steps, handed over from memory to memory.

A checkpoint is what a run can be taken up from; this is more, since nobody stops: sizes that are pending, decisions as
they are compared, when the run is to end. What is local is not handed over: it begins with a newcomer as it began with
the program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.arrays import is_key, numbers_of
from adaptive.base.world import TransferPayload
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.hooks import Hooks
from adaptive.control.hyperparameters import Hyperparameters
from adaptive.control.membership import Membership
from adaptive.data.stream import Stream
from adaptive.graph.flow import Scope
from adaptive.runtime.engine import Engine, copied
from adaptive.runtime.memory import memory_of

from .seating import Seating
from .watch import Skips


class Known(NamedTuple):
    """The parts of a program that know something which changes from step to step."""

    engine: Engine
    hooks: Hooks
    hyperparameters: Hyperparameters
    sizes: BatchSizes
    membership: Membership
    seating: Seating
    digest: DecisionDigest
    stream: Stream
    skips: Skips


_SIZES = (
    *("current", "previous", "pending", "next", "shares", "wanted", "limits", "members"),
    *("_all_ready", "_all_able", "causes", "_pending_by", "_next_by", "_wanted_by"),
)
_MEMBERSHIP = ("asked", "_there", "_generation", "_heard", "_wishes")
_DIGEST = ("value", "step", "asked")
_SEATING = ("joined_in_generation", "_joined", "_notes", "_told")


def pack(known: Known, own: Any) -> TransferPayload:
    """What this process knows. Hooks have been shown all steps (`Hooks.catch_up`).

    Args:
      own: of the program's own.
    """
    small = {
        "own": own,
        "sizes": _of(known.sizes, _SIZES),
        "membership": _of(known.membership, _MEMBERSHIP),
        "digest": _of(known.digest, _DIGEST),
        "seating": _of(known.seating, _SEATING),
        "skips": known.skips.in_a_row,
        "cursors": known.stream.cursors,
        "place": known.stream.place(),
        "hooks": (jax.tree.map(_plain, known.hooks.states), known.hooks.joined),
    }
    return small, [np.asarray(numbers_of(leaf), order="C") for leaf in _replicated(known.engine)]


def room(known: Known) -> list[np.ndarray]:
    """Where a newcomer receives the arrays that another one has packed: where its own lie, if that is possible.

    To take new memory from the system takes several times as long as to write into memory that is there.
    """
    return [memory_of(leaf) for leaf in _replicated(known.engine)]


def unpack(known: Known, baggage: TransferPayload) -> Any:
    """Know what another process does. Returns what is the program's own."""
    small, arrays = baggage
    for part, name in ((known.sizes, "sizes"), (known.membership, "membership"), (known.digest, "digest")):
        vars(part).update(small[name])
    known.seating.take_over(small["seating"])
    known.skips.in_a_row = small["skips"]
    known.stream.go_on(small["cursors"], small["place"])
    known.hooks.restart(small["hooks"][0])
    known.hooks.joined = small["hooks"][1]
    engine = known.engine
    values = [_like(array, leaf) for array, leaf in zip(arrays, _replicated(engine), strict=True)]
    for local, device in enumerate(engine.world.devices):
        leaves = iter(values)
        engine.states[local] = [
            copied(engine.first_local(i), device)
            if i in engine.plan.local_state
            else _placed(next(leaves), leaf, device)
            for i, leaf in enumerate(engine.states[local])
        ]
        engine.slots[local] = [
            [
                _placed(next(leaves), old, device) if slot.scope == Scope.ALL else copied(a, device)
                for a, old in zip(slot.init, olds, strict=True)
            ]
            for slot, olds in zip(engine.plan.slots, engine.slots[local], strict=True)
        ]
    if engine.new_nans is not None:
        engine.new_nans.begin([engine.states[place] for place in engine.present] or engine.states[:1])
    known.hyperparameters.restart()
    return small["own"]


def _replicated(engine: Engine) -> list[jax.Array]:
    """The leaves of state and slots that are equal on all workers."""
    local = engine.some_present
    state = [leaf for i, leaf in enumerate(engine.states[local]) if i not in engine.plan.local_state]
    slots = zip(engine.plan.slots, engine.slots[local], strict=True)
    return [*state, *(a for slot, values in slots if slot.scope == Scope.ALL for a in values)]


def _like(array: np.ndarray, leaf: jax.Array) -> Any:
    """What has been received in the place of a leaf: the leaf itself, where it was received in its memory."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return leaf if np.may_share_memory(array, np.asarray(leaf)) else array


def _placed(value: Any, old: jax.Array, device: jax.Device) -> jax.Array:
    return old if value is old else copied(value, device)


def _plain(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _of(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}
