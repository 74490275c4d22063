"""Where runs are logged to: sinks for `program.run(log=[…])`, and what one's own has to be.

    program.run(epochs=10, log=[ad.log.TensorBoard("runs/a"), ad.log.CSV("run.csv"), ad.log.JSONL("run.jsonl")])

All are fed from the `StepEvent` of each step; `figures(event)` are its numbers by name, and `words(event)` what
happened in it, in lines.
"""

from .observe.csv_file import CSV as CSV
from .observe.events import StepEvent as StepEvent
from .observe.figures import figures as figures
from .observe.figures import words as words
from .observe.record import JSONL as JSONL
from .observe.sinks import Resumption as Resumption
from .observe.sinks import Sink as Sink
from .observe.tensorboard import TensorBoard as TensorBoard
from .observe.wandb import WandB as WandB
