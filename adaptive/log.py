"""Sinks for `program.run(log=[…])`, and the helpers for a sink of your own.

    program.run(epochs=10, log=[ad.log.TensorBoard("runs/a"), ad.log.CSV("run.csv"), ad.log.JSONL("run.jsonl")])

A sink receives the `StepEvent` of each step. `scalars(event)` returns the numbers of the step by name;
`describe(event)` returns a line for each decision, join, loss and note. `read(path)` returns a record as columns.
"""

from .observe.csv_file import CSV as CSV
from .observe.events import StepEvent as StepEvent
from .observe.reader import Record as Record
from .observe.reader import read as read
from .observe.record import JSONL as JSONL
from .observe.scalars import describe as describe
from .observe.scalars import scalars as scalars
from .observe.sinks import Sink as Sink
from .observe.tensorboard import TensorBoard as TensorBoard
from .observe.wandb import WandB as WandB
