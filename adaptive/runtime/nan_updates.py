"""Detection of NaNs that an update of the state computes from finite values: an optimizer's 0 / 0, a root of -1.

Messages do not contain these NaNs, so the check of messages misses them. The final segment overwrites the old state, so
the update cannot be undone. (Keeping the old state and choosing by `jnp.where` takes a multiple of the segment's time
and memory.) Instead the segment returns a flag for each leaf that it changes. The flags are read when that costs no
time: after the dispatch of the next step's first microbatches, and when the state is read.

Infinities do not count. Neither do NaNs that a leaf already had, or that come from inputs that may be NaN by design,
such as unknown seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from adaptive.base.errors import NonFiniteError
from adaptive.base.source_lines import at, line_of, name_workers
from adaptive.base.world_messages import WorldMessages
from adaptive.graph.plan import Plan
from adaptive.graph.trace import Atom, operands_of
from adaptive.operators.eager import wire_dtype
from adaptive.operators.sources import source_p

from .message import must_be_finite

_NAMED = 5  # leaves that an error lists


class Found(NamedTuple):
    """Leaves of the state in which an update produced NaNs."""

    replicated: tuple[int, ...]
    local: dict[int, tuple[int, ...]]  # by worker: local leaves

    def __bool__(self) -> bool:
        return bool(self.replicated or self.local)


NONE_FOUND = Found((), {})


class UpdateNaNs:
    """The NaN flags of the last update, for the workers of this process.

    Args:
      states: each worker's state before the first step.

    Attributes:
      leaves: indices of the state's leaves that are checked.
      may_differ: whether results may differ between processes.
      carriers: other inputs of the final segment that may be NaN by design, and from which the state is computed.
    """

    def __init__(self, plan: Plan, states: Sequence[Sequence[jax.Array]]):
        self._plan, self._local = plan, plan.local_state
        self._places = [n for n, i in enumerate(plan.changed_state) if _is_inexact(plan.graph.new_state[i].aval.dtype)]
        self.leaves = [plan.changed_state[n] for n in self._places]
        self._shown_by = _shown_by(plan, [plan.graph.new_state[i] for i in self.leaves])
        self.may_differ = any(i in self._local for i in self.leaves)
        self.carriers = _carriers(plan, [plan.graph.new_state[i] for i in self.leaves])
        self.accept(states)

    def accept(self, states: Sequence[Sequence[jax.Array]]) -> None:
        """Treat the NaNs in these states as intended."""
        self._flags: list[jax.Array | np.ndarray] = []
        self._found = NONE_FOUND
        of_all = {i for i, leaf in enumerate(states[0]) if i not in self._local and _holds_nan(leaf)}
        self._held = [of_all | {i for i in self._local if _holds_nan(state[i])} for state in states]

    def change_members(self, origins: Sequence[int | None], states: Sequence[Sequence[jax.Array]]) -> None:
        """Change the workers. NaNs in the states of new workers are treated as intended.

        Args:
          origins: for each worker, its previous index; `None` for a new one.
        """
        shared = self._held[0] - self._local
        self._held = [
            shared | {i for i in self._local if _holds_nan(state[i])} if origin is None else self._held[origin]
            for origin, state in zip(origins, states, strict=True)
        ]

    def flags(self, outputs: Sequence[jax.Array], carriers: Sequence[jax.Array]) -> jax.Array:
        """Return whether each leaf, and each carrier, may hold a NaN. Traced into the final segment.

        Sums each leaf, because a sum takes one pass over memory, and checks of each element take several times as long.
        Infinities of both signs also sum to NaN, so flagged leaves are checked again on the host. A leaf whose NaNs
        always propagate to another leaf, as from Adam's averages to parameters, shares that leaf's flag.

        Args:
          outputs: the outputs of the final segment.
        """
        looked_at = [outputs[self._places[n]] for n in dict.fromkeys(self._shown_by)]
        sums = [jnp.sum(x.astype(wire_dtype(x.dtype))) for x in (*looked_at, *carriers)]
        if not sums:
            return jnp.zeros(0, bool)
        order = {n: place for place, n in enumerate(dict.fromkeys(self._shown_by))}
        of_leaves = [order[n] for n in self._shown_by]
        seen = jnp.stack([jnp.isnan(s) for s in sums])
        return seen[np.array([*of_leaves, *range(len(order), len(sums))])]

    def committed(self, flags: Sequence[jax.Array | np.ndarray], *, on_host: bool = True) -> None:
        """Set the flags of the update that was just dispatched.

        Args:
          on_host: whether they are in the host's memory. If not, they are copied there as soon as they are computed,
            so that no step waits for the copy.
        """
        self._flags = list(flags)
        if not on_host:
            for flag in self._flags:
                if isinstance(flag, jax.Array):
                    flag.copy_to_host_async()

    def none_flagged(self) -> bool:
        """Return whether no flag is set, as in nearly all steps. Waits for the last update."""
        if self._found is not NONE_FOUND or True in map(bool, self._held):
            return False
        for flags in self._flags if self.may_differ else self._flags[:1]:
            if True in np.asarray(flags).tolist():
                return False
        self._flags = []
        return True

    def read(self, states: Sequence[Sequence[jax.Array]], workers: Sequence[int]) -> Found:
        """Return the leaves with NaNs from the last update. Waits for it. The result is kept until `accept`."""
        flags, self._flags = self._flags, []
        if not flags or self._found:
            return self._found
        flagged = [np.asarray(f) for f in (flags if self.may_differ else flags[:1])]
        if any(self._held) or any(f.any() for f in flagged):
            new = [self._new(n, state, f) for n, (state, f) in enumerate(zip(states, flagged, strict=False))]
            local = {workers[n]: tuple(i for i in found if i in self._local) for n, found in enumerate(new)}
            replicated = tuple(i for i in new[0] if i not in self._local)
            found = Found(replicated, {w: own for w, own in local.items() if own})
            self._found = found or NONE_FOUND
        return self._found

    def _new(self, n: int, state: Sequence[jax.Array], flagged: np.ndarray) -> list[int]:
        """Return the leaves of the n-th worker's state with new NaNs from the update."""
        graph, held = self._plan.graph, self._held[n]
        maybe = {leaf for leaf, flag in zip(self.leaves, flagged, strict=False) if flag}
        new = [i for i in sorted(maybe - held) if _holds_nan(state[i])]
        if new:
            given = {graph.state_vars[i] for i in held | (self._held[0] - self._local)}
            given |= {var for var, flag in zip(self.carriers, flagged[len(self.leaves) :], strict=True) if flag}
            held |= {i for i in new if given & _upstream(self._plan, [graph.new_state[i]])}
        made = [i for i in new if i not in held]
        held -= set(self.leaves) - maybe  # a leaf that is finite again must stay finite
        return made


def share_found(world: WorldMessages, found: Found, about: str) -> Found:
    """Return what was found on any process. Communicates; all processes call it."""
    own = json.dumps(list(found.local.items())).encode()
    everyone = [json.loads(theirs) for theirs in world.all_gather_bytes(own, about)]
    return Found(found.replicated, {w: tuple(leaves) for theirs in everyone for w, leaves in theirs})


def made_nans(plan: Plan, found: Found, step: int) -> NonFiniteError:
    """Return the error for an update that made NaNs, which the program's state now has."""
    leaves = found.replicated or tuple(dict.fromkeys(i for own in found.local.values() for i in own))
    graph = plan.graph
    producer = {v: eqn for eqn in graph.eqns for v in eqn.outvars}
    named = []
    for i in leaves[:_NAMED]:
        new = graph.new_state[i]
        eqn = producer.get(new) if isinstance(new, Var) else None
        named.append(graph.state_names[i] + (at(line_of(eqn.source_info)) if eqn is not None else ""))
    more = f" and {len(leaves) - _NAMED} more" if len(leaves) > _NAMED else ""
    where = "" if found.replicated else f" on {name_workers(sorted(found.local))}"
    return NonFiniteError(
        f"the update of step {step} made NaNs{where}: in {', '.join(named)}{more}. The values "
        "from all_reduce were finite; the NaNs were made after it.\n"
        f"The state is that of step {step}, with these NaNs: an update overwrites the state before it. Continue from a "
        "checkpoint:  program.restore(checkpoint). Where NaNs are meant to be in the state:  "
        'ad.Program(..., nonfinite="allow").'
    )


def _carriers(plan: Plan, leaves: Sequence[Atom]) -> list[Var]:
    """Return the final segment's inputs that may hold NaNs by design, and from which a leaf is computed."""
    free = {c.result for message in plan.messages for c in message if not must_be_finite(c)}
    free |= {var for op_state in plan.op_states for var in op_state.values}
    sources = {eqn.outvars[0] for eqn in plan.graph.eqns if eqn.primitive is source_p}
    taken = _upstream(plan, leaves)
    return [
        var
        for var, origin in plan.final.inputs
        if var in taken
        and _is_inexact(var.aval.dtype)
        and (var in free | sources or (origin.kind in ("prologue", "microbatch") and free & _upstream(plan, [var])))
    ]


# Elementwise primitives whose result is NaN wherever an operand of the same shape is.
_KEEPS_NANS = {"abs", "add", "add_any", "convert_element_type", "copy", "div", "exp", "log", "mul", "neg", "rsqrt"}
_KEEPS_NANS |= {"sign", "sqrt", "square", "sub", "tanh"}
_MOVES = {"reshape", "transpose"}


def _shown_by(plan: Plan, leaves: Sequence[Atom]) -> list[int]:
    """Return for each leaf the index of a leaf that has a NaN if this one does; its own if no other is known.

    Args:
      leaves: floating leaves of the new state.
    """
    own: dict[Atom, int] = {}
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, Var):
            own.setdefault(leaf, n)
    found: dict[Var, int] = {}  # for each value: a leaf that has a NaN if the value does
    for eqn in reversed(plan.graph.eqns):
        if eqn.primitive.name not in _KEEPS_NANS | _MOVES:
            continue
        (result,) = eqn.outvars
        shown = found.get(result, own.get(result))
        if shown is None or not _is_real(result.aval.dtype):
            continue
        for operand in eqn.invars:
            same = eqn.primitive.name in _MOVES or operand.aval.shape == result.aval.shape
            if isinstance(operand, Var) and same and _is_real(operand.aval.dtype):
                found.setdefault(operand, shown)
    return [n if isinstance(leaf, Literal) else found.get(leaf, own[leaf]) for n, leaf in enumerate(leaves)]


def _upstream(plan: Plan, atoms: Sequence[Atom]) -> set[Var]:
    """Return these values and all values from which they are computed, back to the last messages."""
    producer = {v: eqn for eqn in plan.graph.eqns for v in eqn.outvars}
    results = {c.result for message in plan.messages for c in message}
    found: set[Var] = set()
    stack = list(atoms)
    while stack:
        atom = stack.pop()
        if isinstance(atom, Literal) or atom in found:
            continue
        found.add(atom)
        if atom in producer and atom not in results:
            stack += operands_of(producer[atom])
    return found


def _is_real(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating, and wide enough for NaNs: not every format of 8 bits or fewer has them."""
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1


def _is_inexact(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, np.inexact)


def _holds_nan(leaf: jax.Array) -> bool:
    """Return whether an array of any dtype holds a NaN."""
    return _is_inexact(leaf.dtype) and bool(np.isnan(np.asarray(leaf)).any())
