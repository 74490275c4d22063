"""A sink for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from adaptive.base.errors import DriverError

from .events import StepEvent
from .scalars import describe, scalars

_OWN_POINT = ("resume_from", "fork_from")  # W&B does not accept `resume` together with these


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
      run: a run from `wandb.init`, which the caller finishes. By default the sink starts a run at the first step and
        finishes it at the end. To log further values to it, include `{"step": …}` and omit `step=`.
      **init: arguments of `wandb.init`: `project`, `name`, `group`, `config`, ... An `id` or `resume` given here, or in
        WANDB_RUN_ID and WANDB_RESUME, takes precedence; with `resume_from` or `fork_from` the sink sets neither.

    Raises:
      DriverError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **init: Any):
        self._given, self._init = run, init
        self._run: Any = None
        self._defined: set[str] = set()  # scalars whose x axis is defined
        if run is None:
            _wandb()

    def write(self, event: StepEvent) -> None:
        """Log a step."""
        if self._run is None:
            self._run = self._given if self._given is not None else _wandb().init(**self._options(event.run_id))
            self._defined.clear()
            logged: Mapping[str, float] = {}
        else:
            logged = event.logged  # the step's own values are there
        row: dict[str, Any] = dict(logged or scalars(event))
        if event.restored:
            row["restored_after"] = event.report.step - 1
        if (lines := describe(event)) and not logged:
            row["notes"] = "\n".join(lines)
        for name in row.keys() - self._defined:
            self._run.define_metric(name, step_metric="step")
        self._defined.update(row)
        self._run.log({"step": event.report.step, **row})

    def _options(self, run_id: str) -> dict[str, Any]:
        """Return the arguments of `wandb.init`, which resumes the run if it exists."""
        if any(name in self._init for name in _OWN_POINT) or self._init.get("resume") in ("auto", True):
            return self._init
        own: dict[str, Any] = {}
        if "WANDB_RUN_ID" not in os.environ:
            own["id"] = run_id
        if "WANDB_RESUME" not in os.environ:
            own["resume"] = "allow"
        return {**own, **self._init}

    def close(self) -> None:
        """Finish the run, if the sink started it."""
        run, self._run = self._run, None
        if run is not None and self._given is None:
            run.finish()

    def __repr__(self) -> str:
        return "WandB()"


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise DriverError('ad.log.WandB needs wandb:  pip install "adaptive-dataflow[wandb]"') from error
    return wandb
