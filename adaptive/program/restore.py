"""Restoring a program from a checkpoint: parse, compare, replace.

*Parse* checks every leaf and number, and compiles the kernels. *Compare* exchanges digests of the checkpoint with the
other processes. Only then is the program changed, by assignments and by copies to devices, so it does not fail halfway.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.decision import Decision
from adaptive.base.errors import BatchSizeError, CheckpointError, DriverError
from adaptive.base.roster import Roster, broadcast_bytes, with_same_members
from adaptive.base.split import check_shares, split
from adaptive.base.values.arrays import is_key
from adaptive.base.values.tree_paths import Name, by_name
from adaptive.base.world import World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.build_agreement import compare_across_processes, digest_of_tree
from adaptive.control.hooks import Hooks
from adaptive.data.iterators import UNKNOWN_LENGTH
from adaptive.data.stream import Stream
from adaptive.operators.hyperparameters import checked_hyperparameters

from .checkpoint import (
    VERSION,
    ProgramLeaf,
    host_copy,
    leaves_of_hooks,
    leaves_of_program,
    matched,
    snapshot,
)
from .checkpoints import Checkpoints, FoundCheckpoint, NoneThereError, newest_readable
from .parts import ProgramParts
from .run_loop import RunLoop

_SAME_CHECKPOINT = "Restore the same checkpoint on every rank; all may read one file. Nothing has been restored."
_FIELDS = (
    *("version", "state", "slots", "hooks", "step", "run_id", "cursor"),
    *("batch_sizes", "global_batch", "shares", "members", "workers", "seed", "examples"),
)


def restore(p: ProgramParts, loop: RunLoop, checkpoint: Any, *, missing_ok: bool, other_workers_ok: bool) -> None:
    """Restore a program; arguments and errors as of `Program.restore`. Communicates."""
    found: FoundCheckpoint | None = None
    roster, about = Roster.of(p.world), f"restore of {p.name}"
    if isinstance(checkpoint, str | os.PathLike | Checkpoints):
        given = checkpoint if isinstance(checkpoint, Checkpoints) else Checkpoints(checkpoint)
        found = _select(p.world, given.path, missing_ok, about)
        if found is None:
            return
        checkpoint = found.checkpoint
    go_on = prepare(p, loop, checkpoint, other_workers_ok=other_workers_ok)
    digests = _digests(checkpoint) if p.world.processes > 1 else {}
    compare_across_processes(p.world, about, digests, None, _SAME_CHECKPOINT)
    go_on(roster)
    p.digest.restart(p.run.step, digests)
    if p.run.checkpointer is not None:
        p.run.checkpointer.forget()
    if found:
        p.run.directories.add(found.folder.parent)
        p.run.notes += found.notes


def _select(world: World, path: Path, missing_ok: bool, about: str) -> FoundCheckpoint | None:
    """Return the checkpoint that rank 0 selects; `None` if there is none and that is allowed. Communicates."""
    own: FoundCheckpoint | None = None

    def select() -> bytes:
        nonlocal own
        try:
            own = newest_readable(path)
        except NoneThereError:
            if missing_ok:
                return b"null"
            raise
        return json.dumps([own.folder.relative_to(path).as_posix(), own.notes]).encode()

    selected = json.loads(broadcast_bytes(world, select, f"choosing the checkpoint for the {about}"))
    if selected is None:
        return None
    folder = path / selected[0]
    if own is None or own.folder != folder:
        try:
            own = newest_readable(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"rank {world.rank} cannot read {folder}, which rank 0 selected: {error} All ranks read the same "
                "checkpoint: keep it in a directory that all hosts see."
            ) from error
    return own._replace(notes=selected[1])


def _digests(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return all that must be equal on all processes, by name for errors: small arrays as text."""
    fields = {name: value for name, value in checkpoint.items() if name != "place"}  # an iterator's can hold an address
    names = sorted(fields, key=lambda name: name != "step")  # the first difference is in the error
    leaves = {leaf.label: leaf.value for name in names for leaf in by_name(fields[name], name).values()}
    return {label: str(value) if np.size(value) < 9 else digest_of_tree(value) for label, value in leaves.items()}


def prepare(
    p: ProgramParts, loop: RunLoop, checkpoint: Any, *, other_workers_ok: bool = False
) -> Callable[[Roster], None]:
    """Check a checkpoint, and compile its kernels. Changes nothing, and does not communicate. Return a function of the
    current members that continues from it by assignments. Raises a CheckpointError if it is not of this program.

    If the number of workers differs from that of the checkpoint, batches start equal, and hooks start with their
    initial states, because they may hold measurements of other workers.
    """
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(
            f"restore takes what program.checkpoint() returned, a dict; got a {type(checkpoint).__name__}."
        )
    missing = [repr(name) for name in _FIELDS if name not in checkpoint]
    if missing or checkpoint["version"] != VERSION:
        why = f"has no {', '.join(missing)}" if missing else f"is of version {checkpoint['version']}, not {VERSION}"
        raise CheckpointError(
            f"the checkpoint {why}: program.checkpoint() of this version did not make it. "
            "The last commit of adaptive-dataflow that reads version 1 is 990a7dcc."
        )
    try:
        return _prepared(p, loop, checkpoint, other_workers_ok)
    except (CheckpointError, BatchSizeError, TypeError, ValueError) as error:
        reset = '\nTo reset the hooks of  checkpoint = ad.Checkpoints(…).read():  checkpoint["hooks"] = '
        advice = f'{reset}program.checkpoint()["hooks"]' * ("hooks[" in str(error))
        raise CheckpointError(f"the checkpoint cannot be restored: {error}{advice}") from error


def _prepared(
    p: ProgramParts, loop: RunLoop, fields: Mapping[str, Any], other_workers_ok: bool
) -> Callable[[Roster], None]:
    _check_data(fields, p.stream)
    before, here = len(_numbers(fields, "batch_sizes")), p.world.capacity
    same, former = before == here, _numbers(fields, "members")
    if not former or list(former) != sorted(set(former)) or former[-1] >= before:
        raise CheckpointError(f"its members are not worker slots: {former}.")
    if not same and p.plan.has_local and not other_workers_ok:
        raise CheckpointError(
            f"it has local state of {before} workers; this world has {here}. Start {before} workers. Or let workers "
            "that are missing count as lost, and further ones as joining, with the initial local state:\n"
            "    program.restore(…, other_workers_ok=True)"
        )
    (step,), (wanted,), (workers,) = (_numbers(fields, name) for name in ("step", "global_batch", "workers"))
    run_id, cursors = bytes(_numbers(fields, "run_id")).decode(), _numbers(fields, "cursor")
    members = former if same else p.sizes.members
    batch_sizes, shares = _sizes(fields, p.sizes, wanted, here)
    leaves = leaves_of_program(p)
    arrays = matched(fields, ("state", "slots", "hooks") if same else ("state", "slots"), leaves, before)
    if not same:
        _seat(arrays, leaves, former, members, here)
    hooks = states_of_hooks(p.hooks, arrays) if same else p.hooks.begun()
    states, op_states = _by_worker(p, leaves, arrays)
    loop.compile_for(batch_sizes)

    def go_on(roster: Roster) -> None:
        loop.members.restart(members)
        p.engine.workers.replace(states, op_states)
        p.hooks.restart(hooks)
        p.hyperparameters.restart()
        p.sizes.restart(batch_sizes, shares, members, wanted)
        p.membership.restart((workers or None) if same else None, roster, members=len(members))
        p.stream.go_on(cursors, str(fields.get("place", "")))
        p.run.step, p.run.run_id, p.run.restored, p.skipped.in_a_row = step, run_id, True, 0
        p.revision.increment()
        p.run.forget_seconds()
        p.mailboxes.forget()

    return go_on


def _check_data(fields: Mapping[str, Any], stream: Stream) -> None:
    """Check that the data are the checkpoint's, as far as that can be seen."""
    examples, here = _numbers(fields, "examples"), stream.lengths
    if examples != here:
        was, now = (" + ".join("?" if n == UNKNOWN_LENGTH else str(n) for n in each) for each in (examples, here))
        raise CheckpointError(
            f"it was made on {was} examples; this program has {now}"
            + " (?: from_iterator without length=)" * ("?" in was + now)
            + ", so its position in the data is not valid. To continue with other data, build a program with its "
            "state:  ad.Program(driver, state, data, …)"
        )
    if fields["seed"] != stream.seed:
        raise CheckpointError(
            f"it was made with seed={fields['seed']}; this program has seed={stream.seed}, so the order of its data "
            f"and its random numbers differ. Build it with  ad.Program(…, seed={fields['seed']})"
        )


def _sizes(
    fields: Mapping[str, Any], sizes: BatchSizes, wanted: int, here: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return batch sizes and shares: the checkpoint's, if the workers here are as many and can have these sizes."""
    batch_sizes = _numbers(fields, "batch_sizes")
    same = len(batch_sizes) == here
    shares = check_shares(np.asarray(fields["shares"]), here) if same else np.isin(range(here), sizes.members) * 1.0
    limits = sizes.bounds(shares)
    each = zip(limits.lower, batch_sizes, limits.upper, strict=False)
    if not same or not all(low <= size <= most and size % limits.multiple == 0 for low, size, most in each):
        batch_sizes = split(limits.nearest(wanted), shares, limits._replace(quantum=limits.multiple))
    return batch_sizes, tuple(shares.tolist())


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return one or several natural numbers, in the form in which any library returns them."""
    array = np.atleast_1d(np.asarray(fields[name]))
    if array.dtype.kind not in "iu" or (array < 0).any():
        raise CheckpointError(f"its {name} must be whole numbers, not negative; got {fields[name]!r}.")
    return tuple(array.tolist())


def _seat(
    arrays: dict[Name, np.ndarray],
    leaves: Mapping[Name, ProgramLeaf],
    before: tuple[int, ...],
    members: tuple[int, ...],
    capacity: int,
) -> None:
    """Give local arrays a row for each worker slot of this world. A worker gets the state of its own slot, or of a
    former worker whose slot is not occupied here; one without any, and an empty slot, the initial value.
    """
    rest = iter([slot for slot in before if slot not in members])
    old = {slot: slot if slot in before else next(rest, None) for slot in members}
    for name in (name for name, leaf in leaves.items() if leaf.local):
        rows = [host_copy(leaves[name].like)] * capacity
        for slot in (slot for slot in members if old[slot] is not None):
            rows[slot] = arrays[name][old[slot]]
        arrays[name] = np.stack(rows)


def states_of_hooks(hooks: Hooks, arrays: Mapping[Name, np.ndarray]) -> list[Any]:
    """Return the hooks' states, in their own structure, from a checkpoint's arrays."""
    first = dict(zip(hooks.names, hooks.first_states, strict=True))
    leaves = [_as_leaf(arrays[name], leaf.like) for name, leaf in leaves_of_hooks(hooks).items()]
    states = jax.tree.unflatten(jax.tree.structure(first), leaves)
    return [states[name] for name in hooks.names]


def _as_leaf(array: np.ndarray, like: Any) -> Any:
    """Return an array as a value of a leaf's type: a number, or an array."""
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        return jnp.asarray(array)
    if isinstance(like, np.generic):
        return array[()]
    return array if isinstance(like, np.ndarray) else array.item()


def _by_worker(
    p: ProgramParts, leaves: Mapping[Name, ProgramLeaf], arrays: Mapping[Name, np.ndarray]
) -> tuple[list[list[Any]], list[list[list[Any]]]]:
    """Return state and operator states of each worker of this process, on the host."""
    states, op_states = [], []
    for worker, old, old_op_states in zip(p.world.workers, p.engine.states, p.engine.op_states, strict=True):
        rows = (array[worker] if leaves[name].local else array for name, array in arrays.items())
        states.append([_with_keys(next(rows), like) for like in old])
        op_states.append([[_with_keys(next(rows), like) for like in likes] for likes in old_op_states])
    return states, op_states


def _with_keys(value: np.ndarray, like: jax.Array) -> Any:
    return _as_leaf(value, like) if is_key(like) else np.asarray(value)


def begin_branch(
    p: ProgramParts, loop: RunLoop, global_batch: int | None, values: Mapping[str, Any]
) -> Callable[[], None]:
    """Begin trial steps of a program: see `Program.branch`. Communicates like a checkpoint. Raises a DriverError if
    workers are joining.

    Returns:
      A function that makes the program what it was. It does not communicate, so that a process can leave the branch by
      an error.
    """
    run, sizes, there = p.run, p.sizes, p.hyperparameters
    if p.membership.target > len(p.world.members):
        raise DriverError(
            f"branch: {p.membership.target} workers were requested and {len(p.world.members)} have joined. Workers "
            "cannot join in a branch. Begin it when all have joined:\n"
            "    if len(program.members) == program.target_workers:"
        )
    values = checked_hyperparameters(there.values, values, there.types) if values else {}
    decision = Decision(sizes.exactly(global_batch).global_batch, hyperparameters=values)
    run.flush_logs()
    checkpoint = with_same_members(p.world, lambda: snapshot(p))
    before = run.run_id, run.restored, run.notes, p.skipped.in_a_row
    outer = p.hooks.suspended, p.listeners.suspended
    run.notes = []
    p.hooks.suspended = p.listeners.suspended = True

    def restore() -> None:
        if p.engine.lost_state:  # only a checkpoint on disk can be restored
            return
        prepare(p, loop, checkpoint)(Roster.of(p.world))
        run.run_id, run.restored, run.notes, p.skipped.in_a_row = before
        p.hooks.suspended, p.listeners.suspended = outer

    try:
        p.digest.enter(run.step, "program.branch", decision)
        loop.compile_first()
        loop.compile_for(sizes.target)  # in force after the branch
        if decision.global_batch is not None:
            batch_sizes = split(decision.global_batch, sizes.shares, sizes.bounds())
            loop.compile_for(batch_sizes)
            sizes.restart(batch_sizes, sizes.shares, sizes.members, decision.global_batch)
        there.request(values)
        p.revision.increment()
    except BaseException:
        restore()
        raise
    return restore
