"""State and operator states of the workers of one process, from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.arrays import is_key, numbers_of
from adaptive.base.world import World
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Plan

from .memory import memory_of

States = list[list[jax.Array]]  # by local index: the leaves of the state
OpStates = list[list[list[jax.Array]]]  # by local index: the leaves of each operator state


class HoldsState(Protocol):
    """Something that keeps the state in another form between its own steps: see `SPMDStep`."""

    def give_back(self, states: States, op_states: OpStates) -> None:
        """Write the state to these lists, if this object holds it.

        Raises:
          WorkerError: the state is lost.
        """

    def forget(self) -> None:
        """Drop the held state, because it was replaced."""


class WorkerState:
    """State and operator states of this process's workers.

    Args:
      state: leaves of the initial state, on the host or any device. Copied, and removed from the list one by one, so
        that memory to which nothing else refers is freed in between.

    Attributes:
      present: local indices of the workers that are members.
      local_states, local_op_states: the lists themselves. Up to date unless `held_by` has the state; `states` and
        `op_states` always are.
      held_by: the object that may hold the state in another form.
      committed: one result of the last step's final segment per worker. When they are ready, the step's receive buffers
        may be overwritten.
    """

    def __init__(self, plan: Plan, state: list[Any], world: World):
        self._plan, self._world = plan, world
        self._initial = {i: copied(state[i], world.devices[0]) for i in plan.local_state}
        self.local_states: States = [[] for _ in world.devices]
        while state:
            leaf = state.pop(0)
            copies = jax.block_until_ready([copied(leaf, device) for device in world.devices])
            for own, copy in zip(self.local_states, copies, strict=True):
                own.append(copy)
            del leaf, copies, copy
        initial = [s.init for s in plan.op_states]
        self.local_op_states: OpStates = [[[copied(a, d) for a in init] for init in initial] for d in world.devices]
        self.held_by: HoldsState | None = None
        self.present = list(range(len(world.devices)))
        self.committed: list[jax.Array] = []

    @property
    def states(self) -> States:
        """The leaves of each worker's state, after the last step."""
        if self.held_by is not None:
            self.held_by.give_back(self.local_states, self.local_op_states)
        return self.local_states

    @property
    def op_states(self) -> OpStates:
        """The leaves of each worker's operator states, after the last step."""
        if self.held_by is not None:
            self.held_by.give_back(self.local_states, self.local_op_states)
        return self.local_op_states

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
        self.local_states, self.local_op_states = states, op_states

    def change_members(self, present: Sequence[int], joined: Sequence[int]) -> None:
        """Change which workers of this process are members, from the next step on.

        Args:
          present, joined: local indices of all members, and of new ones. A new worker copies replicated leaves from a
            member that is not new, and starts with the initial values of local leaves.
        """
        for local_index in joined:
            self._reset(local_index, iter(self._replicated()))
        self.present = list(present)

    def _reset(self, local_index: int, values: Iterator[Any]) -> None:
        """Set a worker's replicated leaves to `values`, and its local leaves to their initial values.

        Args:
          values: in the order of `_replicated`. Copied, except the worker's own arrays.
        """
        plan, device = self._plan, self._world.devices[local_index]

        def placed(old: jax.Array) -> jax.Array:
            value = next(values)
            return value if value is old else copied(value, device)

        self.states[local_index] = [
            copied(self._initial[i], device) if i in plan.local_state else placed(old)
            for i, old in enumerate(self.states[local_index])
        ]
        self.op_states[local_index] = [
            [
                placed(old) if op_state.scope == Scope.ALL else copied(a, device)
                for a, old in zip(op_state.init, olds, strict=True)
            ]
            for op_state, olds in zip(plan.op_states, self.op_states[local_index], strict=True)
        ]

    def set_op_state(self, number: int, value: np.ndarray) -> None:
        """Set a replicated operator state of one leaf, on all workers."""
        for op_states, device in zip(self.op_states, self._world.devices, strict=True):
            op_states[number] = [copied(value, device)]

    def op_state(self, number: int) -> np.ndarray:
        """Return the value of a replicated operator state of one leaf. Waits for the last step."""
        return np.asarray(self.op_states[self.some_present][number][0])

    # --- transfer to joining processes --------------------------------------------------------------------------------

    def _replicated(self) -> list[jax.Array]:
        """Return the replicated leaves, of the state and then of operator states."""
        own = self.some_present
        state = [leaf for i, leaf in enumerate(self.states[own]) if i not in self._plan.local_state]
        op_states = zip(self._plan.op_states, self.op_states[own], strict=True)
        return [*state, *(a for op_state, values in op_states if op_state.scope == Scope.ALL for a in values)]

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
            self._reset(local_index, iter(values))


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
