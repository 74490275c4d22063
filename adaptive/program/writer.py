"""The writer of checkpoints: writes a checkpoint in host memory to the disk, in a background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from adaptive.base.errors import CheckpointError, NonFiniteError
from adaptive.disk import folders
from adaptive.disk.folders import CheckpointFolders
from adaptive.disk.lock import HeldError, Lock

from .checkpoint import refuse_nans
from .checkpoints import Checkpoints
from .stored import table_of

_log = logging.getLogger("adaptive")


class Writer:
    """Writes checkpoints to one directory. Local: on the process with rank 0.

    Args:
      saved: called with the step of each checkpoint that is on the disk, in the writing thread.
      nans_ok: whether a state with NaNs is written.
      flush_logs: called before a checkpoint is committed, so that logs have all earlier steps when a run continues
        from it.

    Attributes:
      newest: the step of the newest checkpoint on disk; `None` if there is none.
    """

    def __init__(
        self,
        options: Checkpoints,
        flush_logs: Callable[[], None],
        saved: Callable[[int], object],
        *,
        nans_ok: bool,
    ):
        self._nans_ok = nans_ok
        self._options, self._path, self._flush_logs, self._saved = options, options.path, flush_logs, saved
        self._lock = Lock(self._path)
        self._folders: CheckpointFolders | None = None
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []
        self.newest: int | None = None

    def open(self, known: bool, run_id: str) -> None:
        """Lock the directory, before the first step.

        Args:
          known: whether the program continues from a checkpoint of the directory.
          run_id: the id of the run.

        Raises:
          CheckpointError: the directory cannot be written, another job writes to it, or it has checkpoints of another
            run.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            there = folders.checkpoints(self._path)
        except HeldError as error:
            raise CheckpointError(
                f"{self._path} is being written{error}. Use a separate directory for each run:  "
                "ad.Checkpoints(directory, …)"
            ) from None
        except OSError as error:
            raise CheckpointError(f"no checkpoints can be written to {self._path}: {_why(error)}.") from error
        if there and not known:
            self._lock.release()
            raise CheckpointError(
                f"{self._path} holds checkpoints of another run, the newest {there[0].name}, which this run would "
                f"delete. To continue from them:  program.restore({str(self._path)!r}, missing_ok=True)  before "
                "program.run. To start a new run, use another directory, or delete this one."
            )
        folders.sweep(self._path)
        with suppress(OSError):  # a full disk must not end the run
            folders.record_owner(self._path, run_id)
        folders.load_library()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, checkpoint: Mapping[str, Any]) -> None:
        """Write a checkpoint in the background. Waits for the previous one.

        Args:
          checkpoint: the checkpoint; must not change until it is written.

        Raises:
          CheckpointError: a leaf cannot be stored.
        """
        self.wait()
        table, self.newest = table_of(checkpoint), None
        # Not a daemon thread, so that the process waits for it at its end.
        self._thread = threading.Thread(target=self._write, args=(checkpoint, *table), name="adaptive-checkpoint")
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the checkpoint that is being written is on disk, or has failed.

        Args:
          seconds: the longest time to wait; by default unlimited.

        Returns:
          Whether none is being written.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def note(self, text: str, level: int = logging.WARNING) -> None:
        """Add a note to the next report, and log it."""
        _log.log(level, "%s", text)
        self._notes.append(text)

    def drain_notes(self) -> list[str]:
        """Return and clear the notes."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release the directory."""
        self.wait()
        self._forget()
        self._lock.release()

    def _forget(self) -> None:
        if self._folders is not None:
            self._folders.close()
            self._folders = None

    def _write(self, checkpoint: Mapping[str, Any], arrays: dict[str, np.ndarray], table: dict[str, Any]) -> None:
        step = checkpoint["step"]
        try:
            if not self._nans_ok:
                refuse_nans(checkpoint)
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()  # on a rank that takes over; also anew, if the directory was removed
            self._flush_logs()
            if self._folders is None:
                self._folders = CheckpointFolders(self._path, self._options.keep)
            self._folders.write(step, arrays, table)
            self.newest = step
            self._saved(step)
        except NonFiniteError as error:
            self.note(str(error))
        except HeldError as error:
            self.note(f"no checkpoint of step {step}: {self._path} is being written{error}")
        except Exception as error:
            self.note(f"no checkpoint of step {step} in {self._path}: {_why(error)}")
            self._forget()
            with suppress(OSError):
                folders.sweep(self._path)  # frees space, if the disk is full


def _why(error: BaseException) -> str:
    """Return an error in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.partition("\n")[0][:300]
