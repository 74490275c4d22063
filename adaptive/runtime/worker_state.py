"""State and operator states of the workers of one process, from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.arrays import is_key, numbers_of
from adaptive.base.revision import Revision
from adaptive.base.world import World
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Plan

from .memory import memory_of
from .segment import Address, final_results

if TYPE_CHECKING:
    from .fused_step import FusedStep

States = list[list[jax.Array]]  # by local index: the leaves of the state
OpStates = list[list[list[jax.Array]]]  # by local index: the leaves of each operator state


class WorkerState:
    """State and operator states of this process's workers.

    Args:
      state: leaves of the initial state, on the host or any device. Copied, and removed from the list one by one, so
        that memory to which nothing else refers is freed in between.

    Attributes:
      present: local indices of the workers that are members.
      places: the places of a worker's values, by address: first the state and operator states that a step replaces, in
        the order of the final segment's results, then the leaves of the state that no step changes.
      values: the values of each worker by place, by local index. Those after `places` belong to the step that runs.
        State and operator states are up to date unless `held_by` has them; `states` and `op_states` always are.
      held_by: may hold the state in another form between its own steps.
      committed: one result of the last step's final segment per worker. When they are ready, the step's receive buffers
        may be overwritten.
      revision: incremented when the members change.
    """

    def __init__(self, plan: Plan, state: list[Any], world: World, revision: Revision | None = None):
        self._plan, self._world, self.revision = plan, world, revision or Revision()
        self._initial = {i: copied(state[i], world.devices[0]) for i in plan.local_state}
        of_state = [("state", i, 0) for i in range(len(state))]
        replaced = [a for a in final_results(plan) if a[0] in ("state", "op_state")]
        self.places: dict[Address, int] = {a: n for n, a in enumerate(dict.fromkeys((*replaced, *of_state)))}
        self.values: list[list[Any]] = [[None] * len(self.places) for _ in world.devices]
        for address in of_state:
            leaf = state.pop(0)
            copies = jax.block_until_ready([copied(leaf, device) for device in world.devices])
            for values, copy in zip(self.values, copies, strict=True):
                values[self.places[address]] = copy
            del leaf, copies, copy
        self._of_state = [self.places[address] for address in of_state]
        self._of_op_states = [
            [self.places["op_state", k, leaf] for leaf in range(len(s.init))] for k, s in enumerate(plan.op_states)
        ]
        for values, device in zip(self.values, world.devices, strict=True):
            self._set_op_states(values, [[copied(a, device) for a in s.init] for s in plan.op_states])
        shared = [("state", i, 0) for i in range(len(of_state)) if i not in plan.local_state]
        shared += [a for a in self.places if a[0] == "op_state" and plan.op_states[a[1]].scope == Scope.ALL]
        self._shared = [self.places[address] for address in shared]  # of replicated leaves: state, then operator states
        self.held_by: FusedStep | None = None
        self.present = list(range(len(world.devices)))
        self.committed: list[jax.Array] = []

    def _set_op_states(self, values: list[Any], op_states: Sequence[Sequence[Any]]) -> None:
        for places, leaves in zip(self._of_op_states, op_states, strict=True):
            for place, leaf in zip(places, leaves, strict=True):
                values[place] = leaf

    def fetch(self) -> list[list[Any]]:
        """Return the values of each worker, with the state of the last step."""
        if self.held_by is not None:
            self.held_by.give_back(self.values)
        return self.values

    @property
    def states(self) -> States:
        """The leaves of each worker's state, after the last step."""
        return [[values[place] for place in self._of_state] for values in self.fetch()]

    @property
    def op_states(self) -> OpStates:
        """The leaves of each worker's operator states, after the last step."""
        return [[[values[place] for place in places] for places in self._of_op_states] for values in self.fetch()]

    @property
    def some_present(self) -> int:
        """The local index of a member, whose replicated state is everyone's; 0 on a process in reserve."""
        return self.present[0] if self.present else 0

    def initial(self, i: int) -> jax.Array:
        """Return the initial value of leaf `i` of the state, which is local."""
        return self._initial[i]

    def replace(self, states: States, op_states: OpStates) -> None:
        """Continue from another state, of the workers in `present`."""
        if self.held_by is not None:
            self.held_by.forget()
        for values, state, of_worker in zip(self.values, states, op_states, strict=True):
            for place, leaf in zip(self._of_state, state, strict=True):
                values[place] = leaf
            self._set_op_states(values, of_worker)

    def change_members(self, present: Sequence[int], joined: Sequence[int]) -> None:
        """Change which workers of this process are members, from the next step on.

        Args:
          present, joined: local indices of all members, and of new ones. A new worker copies replicated leaves from a
            member that is not new, and starts with the initial values of local leaves.
        """
        for local_index in joined:
            self._reset(local_index, self._replicated())
        self.present = list(present)
        self.revision.increment()

    def _reset(self, local_index: int, replicated: Sequence[Any]) -> None:
        """Set a worker's replicated leaves, and its local leaves to their initial values.

        Args:
          replicated: in the order of `_replicated`. Copied, except the worker's own arrays.
        """
        plan, device, values = self._plan, self._world.devices[local_index], self.fetch()[local_index]
        for place, value in zip(self._shared, replicated, strict=True):
            if value is not values[place]:
                values[place] = copied(value, device)
        for i in plan.local_state:
            values[self._of_state[i]] = copied(self._initial[i], device)
        for places, op_state in zip(self._of_op_states, plan.op_states, strict=True):
            if op_state.scope != Scope.ALL:
                for place, initial in zip(places, op_state.init, strict=True):
                    values[place] = copied(initial, device)

    def set_op_state(self, number: int, value: np.ndarray) -> None:
        """Set a replicated operator state of one leaf, on all workers."""
        (place,) = self._of_op_states[number]
        for values, device in zip(self.fetch(), self._world.devices, strict=True):
            values[place] = copied(value, device)

    def op_state(self, number: int) -> np.ndarray:
        """Return the value of a replicated operator state of one leaf. Waits for the last step."""
        (place,) = self._of_op_states[number]
        return np.asarray(self.fetch()[self.some_present][place])

    # --- transfer to joining processes --------------------------------------------------------------------------------

    def _replicated(self) -> list[jax.Array]:
        """Return the replicated leaves, of the state and then of operator states."""
        values = self.fetch()[self.some_present]
        return [values[place] for place in self._shared]

    def export(self) -> list[np.ndarray]:
        """Return the replicated leaves as contiguous arrays, for `adopt` on a joining process."""
        return [np.asarray(numbers_of(leaf), order="C") for leaf in self._replicated()]

    def receive_buffers(self) -> list[np.ndarray]:
        """Return receive buffers for the arrays of `export`; they share the leaves' memory if possible."""
        return [memory_of(leaf) for leaf in self._replicated()]

    def adopt(self, arrays: Sequence[np.ndarray]) -> None:
        """Set the replicated leaves of this process's workers to another process's `export`, and reset local leaves.

        Args:
          arrays: the exported arrays; may be the `receive_buffers`.
        """
        values = [_as_leaf(array, leaf) for array, leaf in zip(arrays, self._replicated(), strict=True)]
        for local_index in range(len(self._world.devices)):
            self._reset(local_index, values)


def _as_leaf(array: np.ndarray, leaf: jax.Array) -> Any:
    """Return a received array as a leaf: the old leaf itself, if the array shares its memory."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return leaf if np.may_share_memory(array, np.asarray(leaf)) else array


def copied(value: Any, device: jax.Device) -> jax.Array:
    """Copy an array to new memory on a device.

    `device_put` may share the memory of a numpy array even with `may_alias=False`, so numpy arrays are copied first.
    """
    return jax.device_put(np.array(value) if isinstance(value, np.ndarray) else value, device, may_alias=False)
