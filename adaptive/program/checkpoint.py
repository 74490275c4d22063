"""Checkpoints: the state of a program between two steps as one pytree of host arrays and numbers, and back.

Replicated values are saved once. Values per worker (local state, and operator states of local values) have a leading
axis of workers. Any library that stores pytrees can store a checkpoint: orbax, or pickle.

A restore first *parses* the checkpoint: each leaf is found by its name and must have this program's dtype and shape,
and each number must be valid. Only then is the program changed, so a restore never fails half way.

Writing and parsing are in one file, because they share the form of each field.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.arrays import NotAnArrayError, check_not_sharded, is_key, numbers_of
from adaptive.base.errors import AdaptiveError, CheckpointError, DriverError
from adaptive.base.torch_tensors import is_tensor
from adaptive.base.tree_paths import Leaf, Name, by_name
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.build_agreement import digest_of_tree
from adaptive.control.hooks import Hooks
from adaptive.control.membership import Membership
from adaptive.control.split import check_shares, equal
from adaptive.data.stream import Stream
from adaptive.graph.flow import Scope
from adaptive.operators.hyperparameters import name_of
from adaptive.runtime.engine import Engine
from adaptive.runtime.worker_state import copied

Checkpoint = dict[str, Any]
VERSION = 1
_FIELDS = (
    *("version", "state", "slots", "local", "hooks", "step", "cursor"),
    *("batch_sizes", "shares", "members", "workers", "seed", "examples"),
)
_MOST = 2**63 - 1
_HALF = 6  # digits of a run's id


# --- writing ----------------------------------------------------------------------------------------------------------


def save(
    engine: Engine,
    hooks: Hooks,
    sizes: BatchSizes,
    membership: Membership,
    stream: Stream,
    *,
    step: int,
    run_id: str,
    like: Any,
    copy: Callable[[Any], Any] | None = None,
) -> Checkpoint:
    """Return a checkpoint. Replicated. Communicates if anything is local, so all processes call it.

    Args:
      run_id: the id of the run, which logs contain too.
      like: the program's state, as shapes.
      copy: copies an array from the device to the host; by default to new memory.
    """
    plan, copy = engine.plan, copy or _host
    about = f"a checkpoint of {engine.name} after step {step}"
    hooks.catch_up(sizes)
    wanted_state, wanted_op_states = _of_state(engine, like), _of_op_states(engine)
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
        "local": {"state": _which_local(wanted_state), "slots": _which_local(wanted_op_states)},
        "hooks": hooks_to_keep(hooks),
        "step": step,
        "run_id": [int(run_id[:_HALF], 16), int(run_id[_HALF:], 16)],  # some libraries store no text, or only int32
        "cursor": stream.cursors[0] if len(stream.shard_ranges) == 1 else list(stream.cursors),
        "batch_sizes": list(sizes.target),
        "global_batch": sizes.wanted,
        "shares": list(sizes.shares),
        "members": list(sizes.members),
        "workers": membership.asked or 0,
        "seed": stream.seed,
        "examples": [shard.length for shard in stream.shard_ranges],
        **({"place": place} if (place := stream.place()) else {}),
    }


def has_local(engine: Engine) -> bool:
    """Return whether any state is local to a worker, so that a checkpoint communicates. Replicated."""
    return bool(engine.plan.local_state) or any(op_state.scope != Scope.ALL for op_state in engine.plan.op_states)


class _Wanted(NamedTuple):
    """The expected form of a leaf in checkpoints of this program."""

    label: str
    shape: tuple[int, ...]  # as stored: local leaves have a row per worker
    dtype: np.dtype
    local: bool = False


def _of_state(engine: Engine, like: Any, rows: int | None = None) -> dict[Name, _Wanted]:
    n, local = rows or engine.world.capacity, engine.plan.local_state
    leaves = enumerate(by_name(like, "state").items())
    return {name: _wanted(leaf, n if i in local else None) for i, (name, leaf) in leaves}


def _of_op_states(engine: Engine, rows: int | None = None) -> dict[Name, _Wanted]:
    op_states, n = engine.plan.op_states, rows or engine.world.capacity
    counts = {op_state.name: None if op_state.scope == Scope.ALL else n for op_state in op_states}
    leaves = by_name({op_state.name: list(op_state.init) for op_state in op_states}, "slots")
    ordered = [(s.name, str(k)) for s in op_states for k in range(len(s.init))]  # a dict's leaves are sorted
    return {name: _wanted(leaves[name], counts[name[0]]) for name in ordered}


def _wanted(leaf: Leaf, rows: int | None = None) -> _Wanted:
    value = leaf.value
    if is_key(value):
        value = jax.eval_shape(jax.random.key_data, value)
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    shape = tuple(np.shape(value))
    return _Wanted(leaf.label, shape if rows is None else (rows, *shape), np.dtype(dtype), rows is not None)


def _which_local(wanted: Mapping[Name, _Wanted]) -> list[int]:
    """Return the indices of local leaves, in the order of their names."""
    return [number for number, name in enumerate(sorted(wanted)) if wanted[name].local]


def hooks_to_keep(hooks: Hooks) -> dict[str, Any]:
    """Return the hooks' states, by the hooks' names.

    Raises:
      DriverError: a state's structure, shapes or dtypes differ from the hook's initial state, so it could not be
        restored.
    """
    each = zip(hooks.names, hooks.hooks, hooks.states, hooks.first_states, strict=True)
    for name, hook, state, first in each:
        found = by_name(state, "state")
        wanted = {path: _wanted(leaf) for path, leaf in by_name(first, "state").items()}
        wrong = _not_alike(found, wanted) or next(filter(None, (_unfit(found[p], w) for p, w in wanted.items())), None)
        if wrong:
            raise DriverError(
                f"the state of hook {name!r} differs in form from its initial state: {wrong}. It could not be "
                f"restored from a checkpoint. Make init of {hook.name} return a state with the structure, shapes and "
                "dtypes of later states."
            )
    return jax.tree.map(_plain, dict(zip(hooks.names, hooks.states, strict=True)))


def _host(leaf: Any) -> np.ndarray:
    return np.array(numbers_of(leaf))


def _plain(leaf: Any) -> Any:
    """Return a hook's state as plain arrays, without empty ones, which some libraries cannot store."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return _host(leaf) if np.size(leaf) else None
    return leaf


def _of_all(engine: Engine, own: Sequence[jax.Array], first: Any, about: str) -> np.ndarray:
    """Return the values of all workers, stacked; the initial value for worker slots of no process."""
    world = engine.world
    told = {slot: _host(leaf) for slot, leaf in zip(world.workers, own, strict=True)}
    everyone = [pickle.loads(theirs) for theirs in world.all_gather_bytes(pickle.dumps(told), about)]
    rows = {slot: row for process in everyone for slot, row in process.items()}
    return np.stack([rows[slot] if slot in rows else _host(first) for slot in range(world.capacity)])


# --- parsing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parsed:
    """A checkpoint that was checked, and that this program can restore.

    Attributes:
      run_id: the id of the run; "" in a checkpoint of an earlier version.
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
        return {
            "step": str(self.step),
            "run_id": self.run_id,
            "cursor": ", ".join(map(str, self.cursors)),
            "place": self.place,
            "batch sizes": str(self.batch_sizes),
            "shares": str(self.shares),
            "global batch": str(self.wanted),
            "members": str(self.members),
            "workers": str(self.workers),
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
    batch_sizes = [_whole(n, "batch_sizes", least=0) for n in _numbers(fields["batch_sizes"], "batch_sizes")]
    # Checkpoints of earlier versions have no requested global batch.
    wanted = _whole(fields.get("global_batch", sum(batch_sizes)), "global_batch", least=1)
    before, here = len(batch_sizes), engine.world.capacity
    wanted_state, wanted_op_states = _of_state(engine, like, before), _of_op_states(engine, before)
    if before != here and has_local(engine) and not other_workers_ok:
        raise CheckpointError(
            f"the checkpoint has local state of {before} workers; this world has {here}. Start {before} workers. Or "
            "let workers that are missing count as lost, and further ones as joining, with the initial local state:\n"
            "    program.restore(…, other_workers_ok=True)"
        )
    try:
        shares = tuple(check_shares(_numbers(fields["shares"], "shares"), before).tolist())
        if before == here:
            split, members = _fitting(batch_sizes, shares, sizes), _members(fields, here)
        else:
            shares, members = tuple(float(slot in sizes.members) for slot in range(here)), sizes.members
            bounds = sizes.bounds(shares)
            clipped = wanted != sum(batch_sizes)  # it was clipped there, so it may be clipped to another size here
            split = equal(bounds.nearest(wanted) if clipped else sizes.check_global(wanted, shares), bounds)
    except (AdaptiveError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's sizes cannot be used here: {error}") from error
    state, op_states = _arrays(fields, "state", wanted_state), _arrays(fields, "slots", wanted_op_states)
    if before != here:
        whose = _successors(_members(fields, before), members)
        local = engine.plan.local_state
        first = [engine.workers.initial(i) if i in local else None for i in range(len(state))]
        _seat(state, wanted_state, first, whose, here)
        _seat(op_states, wanted_op_states, [x for s in engine.plan.op_states for x in s.init], whose, here)
    return Parsed(
        step=_whole(fields["step"], "step", most=2**31 - 1),  # drivers read it as int32
        run_id=_run_id(fields),
        cursors=cursors,
        place=_text(fields.get("place", ""), "place"),
        batch_sizes=split,
        shares=shares,
        wanted=wanted,
        members=members,
        workers=(_whole(fields["workers"], "workers") or None) if before == here else None,
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
    wanted: Mapping[Name, _Wanted],
    initial: Sequence[Any],
    whose: Mapping[int, int],
    capacity: int,
) -> None:
    """Give local arrays a row for each worker slot of this world, in place: a former worker's, or the initial value."""
    for want, first in zip(wanted.values(), initial, strict=True):
        if want.local:
            old, new = arrays[want.label], np.stack([_host(first)] * capacity)
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
                    "earlier one, or give the hyperparameter another value in the checkpoint."
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
    return copied(_like(value, like) if is_key(like) else np.asarray(value), device)


def _fields(checkpoint: Any) -> Mapping[str, Any]:
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(
            f"restore takes what program.checkpoint() returned, a dict; got a {type(checkpoint).__name__}."
        )
    missing = [repr(name) for name in _FIELDS if name not in checkpoint]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {', '.join(missing)}. It is damaged, or was not made by program.checkpoint() of "
            "this version."
        )
    version = _whole(checkpoint["version"], "version")
    if version != VERSION:
        raise CheckpointError(f"the checkpoint is of version {version}; this library reads version {VERSION}.")
    return checkpoint


def _check_data(fields: Mapping[str, Any], stream: Stream) -> tuple[int, ...]:
    """Check that the data are the checkpoint's, as far as that can be seen. Returns the cursors."""
    cursors = tuple(_whole(c, "cursor") for c in _numbers(fields["cursor"], "cursor"))
    ranges = len(stream.shard_ranges)
    if len(cursors) != ranges:
        raise CheckpointError(
            f"the checkpoint was made on {_data_of(len(cursors))}; this program has {_data_of(ranges)}."
        )
    examples = [_whole(n, "examples") for n in _numbers(fields["examples"], "examples")]
    here = [shard.length for shard in stream.shard_ranges]
    if examples != here:
        raise CheckpointError(
            f"the checkpoint was made on {' + '.join(map(str, examples))} examples; this program has "
            f"{' + '.join(map(str, here))}, so its position in the data is not valid. To continue with other data, "
            "build a program with its state:  ad.Program(driver, state, data, …)"
        )
    seed = _whole(fields["seed"], "seed", least=None, most=None)
    if seed != stream.seed:
        raise CheckpointError(
            f"the checkpoint was made with seed={seed}; this program has seed={stream.seed}, so the order of its data "
            f"and its random numbers differ. Build it with  ad.Program(…, seed={seed})"
        )
    return cursors


def _data_of(shards: int) -> str:
    return "one data set for all workers" if shards == 1 else f"{shards} shards, one for each worker"


def _run_id(fields: Mapping[str, Any]) -> str:
    """Return the run's id; "" in a checkpoint of an earlier version."""
    if "run_id" not in fields:
        return ""
    halves = [_whole(half, "run_id", most=16**_HALF - 1) for half in _numbers(fields["run_id"], "run_id")]
    return "".join(f"{half:0{_HALF}x}" for half in halves)


def _members(fields: Mapping[str, Any], slots: int) -> tuple[int, ...]:
    """Return the members at the checkpoint."""
    members = tuple(_whole(slot, "members", most=slots - 1) for slot in _numbers(fields["members"], "members"))
    if not members or list(members) != sorted(set(members)):
        raise CheckpointError(f"the checkpoint's members are no worker slots: {members}.")
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
        arrays = _arrays(fields, "hooks", {name: _wanted(leaf) for name, leaf in likes.items()})
    except CheckpointError as error:
        raise CheckpointError(
            f'{error}\nTo reset the hooks:  checkpoint["hooks"] = program.checkpoint()["hooks"]  '
            "(for a checkpoint on disk:  checkpoint = ad.Checkpoints(directory).read())"
        ) from None
    leaves = [_like(array, leaf.value) for array, leaf in zip(arrays.values(), likes.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(first), leaves)


# --- leaves and numbers -----------------------------------------------------------------------------------------------


def _arrays(fields: Mapping[str, Any], field: str, wanted: Mapping[Name, _Wanted]) -> dict[str, np.ndarray]:
    """Return the arrays of a field by label, matched by name, after checking dtypes and shapes."""
    found = by_name(fields[field], field)
    others = _not_alike(found, wanted)
    if others:
        raise CheckpointError(f"the checkpoint is of another program: {others}.")
    _check_local(fields, field, wanted)
    for name, want in wanted.items():
        wrong = name in found and _unfit(found[name], want)
        if wrong:
            raise CheckpointError(f"the checkpoint's {wrong}.")
    return {
        want.label: _host(found[name].value) if name in found else np.zeros(want.shape, want.dtype)
        for name, want in wanted.items()
    }


def _not_alike(found: Mapping[Name, Leaf], wanted: Mapping[Name, _Wanted]) -> str:
    """Return a description of the leaves that are in only one of two trees. Empty leaves may be missing."""
    missing = [w.label for name, w in wanted.items() if name not in found and np.prod(w.shape)]
    unknown = [leaf.label for name, leaf in found.items() if name not in wanted]
    texts = [f"it has no {_listed(missing)}"] * bool(missing) + [f"it has {_listed(unknown)} besides"] * bool(unknown)
    return ", and ".join(texts)


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + f" and {len(labels) - 4} more" * (len(labels) > 4)


def _unfit(leaf: Leaf, want: _Wanted) -> str:
    """Return why an array does not fit, or "". Arrays are not cast implicitly."""
    try:
        check_not_sharded(leaf.value)
    except NotAnArrayError as error:
        return f"{leaf.label} {error}"
    if is_tensor(leaf.value):
        return f"{leaf.label} is a tensor of PyTorch. Give x.numpy()"
    found = _wanted(leaf)
    if found.shape != want.shape:
        return f"{leaf.label} has shape {found.shape} for one of shape {want.shape}"
    if found.dtype == want.dtype:
        return ""
    text = f"{leaf.label} is {found.dtype} for {want.dtype}"
    kinds = "fiub"  # complex numbers, text and objects cannot be converted
    return f"{text}. To convert it on purpose:  .astype({want.dtype.name!r})" if found.dtype.kind in kinds else text


def _check_local(fields: Mapping[str, Any], field: str, wanted: Mapping[Name, _Wanted]) -> None:
    if field not in ("state", "slots"):
        return
    local = fields["local"]
    if not isinstance(local, Mapping) or field not in local:
        raise CheckpointError(f"the checkpoint does not say which leaves of its {field} are local. It is damaged.")
    names = sorted(wanted)
    numbers = {_whole(n, "local") for n in _numbers(local[field], "local")}
    odd = numbers ^ set(_which_local(wanted))
    if odd:
        number = min(odd)
        label = wanted[names[number]].label if number < len(names) else field
        there, here = ("local", "not") if number in numbers else ("not local", "it is")
        raise CheckpointError(
            f"the checkpoint's {label} is {there}, and {here} in this program. Local leaves have a value for each "
            "worker."
        )


def _like(array: np.ndarray, leaf: Any) -> Any:
    """Return an array as a value of the leaf's type: a number, or an array."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jnp.asarray(array)
    if isinstance(leaf, np.generic):
        return array[()]
    return array if isinstance(leaf, np.ndarray) else array.item()


def _numbers(value: Any, what: str) -> list[Any]:
    """Return a list of numbers from a number, list, tuple, array, or dict with the keys "0", "1", …"""
    leaves = {name: leaf.value for name, leaf in by_name(value, what).items()}
    if () in leaves and np.ndim(leaves[()]) <= 1:
        return list(_host(leaves[()])) if np.ndim(leaves[()]) else [leaves[()]]
    if leaves.keys() != {(str(k),) for k in range(len(leaves))}:
        raise CheckpointError(f"the checkpoint's {what} is not a list of numbers: {value!r}.")
    return [leaves[str(k),] for k in range(len(leaves))]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"the checkpoint's {what} is not text: {value!r}.")
    return value


def _whole(value: Any, what: str, *, least: int | None = 0, most: int | None = _MOST) -> int:
    array = np.asarray(value)
    whole = isinstance(value, int) or (array.ndim == 0 and array.dtype.kind in "iu")
    if not whole or isinstance(value, bool):
        raise CheckpointError(f"the checkpoint's {what} is not a whole number: {value!r}.")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise CheckpointError(f"the checkpoint's {what} cannot be {number}.")
    return number
