"""Restoring a program from a checkpoint."""

from __future__ import annotations

import os
from typing import Any

from adaptive.base.roster import Roster
from adaptive.control.build_agreement import compare_across_processes
from adaptive.runtime.worker_state import OpStates, States

from .checkpoints import Checkpoints
from .parse_checkpoint import Parsed, parse, placed
from .parts import ProgramParts
from .run_loop import RunLoop
from .select_checkpoint import select_checkpoint

_SAME_CHECKPOINT = "Restore the same checkpoint on every rank; all may read one file. Nothing has been restored."


def restore(parts: ProgramParts, loop: RunLoop, checkpoint: Any, *, missing_ok: bool, other_workers_ok: bool) -> None:
    """Restore a program; see `Program.restore`. Communicates.

    Args:
      checkpoint: a pytree; or a directory of checkpoints, or one of them.

    Raises:
      CheckpointError: see `Program.restore`, also for `WorkerError` and `DisagreementError`.
    """
    p, run, selected, roster = parts, parts.run, None, Roster.of(parts.world)
    if isinstance(checkpoint, str | os.PathLike | Checkpoints):
        selected = select_checkpoint(p.world, checkpoint, missing_ok, f"restore of {p.name}")
        if selected.checkpoint is None:
            if not run.step and selected.run_id:  # the process was killed before its first checkpoint
                run.run_id, run.restored = selected.run_id, True
            return
        checkpoint = selected.checkpoint
    prepared: list[tuple[Parsed, dict[str, str], tuple[Any, Any]]] = []

    def prepare() -> tuple[dict[str, str], None]:
        options: dict[str, Any] = {"like": p.form.shapes, "other_workers_ok": other_workers_ok}
        parsed = parse(checkpoint, p.engine, p.hooks, p.sizes, p.stream, **options)
        digests = parsed.digests() if p.world.processes > 1 else {}
        prepared.append((parsed, digests, placed(parsed, p.engine)))
        loop.compile_for(parsed.batch_sizes)
        return digests, None

    compare_across_processes(p.world, f"restore of {p.name}", prepare, _SAME_CHECKPOINT)
    ((parsed, digests, arrays),) = prepared
    adopt(p, loop, parsed, arrays, roster)
    run.run_id, run.restored = parsed.run_id, True
    p.digest.restart(parsed.step, digests)
    if selected is not None:
        run.directories.add(selected.directory)
        run.notes += selected.notes


def adopt(p: ProgramParts, loop: RunLoop, parsed: Parsed, arrays: tuple[States, OpStates], roster: Roster) -> None:
    """Continue from a parsed checkpoint. Does not communicate.

    Args:
      p, loop: the program's parts and its loop.
      arrays: state and operator states of the checkpoint, on the devices.
      roster: the members when the checkpoint was parsed.
    """
    p.members.restart(parsed.members)
    p.engine.workers.replace(*arrays)
    p.hooks.restart([parsed.hooks[name] for name in p.hooks.names])
    p.hyperparameters.restart()
    p.sizes.restart(parsed.batch_sizes, parsed.shares, parsed.members, parsed.wanted)
    p.membership.restart(parsed.workers, roster, members=len(parsed.members))
    p.stream.go_on(parsed.cursors, parsed.place)
    p.tracing.shift(parsed.step - p.run.step)
    p.run.step, p.skipped.in_a_row = parsed.step, 0
    p.revision.increment()
    p.clock.restart()
    p.run_warnings.begin()
    p.mailboxes.forget()
