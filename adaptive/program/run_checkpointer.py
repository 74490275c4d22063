"""Checkpoints during a run: decides when one is due, and saves it.

All processes decide alike, at the same step: by the number of the step, by the number of consumed examples, or, for
minutes, by a request of rank 0 in the step's last message. All processes bring their hooks' states up to date, and send
their local state, if there is any. Rank 0 writes.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from typing import Any

from adaptive.base.activity import SAVING
from adaptive.base.ambient import with_build_settings
from adaptive.base.errors import CheckpointError
from adaptive.base.failure import fails_together
from adaptive.base.roster import broadcast_bytes, with_same_members
from adaptive.observe.report import Report

from .checkpoint import refuse_nans, snapshot
from .checkpoints import Checkpoints
from .parts import ProgramParts
from .writer import Writer

_ANSWER_SECONDS = 1.0  # while the last checkpoint is written, rank 0 tells the others that it lives
_BUSY, _MISSING, _DONE = b"busy", b"missing", b"done"  # the last checkpoint


class RunCheckpointer:
    """Saves the checkpoints of one run. Every process has one.

    Raises:
      CheckpointError: `options` is not a `Checkpoints`; or, on rank 0, no checkpoint can be written.
      WorkerError: rank 0 cannot write a checkpoint. On every other process, in its first step.
    """

    @fails_together("in opening the checkpoints of")
    def __init__(self, options: Checkpoints, parts: ProgramParts):
        self.world, self._name, self._ambient, self._parts = parts.world, parts.name, parts.ambient, parts
        if not isinstance(options, Checkpoints):
            raise CheckpointError(
                'checkpoint= must be an ad.Checkpoints, such as  ad.Checkpoints("run/", every="1 epoch"); '
                f"got {options!r}."
            )
        self._options, self._every = options, options.interval
        self._writer = Writer(options, parts.run.run_id, self._before_writing, parts.world.checkpoint_saved)
        self._saved = time.monotonic()
        self._has_stepped = self._noted = False  # whether there was a step; whether a note named a skipped checkpoint
        if self._every.unit == "minute" and self.world.processes > 1 and not parts.engine.has_status:
            raise CheckpointError(
                f"every={options.every!r}: rank 0 announces a due checkpoint in a step's last message, and this "
                'program sends no messages. Count steps or epochs:  every="1 epoch"'
            )
        if self._every.unit == "epoch":
            parts.stream.check_epochs(f'every="100 steps" for every={options.every!r}')
        if not self.world.rank:
            self._writer.open(options.path in parts.run.directories)
        parts.run.directories.add(options.path)
        atexit.register(self.close)  # for a run whose loop was left before its end

    def is_due(self, report: Report) -> bool:
        """Return whether a checkpoint is due after this step. All processes call it, after every step."""
        self._has_stepped = True
        before, epoch = report.examples - report.global_batch, self._parts.stream.epoch_length
        if self._every.unit == "minute":
            return self._is_announced()
        return self._every.due(report.step, before, report.examples, epoch)

    def _is_announced(self) -> bool:
        """Return whether rank 0 has announced a due checkpoint; on rank 0, announce one in the next step."""
        status, due = self._parts.status, time.monotonic() - self._saved >= 60 * self._every.number
        if self.world.processes == 1:
            return due
        announced, status.checkpoint_requested = status.checkpoint_requested, False
        status.checkpoint_due = not announced and self.world.rank == 0 and due
        return announced

    def _before_writing(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a state with NaNs. Write the logs, which have all earlier steps when a run continues from here."""
        if self._parts.skipped.checks:
            refuse_nans(checkpoint)
        self._parts.run.flush_logs()

    @fails_together("in a checkpoint of")
    def save(self) -> bool:
        """Save a checkpoint of the current state, unless the previous one is still being written. All processes call
        it; may communicate.

        Returns:
          Whether this process writes it.
        """
        with self._parts.activity.doing(SAVING):
            self._saved = time.monotonic()

            def taken() -> tuple[bool, dict[str, Any]]:
                writes = self.world.rank == 0 and self._is_free()
                return writes, self._snapshot(writes)

            writes, checkpoint = with_same_members(self.world, taken)  # a successor of rank 0 may write
            if writes:
                self._writer.write(checkpoint)
            return writes

    @with_build_settings
    def _snapshot(self, writes: bool) -> dict[str, Any]:
        return snapshot(self._parts, writes=writes)

    def _is_free(self) -> bool:
        """Return whether this process can write a checkpoint now; if not, note once that it is skipped."""
        busy = self._writer.busy
        if busy and not self._noted:
            self._noted = True
            self._writer.note(
                f"no checkpoint of step {self._parts.run.step}: the previous one is still being written. Further "
                f"checkpoints may be skipped without a note: every={self._options.every!r} is shorter than the time to "
                "write one."
            )
        return not busy

    def end(self, *, in_any_case: bool) -> None:
        """Save the last state of a run that ended without an error, unless it is saved. All processes call it, and it
        returns on all when the checkpoint is on disk or has failed. If its writer is lost, the next rank 0 writes it.
        Communicates.

        Args:
          in_any_case: save also after a run without a step.
        """
        if not (self._has_stepped or in_any_case):
            return
        has_tried = False  # to write it, on this process
        about = f"the last checkpoint of {self._name}"

        def answer() -> bytes:
            if not self._writer.wait(_ANSWER_SECONDS):
                return _BUSY
            return _DONE if has_tried or self._writer.newest == self._parts.run.step else _MISSING

        while (found := broadcast_bytes(self.world, answer, about)) != _DONE:
            if found == _MISSING:
                has_tried = self.save() or has_tried

    def drain_notes(self) -> list[str]:
        """Return and clear the notes since the last report. Empty except on rank 0."""
        return self._writer.drain_notes()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on disk, or has failed."""
        self._writer.wait()

    def close(self) -> None:
        """Wait for the writer, and release the directory."""
        atexit.unregister(self.close)
        self._writer.close()
