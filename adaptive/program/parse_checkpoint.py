"""Read checkpoints: check every leaf and number of a checkpoint for a program, and place the arrays on its devices.

Each leaf is found by its name and must have this program's dtype and shape, and each number must be valid. Only then is
the program changed, so a restore never fails half way.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adaptive.base.arrays import is_key
from adaptive.base.errors import AdaptiveError, CheckpointError
from adaptive.base.split import check_shares, equal
from adaptive.base.tree_paths import Name, by_name
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.build_agreement import digest_of_tree
from adaptive.control.hooks import Hooks
from adaptive.data.stream import Stream
from adaptive.graph.flow import Scope
from adaptive.operators.hyperparameters import name_of
from adaptive.runtime.engine import Engine
from adaptive.runtime.worker_state import copied

from .checkpoint_form import (
    FIELDS,
    HALF_OF_RUN_ID,
    VERSION,
    LeafForm,
    as_leaf,
    form_of,
    forms_of_op_states,
    forms_of_state,
    has_local,
    host_copy,
    matched_arrays,
    number_list,
    text,
    whole_number,
)


@dataclass(frozen=True)
class Parsed:
    """A checkpoint that was checked, and that this program can restore.

    Attributes:
      run_id: the id of the run.
      place: the position of an iterator; "" for data with an index.
      batch_sizes, shares: for the workers of this world.
      wanted: the requested global batch, which may have been too large for the workers at the checkpoint.
      members: the worker slots occupied at the checkpoint. Current workers in other slots join after the restore;
        members without a current worker count as having left.
      workers: the requested number of workers; `None` if none was requested, or if the number of worker slots differs.
      state, op_states: arrays by their labels, in the order of the program; with a row per worker if not replicated.
      hooks: the hooks' states, in the hooks' own structure.
    """

    step: int
    run_id: str
    cursors: tuple[int, ...]
    place: str
    batch_sizes: tuple[int, ...]
    shares: tuple[float, ...]
    wanted: int
    members: tuple[int, ...]
    workers: int | None
    state: dict[str, np.ndarray]
    op_states: dict[str, np.ndarray]
    hooks: dict[str, Any]

    def digests(self) -> dict[str, str]:
        """Return digests of all that must be equal on all processes, by name for errors."""
        leaves = {**self.state, **self.op_states}
        # Not the place: the state of this process's iterator can hold an address.
        numbers = "step", "run_id", "cursors", "batch_sizes", "shares", "wanted", "members", "workers"
        return {
            **{name.replace("_", " "): str(getattr(self, name)) for name in numbers},
            **{label: digest_of_tree(leaf) for label, leaf in leaves.items()},
            **{leaf.label: digest_of_tree(leaf.value) for leaf in by_name(self.hooks, "hooks").values()},
        }


def parse(
    checkpoint: Any,
    engine: Engine,
    hooks: Hooks,
    sizes: BatchSizes,
    stream: Stream,
    *,
    like: Any,
    other_workers_ok: bool = False,
) -> Parsed:
    """Read a checkpoint for this program. Changes nothing.

    If the number of workers differs from that of the checkpoint, batches start equal, and hooks start with their
    initial states, because they may hold measurements of other workers.

    Args:
      like: the program's state, as shapes.
      other_workers_ok: what local state does then: it is that of the workers that are here too, and the initial value
        for others. Otherwise it raises an error.

    Raises:
      CheckpointError: it is damaged, or belongs to another program.
    """
    fields = _fields(checkpoint)
    cursors = _check_data(fields, stream)
    batch_sizes = [whole_number(n, "batch_sizes", least=0) for n in number_list(fields["batch_sizes"], "batch_sizes")]
    wanted = whole_number(fields["global_batch"], "global_batch", least=1)
    before, here = len(batch_sizes), engine.world.capacity
    wanted_state, wanted_op_states = forms_of_state(engine, like, before), forms_of_op_states(engine, before)
    if before != here and has_local(engine) and not other_workers_ok:
        raise CheckpointError(
            f"the checkpoint has local state of {before} workers; this world has {here}. Start {before} workers. Or "
            "let workers that are missing count as lost, and further ones as joining, with the initial local state:\n"
            "    program.restore(…, other_workers_ok=True)"
        )
    try:
        shares = tuple(check_shares(number_list(fields["shares"], "shares"), before).tolist())
        if before == here:
            split, members = _fitting(batch_sizes, shares, sizes), _members(fields, here)
        else:
            shares, members = tuple(float(slot in sizes.members) for slot in range(here)), sizes.members
            bounds = sizes.bounds(shares)
            clipped = wanted != sum(batch_sizes)  # it was clipped there, so it may be clipped to another size here
            split = equal(bounds.nearest(wanted) if clipped else sizes.check_global(wanted, shares), bounds)
    except (AdaptiveError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's sizes cannot be used here: {error}") from error
    state, op_states = matched_arrays(fields, "state", wanted_state), matched_arrays(fields, "slots", wanted_op_states)
    if before != here:
        whose = _successors(_members(fields, before), members)
        local = engine.plan.local_state
        first = [engine.workers.initial(i) if i in local else None for i in range(len(state))]
        _seat(state, wanted_state, first, whose, here)
        _seat(op_states, wanted_op_states, [x for s in engine.plan.op_states for x in s.init], whose, here)
    return Parsed(
        step=whole_number(fields["step"], "step", most=2**31 - 1),  # drivers read it as int32
        run_id=_run_id(fields),
        cursors=cursors,
        place=text(fields.get("place", ""), "place"),
        batch_sizes=split,
        shares=shares,
        wanted=wanted,
        members=members,
        workers=(whole_number(fields["workers"], "workers") or None) if before == here else None,
        state=state,
        op_states=_checked_hyperparameters(op_states, engine),
        hooks=restored_hooks(fields, hooks) if before == here else dict(zip(hooks.names, hooks.begun(), strict=True)),
    )


def _successors(before: Sequence[int], here: Sequence[int]) -> dict[int, int]:
    """Return for each worker slot whose local state it gets: its own, or that of a worker whose slot is not occupied
    here. Slots without any are left out.
    """
    rest = iter([slot for slot in before if slot not in here])
    found = {slot: slot if slot in before else next(rest, None) for slot in here}
    return {slot: old for slot, old in found.items() if old is not None}


def _seat(
    arrays: dict[str, np.ndarray],
    wanted: Mapping[Name, LeafForm],
    initial: Sequence[Any],
    whose: Mapping[int, int],
    capacity: int,
) -> None:
    """Give local arrays a row for each worker slot of this world, in place: a former worker's, or the initial value."""
    for want, first in zip(wanted.values(), initial, strict=True):
        if want.local:
            old, new = arrays[want.label], np.stack([host_copy(first)] * capacity)
            for slot, before in whose.items():
                new[slot] = old[before]
            arrays[want.label] = new


def _checked_hyperparameters(op_states: dict[str, np.ndarray], engine: Engine) -> dict[str, np.ndarray]:
    """Return the operator states. Raises a CheckpointError if a hyperparameter is not finite."""
    leaves = iter(op_states.values())
    for op_state in engine.plan.op_states:
        for value in itertools.islice(leaves, len(op_state.init)):
            name = name_of(op_state.name)
            if name is not None and value.dtype != np.bool_ and not np.isfinite(value).all():
                raise CheckpointError(
                    f"the checkpoint's hyperparameter {name!r} is {value.tolist()}, which is not finite. Restore an "
                    "earlier one, or change the value in the checkpoint."
                )
    return op_states


def placed(parsed: Parsed, engine: Engine) -> tuple[list[list[jax.Array]], list[list[list[jax.Array]]]]:
    """Return state and operator states on the device of each worker of this process."""
    states, op_states, plan = [], [], engine.plan
    for worker, device, old, old_op_states in zip(
        engine.world.workers, engine.world.devices, engine.states, engine.op_states, strict=True
    ):
        mine = [leaf[worker] if i in plan.local_state else leaf for i, leaf in enumerate(parsed.state.values())]
        states.append([_placed(leaf, device, like) for leaf, like in zip(mine, old, strict=True)])
        leaves = iter(parsed.op_states.values())
        op_states.append(
            [
                [_placed(next(leaves)[() if op_state.scope == Scope.ALL else worker], device, like) for like in likes]
                for op_state, likes in zip(plan.op_states, old_op_states, strict=True)
            ]
        )
    return states, op_states


def _placed(value: np.ndarray, device: jax.Device, like: jax.Array) -> jax.Array:
    return copied(as_leaf(value, like) if is_key(like) else np.asarray(value), device)


def _fields(checkpoint: Any) -> Mapping[str, Any]:
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(
            f"restore takes what program.checkpoint() returned, a dict; got a {type(checkpoint).__name__}."
        )
    missing = [repr(name) for name in FIELDS if name not in checkpoint]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {', '.join(missing)}. It is damaged, or was not made by program.checkpoint() of "
            "this version."
        )
    version = whole_number(checkpoint["version"], "version")
    if version != VERSION:
        raise CheckpointError(f"the checkpoint is of version {version}; this library reads version {VERSION}.")
    return checkpoint


def _check_data(fields: Mapping[str, Any], stream: Stream) -> tuple[int, ...]:
    """Check that the data are the checkpoint's, as far as that can be seen. Returns the cursors."""
    cursors = tuple(whole_number(c, "cursor") for c in number_list(fields["cursor"], "cursor"))
    ranges = len(stream.shard_ranges)
    if len(cursors) != ranges:
        raise CheckpointError(
            f"the checkpoint was made on {_data_of(len(cursors))}; this program has {_data_of(ranges)}."
        )
    examples = [whole_number(n, "examples") for n in number_list(fields["examples"], "examples")]
    here = [shard.length for shard in stream.shard_ranges]
    if examples != here:
        raise CheckpointError(
            f"the checkpoint was made on {' + '.join(map(str, examples))} examples; this program has "
            f"{' + '.join(map(str, here))}, so its position in the data is not valid. To continue with other data, "
            "build a program with its state:  ad.Program(driver, state, data, …)"
        )
    seed = whole_number(fields["seed"], "seed", least=None, most=None)
    if seed != stream.seed:
        raise CheckpointError(
            f"the checkpoint was made with seed={seed}; this program has seed={stream.seed}, so the order of its data "
            f"and its random numbers differ. Build it with  ad.Program(…, seed={seed})"
        )
    return cursors


def _data_of(shards: int) -> str:
    return "one data set for all workers" if shards == 1 else f"{shards} shards, one for each worker"


def _run_id(fields: Mapping[str, Any]) -> str:
    most = 16**HALF_OF_RUN_ID - 1
    halves = [whole_number(half, "run_id", most=most) for half in number_list(fields["run_id"], "run_id")]
    return "".join(f"{half:0{HALF_OF_RUN_ID}x}" for half in halves)


def _members(fields: Mapping[str, Any], slots: int) -> tuple[int, ...]:
    """Return the members at the checkpoint."""
    members = tuple(whole_number(slot, "members", most=slots - 1) for slot in number_list(fields["members"], "members"))
    if not members or list(members) != sorted(set(members)):
        raise CheckpointError(f"the checkpoint's members are not worker slots: {members}.")
    return members


def _fitting(batch_sizes: Sequence[int], shares: Sequence[float], sizes: BatchSizes) -> tuple[int, ...]:
    """Return the checkpoint's batch sizes, unrounded, after checking that workers can have them here."""
    sizes.check_global(sum(batch_sizes), shares)
    limits = sizes.bounds(shares)
    for worker, size in enumerate(batch_sizes):
        lower, upper = limits.lower[worker], limits.upper[worker]
        if not lower <= size <= upper or size % limits.multiple:
            raise CheckpointError(
                f"a batch of {size} examples for worker {worker}, whose limits are {lower} to {upper} "
                f"(max_local_batch), in multiples of {limits.multiple}."
            )
    return tuple(batch_sizes)


def restored_hooks(fields: Mapping[str, Any], hooks: Hooks) -> dict[str, Any]:
    """Return the hooks' states, in the structure of this program's hooks.

    Raises:
      CheckpointError: the checkpoint's hooks have other states.
    """
    first = dict(zip(hooks.names, hooks.first_states, strict=True))
    likes = by_name(first, "hooks")
    try:
        arrays = matched_arrays(fields, "hooks", {name: form_of(leaf) for name, leaf in likes.items()})
    except CheckpointError as error:
        raise CheckpointError(
            f'{error}\nTo reset the hooks:  checkpoint["hooks"] = program.checkpoint()["hooks"]  '
            "(for a checkpoint on disk:  checkpoint = ad.Checkpoints(directory).read())"
        ) from None
    leaves = [as_leaf(array, leaf.value) for array, leaf in zip(arrays.values(), likes.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(first), leaves)
