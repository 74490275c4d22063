"""A sink for TensorBoard. The format is tensorboardX's to write, which needs no TensorFlow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from adaptive.base.errors import DriverError

from .events import StepEvent
from .figures import figures, words


class TensorBoard:
    """A sink that writes event files, for `tensorboard --logdir runs`: curves of all figures, and notes as text.

        program.run(epochs=10, log=[ad.log.TensorBoard("runs/a")])

    Needs tensorboardX: `pip install "adaptive-dataflow[tensorboard]"`.

    Args:
      folder: where the files are put, a new one for each run.
      every: steps between two points of a curve, for long runs. Text is written whenever there is some.

    Raises:
      DriverError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1):
        if every < 1:
            raise DriverError(f"TensorBoard: every= is a number of steps, 1 or more; got {every!r}.")
        self._folder, self._every = Path(folder), every
        self._tools()
        self._writer: Any = None

    def _tools(self) -> Any:
        try:
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise DriverError(
                'ad.log.TensorBoard needs tensorboardX:  pip install "adaptive-dataflow[tensorboard]"'
            ) from error
        return event_file_writer.EventsWriter, event_pb2.Event, summary_pb2.Summary, summary.text

    def write(self, event: StepEvent) -> None:
        """Add a point to each curve, and what happened as text."""
        events_writer, event_of, summary_of, text = self._tools()
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # One file for each process and moment: who takes over from another adds one.
            self._writer = events_writer(str(self._folder / "events"), f".{os.getpid()}.{time.time_ns()}")
        step, now = event.report.step, time.time()
        if step % self._every == 0 or event.report.epoch_ended:
            values = [summary_of.Value(tag=name, simple_value=value) for name, value in figures(event).items()]
            self._writer.write_event(event_of(wall_time=now, step=step, summary=summary_of(value=values)))
        told = words(event)
        if told:
            lines = text("notes", "\n\n".join(told))
            self._writer.write_event(event_of(wall_time=now, step=step, summary=lines))

    def flush(self) -> None:
        """What was written is on its way to the disk, whatever becomes of this process."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """End the file; a later run gets one of its own."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self._folder)!r})"
