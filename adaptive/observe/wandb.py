"""A sink for Weights & Biases."""

from __future__ import annotations

from typing import Any

from adaptive.base.errors import DriverError

from .events import StepEvent
from .figures import figures, words


class WandB:
    """A sink that logs to a run of Weights & Biases: all figures, and notes as text.

        program.run(epochs=10, log=[ad.log.WandB(project="digits")])

    Needs wandb: `pip install "adaptive-dataflow[wandb]"`. Another process that takes over (rank 0 was lost) begins a
    run of its own, in the same group if one is given.

    Args:
      run: a run that you have begun, by `wandb.init`, and will finish. By default one is begun at the first step and
        finished at the end.
      **init: what `wandb.init` is to be given: `project`, `name`, `group`, `config`, ...

    Raises:
      DriverError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **init: Any):
        self._given, self._init = run, init
        self._run: Any = None
        if run is None:
            _wandb()

    def write(self, event: StepEvent) -> None:
        """Log a step."""
        if self._run is None:
            self._run = self._given if self._given is not None else _wandb().init(**self._init)
        told: dict[str, Any] = dict(figures(event))
        lines = words(event)
        if lines:
            told["notes"] = "\n".join(lines)
        self._run.log(told, step=event.report.step)

    def close(self) -> None:
        """Finish the run, if it was begun here."""
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
