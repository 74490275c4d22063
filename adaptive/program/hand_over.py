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
from adaptive.base.world import Baggage
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.hooks import Hooks
from adaptive.control.membership import Membership
from adaptive.data.stream import Stream
from adaptive.graph.flow import Scope
from adaptive.runtime.engine import Engine, copied

from .seating import Seating
from .watch import Skips


class Known(NamedTuple):
    """The parts of a program that know something which changes from step to step."""

    engine: Engine
    hooks: Hooks
    sizes: BatchSizes
    membership: Membership
    seating: Seating
    digest: DecisionDigest
    stream: Stream
    skips: Skips


_SIZES = (
    *("current", "previous", "pending", "next", "shares", "wanted", "limits", "members"),
    *("_all_ready", "_all_able"),
)
_MEMBERSHIP = ("asked", "_there", "_generation", "_heard", "_wishes")
_DIGEST = ("value", "step", "last")
_SEATING = ("since", "_joined", "_notes", "_told")


def pack(known: Known, own: Any) -> Baggage:
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
        "hooks": (jax.tree.map(_plain, known.hooks.states), known.hooks.joined),
    }
    return small, [np.asarray(numbers_of(leaf), order="C") for leaf in _replicated(known.engine)]


def unpack(known: Known, baggage: Baggage) -> Any:
    """Know what another process does. Returns what is the program's own."""
    small, arrays = baggage
    for part, name in ((known.sizes, "sizes"), (known.membership, "membership"), (known.digest, "digest")):
        vars(part).update(small[name])
    known.seating.take_over(small["seating"])
    known.skips.in_a_row = small["skips"]
    known.stream.cursors = small["cursors"]
    known.hooks.restart(small["hooks"][0])
    known.hooks.joined = small["hooks"][1]
    engine, given = known.engine, iter(arrays)
    likes = _replicated(engine)
    values = [_like(next(given), like) for like in likes]
    for local, device in enumerate(engine.world.devices):
        leaves = iter(values)
        engine.states[local] = [
            copied(engine.first_local(i) if i in engine.plan.local_state else next(leaves), device)
            for i in range(len(engine.states[local]))
        ]
        engine.slots[local] = [
            [copied(next(leaves) if slot.scope == Scope.ALL else a, device) for a in slot.init]
            for slot in engine.plan.slots
        ]
    if engine.new_nans is not None:
        engine.new_nans.begin([engine.states[place] for place in engine.present] or engine.states[:1])
    return small["own"]


def _replicated(engine: Engine) -> list[jax.Array]:
    """The leaves of state and slots that are equal on all workers."""
    local = engine.some_present
    state = [leaf for i, leaf in enumerate(engine.states[local]) if i not in engine.plan.local_state]
    slots = zip(engine.plan.slots, engine.slots[local], strict=True)
    return [*state, *(a for slot, values in slots if slot.scope == Scope.ALL for a in values)]


def _like(array: np.ndarray, leaf: jax.Array) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf)) if is_key(leaf) else array


def _plain(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _of(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}
