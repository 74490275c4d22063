"""A sink for TensorBoard. The event files are written by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from adaptive.base.errors import DriverError
from adaptive.base.values.numbers import whole

from .events import StepEvent
from .scalars import describe, scalars


class TensorBoard:
    """A sink that writes event files, for `tensorboard --logdir runs`: curves of all scalars, and notes as text.

        program.run(epochs=10, log=[ad.log.TensorBoard("runs/a")])

    When the run continues from an earlier step, TensorBoard discards the points of the later steps, also those in files
    that other processes wrote.

    Needs tensorboardX: `pip install "adaptive-dataflow[tensorboard]"`.

    Args:
      folder: directory of the event files; each process and `run()` creates one. File names end with the run's id.
      every: steps between two points of a curve, for long runs. Text, and what `program.log` adds, is always written.

    Raises:
      DriverError: tensorboardX is not installed, or `every` is not a positive whole number.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1):
        try:
            import tensorboardX  # noqa: F401
        except ImportError as error:
            raise DriverError(
                'ad.log.TensorBoard needs tensorboardX:  pip install "adaptive-dataflow[tensorboard]"'
            ) from error
        if whole(every) is None or every < 1:
            raise DriverError(f"ad.log.TensorBoard: every= is a number of steps, at least 1; got {every!r}.")
        self._folder, self._every = Path(folder), every
        self._writer: Any = None

    def write(self, event: StepEvent) -> None:
        """Add a point to each curve, and decisions, joins, losses and notes as text."""
        # Single events: `SummaryWriter` would pickle each scalar to a thread of its own, and lose its queue in a kill.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        at: dict[str, Any] = {"wall_time": time.time(), "step": event.report.step}
        repeats, values, notes = event.restored, scalars(event), describe(event)
        if event.logged and self._writer is not None:  # the step's own values are there
            values, notes = dict(event.logged), []
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Other runs in this folder stay as they are.
            repeats = any(file.name.endswith(f".{event.run_id}") for file in self._folder.iterdir())
            # TensorBoard reads the files by name, so names are ordered by time.
            suffix = f".{time.time_ns()}.{os.getpid()}.{event.run_id}"
            self._writer = EventsWriter(str(self._folder / "events"), suffix)
        if repeats:  # TensorBoard purges the steps from this one on
            self._writer.write_event(Event(session_log=SessionLog(status=SessionLog.START), **at))
        if event.report.step % self._every == 0 or event.report.epoch_ended or event.logged:
            points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._writer.write_event(Event(summary=Summary(value=points), **at))
        if notes:
            self._writer.write_event(Event(summary=text("notes", "\n\n".join(notes)), **at))

    def flush(self) -> None:
        """Pass what was written to the operating system, so that it survives this process."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file; a later `run()` gets a file of its own."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
