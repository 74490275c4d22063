"""State and operator states of the workers of one process, from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from adaptive.base.local_mesh import DeviceParts
from adaptive.base.revision import Revision
from adaptive.base.values.arrays import is_key, numbers_of
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Plan

from .placement import Placement
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
      placements: where each worker of this process computes.

    Attributes:
      present: local indices of the workers that are members.
      places: the places of a worker's values, by address: first the state and operator states that a step replaces, in
        the order of the final segment's results, then the leaves of the state that no step changes.
      replaced: the number of the first.
      values: the values of each worker by place, by local index. Those after `places` belong to the step that runs.
        State and operator states are up to date unless `held_by` has them; `states` and `op_states` always are.
      held_by: may hold the state in another form between its own steps.
      committed: one result of the last step's final segment per worker. When they are ready, the step's receive buffers
        may be overwritten.
      revision: incremented when the members change.
    """

    def __init__(self, plan: Plan, state: list[Any], placements: Sequence[Placement], revision: Revision | None = None):
        self._placements, self.revision = placements, revision or Revision()
        of_state = [("state", i, 0) for i in range(len(state))]
        inits = {("op_state", k, n): value for k, s in enumerate(plan.op_states) for n, value in enumerate(s.init)}
        # Of what may differ between workers.
        self._initial = {a: self._copied(state[a[1]], a, 0) for a in of_state if a[1] in plan.local_state}
        self._initial |= {a: value for a, value in inits.items() if plan.op_states[a[1]].scope != Scope.ALL}
        replaced = [a for a in final_results(plan) if a[0] in ("state", "op_state")]
        self.replaced = len(replaced)
        self.places: dict[Address, int] = {a: n for n, a in enumerate(dict.fromkeys((*replaced, *of_state)))}
        self.values: list[list[Any]] = [[None] * len(self.places) for _ in placements]
        for address in (*of_state, *inits):
            leaf = inits[address] if address in inits else state.pop(0)
            copies = jax.block_until_ready([self._copied(leaf, address, i) for i in range(len(placements))])
            for values, copy in zip(self.values, copies, strict=True):
                values[self.places[address]] = copy
            del leaf, copies, copy
        self._of_state = [self.places[address] for address in of_state]
        self._of_op_states = [
            [self.places["op_state", k, leaf] for leaf in range(len(s.init))] for k, s in enumerate(plan.op_states)
        ]
        # Of replicated leaves, in this order.
        self._shared = {a: self.places[a] for a in (*of_state, *inits) if a not in self._initial}
        self.held_by: FusedStep | None = None
        self.present = list(range(len(placements)))
        self.committed: list[jax.Array] = []

    def _copied(self, value: Any, address: Address, local_index: int) -> jax.Array:
        return copied(value, self._placements[local_index].sharding(address, np.shape(value)))

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
        return self._initial["state", i, 0]

    def replace(self, states: Sequence[Sequence[Any]], op_states: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Continue from another state of this process's workers, on the host or any device.

        Raises:
          JaxRuntimeError: a leaf was not copied, for example because memory ran out. Part of the old state is lost.
        """
        if self.held_by is not None:
            self.held_by.forget()
        self.committed = jax.block_until_ready(self.committed)[:0]
        for i, (state, of_worker) in enumerate(zip(states, op_states, strict=True)):
            addressed = [(("state", n, 0), leaf) for n, leaf in enumerate(state)]
            addressed += [(("op_state", k, n), leaf) for k, op in enumerate(of_worker) for n, leaf in enumerate(op)]
            for address, leaf in addressed:
                self._put(i, address, leaf)

    def _put(self, local_index: int, address: Address, value: Any) -> None:
        """Replace a value of a worker by a copy of an array, or of what a function returns. Frees the old one first, so
        that a device never holds two states.
        """
        values, place = self.values[local_index], self.places[address]
        values[place] = None
        try:
            new = value() if callable(value) else value
            values[place] = jax.block_until_ready(self._copied(new, address, local_index))
        except jax.errors.JaxRuntimeError as error:
            error.add_note("Part of the old state has been freed: restore a checkpoint before the next step.")
            raise

    def change_members(self, present: Sequence[int], joined: Sequence[int]) -> None:
        """Change which workers of this process are members: local indices of all, and of new ones. A new one copies
        replicated leaves from another member, and starts with the initial values of local leaves.
        """
        for local_index in joined:
            self._reset(local_index, self._replicated())
        self.present = list(present)
        self.revision.increment()

    def _reset(self, local_index: int, replicated: Sequence[Any]) -> None:
        """Set a worker's replicated leaves (arrays, or functions that return them) and reset its local leaves."""
        values = self.fetch()[local_index]
        for (address, place), value in zip(self._shared.items(), replicated, strict=True):
            if value is not values[place]:
                self._put(local_index, address, value)
        for address, initial in self._initial.items():
            self._put(local_index, address, initial)

    def set_op_state(self, number: int, value: np.ndarray) -> None:
        """Set a replicated operator state of one leaf, on all workers."""
        (place,) = self._of_op_states[number]
        for i, values in enumerate(self.fetch()):
            values[place] = self._copied(value, ("op_state", number, 0), i)

    def op_state(self, number: int) -> np.ndarray:
        """Return the value of a replicated operator state of one leaf. Waits for the last step."""
        (place,) = self._of_op_states[number]
        return np.asarray(self.fetch()[self.some_present][place])

    # --- transfer to joining processes --------------------------------------------------------------------------------

    def _replicated(self) -> list[jax.Array]:
        """Return the replicated leaves, of the state and then of operator states."""
        values = self.fetch()[self.some_present]
        return [values[place] for place in self._shared.values()]

    def export(self) -> list[np.ndarray]:
        """Return the replicated leaves, or the parts of sharded ones, as contiguous arrays, for `adopt` on a joining
        process.
        """
        leaves = [(leaf, _shards_of(leaf)) for leaf in self._replicated()]
        parts = [part for leaf, shards in leaves for part in ([leaf] if shards is None else shards.of(leaf))]
        return [np.asarray(numbers_of(part), order="C") for part in parts]

    def receive_buffers(self) -> list[np.ndarray]:
        """Return receive buffers for the arrays of `export`."""
        return list(map(np.empty_like, self.export()))

    def adopt(self, arrays: Sequence[np.ndarray]) -> None:
        """Set the replicated leaves of this process's workers to another process's `export`, and reset local leaves."""
        rest = iter(arrays)
        values = [_as_leaf(rest, leaf) for leaf in self._replicated()]
        for local_index in range(len(self._placements)):
            self._reset(local_index, values)


def _shards_of(leaf: jax.Array) -> DeviceParts | None:
    """Return what a leaf consists of if it is sharded."""
    return None if leaf.is_fully_replicated or is_key(leaf) else DeviceParts(leaf.shape, leaf.sharding)


def _as_leaf(arrays: Iterator[np.ndarray], leaf: jax.Array) -> Any:
    """Return received arrays as a leaf that is like another one; a function that returns it, if it is sharded."""
    shards = _shards_of(leaf)
    if shards is not None:
        parts = shards.by_device(list(islice(arrays, len(shards.shapes))))
        return lambda: shards.joined(jax.device_put(parts, shards.devices))
    array = next(arrays)
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return array


def copied(value: Any, to: jax.Device | Sharding) -> jax.Array:
    """Copy an array to new memory on a device, or over a mesh. There `device_put` shares memory even with
    `may_alias=False`, between devices and with the array, so each part is copied; and so is a numpy array.
    """
    if isinstance(to, NamedSharding):
        return _copied_over(value, to)
    if isinstance(value, jax.Array) and len(value.devices()) > 1 and value.is_fully_replicated:
        value = value.addressable_data(0)
    return jax.device_put(np.array(value) if isinstance(value, np.ndarray) else value, to, may_alias=False)


def _copied_over(value: Any, to: NamedSharding) -> jax.Array:
    if is_key(value):
        numbers = _copied_over(jax.random.key_data(value), to)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(value))
    shape, on = np.shape(value), to.addressable_devices_indices_map(np.shape(value))
    if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(to, value.ndim):
        own = {shard.device: shard.data for shard in value.addressable_shards}
        parts: list[Any] = [own[device] for device in on]
    else:
        whole = np.asarray(value.addressable_data(0) if getattr(value, "is_fully_replicated", False) else value)
        parts = [np.array(whole[index]) for index in on.values()]
    return jax.make_array_from_single_device_arrays(shape, to, jax.device_put(parts, list(on), may_alias=False))
