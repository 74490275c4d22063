"""The writer of checkpoints: writes a checkpoint in host memory to the disk, in a background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from adaptive.base.errors import CheckpointError, NonFiniteError
from adaptive.disk import lock

from .checkpoints import Checkpoints


class Writer:
    """Writes checkpoints to one directory. Local: on the process with rank 0.

    Args:
      before: called with each checkpoint before it is written, in the writing thread.
      saved: called with the step of each checkpoint that is on the disk, in the writing thread.

    Attributes:
      newest: the step of the newest checkpoint on disk; `None` if there is none.
    """

    def __init__(
        self,
        options: Checkpoints,
        run_id: str,
        before: Callable[[Mapping[str, Any]], None],
        saved: Callable[[int], Any],
    ):
        self._options, self._path, self._run_id = options, options.path, run_id
        self._before, self._saved = before, saved
        self._lock: int | None = None
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []
        self.newest: int | None = None

    def open(self, known: bool) -> None:
        """Lock the directory, before the first step.

        Args:
          known: whether the program continues from a checkpoint of the directory.

        Raises:
          CheckpointError: the directory cannot be written, another job writes to it, or it has checkpoints of another
            run.
        """
        from adaptive.disk import folders  # loads orbax now, rather than beside a step

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
        if there and not known:
            self.close()
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
            self._lock = lock.acquire(self._path, self._run_id)

    def _release(self) -> None:
        if self._lock is not None:
            lock.release(self._lock)
        self._lock = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, checkpoint: Mapping[str, Any]) -> None:
        """Write a checkpoint, which does not change meanwhile, in the background. Waits for the previous one.

        Raises:
          CheckpointError: a leaf cannot be stored.
        """
        from adaptive.disk import folders

        self.wait()
        self.newest = None
        # Not a daemon thread, so that the process waits for it at its end.
        self._thread = threading.Thread(
            target=self._write, args=(checkpoint, folders.arrays_of(checkpoint)), name="adaptive-checkpoint"
        )
        self._thread.start()

    def _write(self, checkpoint: Mapping[str, Any], arrays: Any) -> None:
        from adaptive.disk import folders

        step = checkpoint["step"]
        try:
            self._before(checkpoint)
            self._acquire()  # on a rank that takes over
            folders.write(self._path, self._options.keep, step, arrays)
            self.newest = step
            self._saved(step)
        except NonFiniteError as error:
            self.note(str(error))
        except lock.HeldError as error:
            self.note(f"no checkpoint of step {step}: {self._path} is being written {error}")
        except Exception as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self.note(f"no checkpoint of step {step} in {self._path}: {why.partition(chr(10))[0][:300]}")

    def wait(self, seconds: float | None = None) -> bool:
        """Wait, at most so long, until the checkpoint that is being written is on disk or has failed. Returns whether
        that is so.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def note(self, text: str) -> None:
        """Add a note to the next report, and log it."""
        logging.getLogger("adaptive").warning("%s", text)
        self._notes.append(text)

    def drain_notes(self) -> list[str]:
        """Return and clear the notes."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release the directory."""
        self.wait()
        self._release()
