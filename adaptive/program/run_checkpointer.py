"""Checkpoints during a run: decides when one is due, saves it, and writes it to the disk in a background thread.

All processes decide alike: by the number of the step, of consumed examples, or, for minutes, by a request of rank 0 in
the step's last message. They bring their hooks' states up to date, and send their local state. Rank 0 writes.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any

from adaptive.base.activity import SAVING
from adaptive.base.errors import CheckpointError, NonFiniteError
from adaptive.base.process.failure import fails_together
from adaptive.base.roster import broadcast_bytes, with_same_members
from adaptive.base.values.ambient import with_build_settings
from adaptive.disk import folders, lock
from adaptive.disk.best import CheckpointValues
from adaptive.observe.events import numbers_by_name
from adaptive.observe.report import Report

from .checkpoint import refuse_nans, snapshot
from .checkpoints import Checkpoints
from .parts import ProgramParts

_ANSWER_SECONDS = 1.0  # while the last checkpoint is written, rank 0 tells the others that it lives
_NO_VALUE = (
    "keep_best={}: the value was not logged for each checkpoint; those without are not compared. Log it after a step "
    "with a checkpoint, or call program.save() after it is logged."
)
_BUSY_DISK = (
    "the previous one is still being written. Further checkpoints may be skipped without a note: every={!r} is shorter "
    "than the time to write one."
)
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
        self._options, self._every, self._path = options, options.interval, options.path
        self._saved, self._newest = time.monotonic(), -1  # the step of the newest checkpoint on the disk
        self._report: Report | None = None  # of the last step of this run
        self._lock: int | None = None
        self._thread: threading.Thread | None = None
        self._noted: set[str] = set()  # notes that are made once
        if self._every.unit == "minute" and self.world.processes > 1 and not parts.engine.has_status:
            raise CheckpointError(
                f"every={options.every!r}: rank 0 announces a due checkpoint in a step's last message, and this "
                'program sends no messages. Count steps or epochs:  every="1 epoch"'
            )
        if self._every.unit == "epoch":
            parts.stream.check_epochs(f'every="100 steps" for every={options.every!r}')
        if not self.world.rank:
            self._open()
        parts.run.directories.add(self._path)
        parts.run.values = self._values = CheckpointValues(options.keep_best)
        atexit.register(self.close)  # for a run whose loop was left before its end

    def _open(self) -> None:
        """Lock the directory, before the first step. Raises a CheckpointError if that cannot be done, or it has
        checkpoints of another run.
        """
        from adaptive.disk import writing  # noqa: F401  # loads orbax now, rather than beside a step

        try:
            self._acquire()
            there = folders.checkpoints(self._path)
        except lock.HeldError as error:
            raise CheckpointError(
                f"{self._path} is being written {error}. Use a separate directory for each run:  "
                "ad.Checkpoints(directory, …)"
            ) from None
        except OSError as error:
            self._release()
            raise CheckpointError(f"no checkpoints can be written to {self._path}: {error.strerror}.") from error
        if there and self._path not in self._parts.run.directories:
            self._release()
            raise CheckpointError(
                f"{self._path} holds checkpoints of another run, the newest {there[0].name}, which this run would "
                f"delete. To continue from them:  program.restore({str(self._path)!r}, missing_ok=True)  before "
                "program.run. To start a new run, use another directory, or delete this one."
            )

    def _acquire(self) -> None:
        """Lock the directory, unless that has been done; anew, if it was removed meanwhile."""
        if self._lock is None or not (self._path / lock.LOCK).exists():
            self._release()
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = lock.acquire(self._path)

    def _release(self) -> None:
        if self._lock is not None:
            lock.release(self._lock)
        self._lock = None

    def is_due(self, report: Report) -> bool:
        """Return whether a checkpoint is due after this step. All processes call it, after every step."""
        self._report = report
        if self._every.unit == "minute":
            return self._is_announced()
        before, epoch = report.examples - report.global_batch, self._parts.stream.epoch_length
        return self._every.due(report.step, before, report.examples, epoch)

    def _is_announced(self) -> bool:
        """Return whether rank 0 has announced a due checkpoint; on rank 0, announce one in the next step."""
        status, due = self._parts.status, time.monotonic() - self._saved >= 60 * self._every.number
        if self.world.processes == 1:
            return due
        announced, status.checkpoint_requested = status.checkpoint_requested, False
        status.checkpoint_due = not announced and self.world.rank == 0 and due
        return announced

    @fails_together("in a checkpoint of")
    @with_build_settings
    def save(self, *, is_last: bool = False) -> bool:
        """Save the current state, unless the previous checkpoint is still being written; return whether this process
        writes it. All processes call it; may communicate. `is_last`: whether `save_and_wait` follows, and saves what is
        skipped here.
        """
        with self._parts.activity.doing(SAVING):
            self._saved = time.monotonic()

            def taken() -> tuple[bool, dict[str, Any]]:
                writes = self.world.rank == 0 and self.wait(0)
                return writes, snapshot(self._parts, writes=writes)

            writes, checkpoint = with_same_members(self.world, taken)  # a successor of rank 0 may write
            if writes:
                self._write(checkpoint)
            elif not (self.world.rank or is_last):
                self._note_once(
                    _BUSY_DISK.format(self._options.every), f"no checkpoint of step {self._parts.run.step}: "
                )
            return writes

    def _write(self, checkpoint: dict[str, Any]) -> None:
        """Write a checkpoint in the background. Raises a CheckpointError if a leaf cannot be stored."""
        if self._options.keep_best is not None and self._report is not None:
            self._values.log(numbers_by_name(self._report.metrics), self._report.step)
        arrays = folders.arrays_of(checkpoint)
        # Not a daemon thread, so that the process waits for it at its end.
        arguments = checkpoint, arrays, self._values
        self._thread = threading.Thread(None, self._write_arrays, "adaptive-checkpoint", arguments)
        self._thread.start()

    def _write_arrays(self, checkpoint: dict[str, Any], arrays: Any, values: CheckpointValues) -> None:
        """Write the logs, which have all earlier steps when a run continues from here, and the checkpoint."""
        from adaptive.disk import writing

        step = checkpoint["step"]
        try:
            if self._parts.skipped.checks:
                refuse_nans(checkpoint)
            self._parts.run.flush_logs()
            self._acquire()  # on a rank that takes over
            folder = writing.write(self._path, self._options.keep, step, arrays, self._options.keep_best)
            if values is self._values:  # no restore since
                self._newest = step
            if not values.written(step, folder):
                self._note_once(_NO_VALUE.format(self._options.keep_best))
            self.world.checkpoint_saved(step)
        except NonFiniteError as error:
            self._note(str(error))
        except lock.HeldError as error:
            self._note(f"no checkpoint of step {step}: {self._path} is being written {error}")
        except Exception as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self._note(f"no checkpoint of step {step} in {self._path}: {why.partition(chr(10))[0][:300]}")

    @property
    def has_stepped(self) -> bool:
        """Whether there was a step in this run."""
        return self._report is not None

    def save_and_wait(self, *, again: bool = False) -> None:
        """Save the current state, unless it is saved. All processes call it, and it returns on all when the checkpoint
        is on disk or has failed. If its writer is lost, the next rank 0 writes it. Communicates.

        Args:
          again: save also if a checkpoint of this step is on disk.
        """
        has_tried = False  # to write it, on this process
        about = f"a checkpoint of {self._name} after step {self._parts.run.step}"

        def answer() -> bytes:
            if not self.wait(_ANSWER_SECONDS):
                return _BUSY
            is_saved = self._newest == self._parts.run.step and not again
            return _DONE if has_tried or is_saved else _MISSING

        while (found := broadcast_bytes(self.world, answer, about)) != _DONE:
            if found == _MISSING:
                has_tried = self.save(is_last=True) or has_tried

    def forget(self) -> None:
        """Forget of which step a checkpoint is on disk, and the values of steps: a program that was restored comes to
        other states by the same steps.
        """
        self._newest = -1
        self._parts.run.values = self._values = CheckpointValues(self._options.keep_best)

    def _note_once(self, text: str, begin: str = "") -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(begin + text)

    def _note(self, text: str) -> None:
        logging.getLogger("adaptive").warning("%s", text)
        self._parts.run.note(text)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait, at most so long, until the checkpoint that is being written is on disk or has failed. Return whether
        that is so.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release the directory."""
        atexit.unregister(self.close)
        self.wait()
        self._release()
