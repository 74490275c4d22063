"""A sink for Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from adaptive.base.errors import DriverError

from .events import StepEvent
from .scalars import describe, scalars


class WandB:
    """A sink that logs to a run of Weights & Biases: all scalars, and notes as text.

        program.run(epochs=10, log=[ad.log.WandB(project="digits")])

    The W&B run has the id of the run, which checkpoints contain. So there is one W&B run even if the job is killed and
    restarted, another process becomes rank 0, or `run()` is called again. To start another W&B run from a checkpoint,
    pass an `id`. Offline, each process writes its own directory, and `wandb sync` merges directories of the same id.

    The x axis is the scalar `step`, not W&B's own step, which cannot decrease. W&B keeps the earlier points of repeated
    steps; the first point after a restore has the scalar `restored_after`.

    Needs wandb: `pip install "adaptive-dataflow[wandb]"`.

    Args:
      run: a run from `wandb.init`, which the caller finishes; needed for `resume_from=` and `fork_from=`. By default
        the sink starts a run at the first step and finishes it at the end. To log further values to it, include
        `{"step": …}` and omit `step=`.
      **init: arguments of `wandb.init`: `project`, `name`, `group`, `config`, ... An `id` or `resume` given here, or in
        WANDB_RUN_ID and WANDB_RESUME, takes precedence.

    Raises:
      DriverError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **init: Any):
        self._given, self._init = run, init
        self._run: Any = None
        self._defined: set[str] = set()  # scalars whose x axis is defined
        if run is None:
            try:
                import wandb  # noqa: F401
            except ImportError as error:
                raise DriverError('ad.log.WandB needs wandb:  pip install "adaptive-dataflow[wandb]"') from error

    def write(self, event: StepEvent) -> None:
        """Log a step."""
        logged = event.logged if self._run is not None else {}  # the step's own values are there
        if self._run is None:
            self._run, self._defined = self._given or self._begin(event.run_id), set()
        row: dict[str, Any] = dict(logged or scalars(event))
        if event.restored:
            row["restored_after"] = event.report.step - 1
        if (lines := describe(event)) and not logged:
            row["notes"] = "\n".join(lines)
        for name in row.keys() - self._defined:
            self._run.define_metric(name, step_metric="step")
        self._defined.update(row)
        self._run.log({**row, "step": event.report.step})

    def _begin(self, run_id: str) -> Any:
        """Begin a W&B run, or resume it if it exists."""
        import wandb

        own = {"id": os.environ.get("WANDB_RUN_ID", run_id), "resume": os.environ.get("WANDB_RESUME", "allow")}
        return wandb.init(**own | self._init)

    def close(self) -> None:
        """Finish the run, if the sink started it."""
        run, self._run = self._run, None
        if run is not None and self._given is None:
            run.finish()
