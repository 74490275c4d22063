"""The summary line of a run: changes of batch sizes, split, workers and hyperparameters, and the hooks that asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .events import StepEvent


class Adapted:
    """Counts of a run's changes, collected step by step."""

    def __init__(self) -> None:
        self._first: StepEvent | None = None
        self._last: StepEvent | None = None
        self._changes: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()  # by hook

    def take(self, event: StepEvent) -> None:
        """Count the changes since the previous step."""
        self._first = self._first or event
        before, now = _sizes_of(self._last or event), _sizes_of(event)
        if before["global batch"] != now["global batch"] or before["workers"] != now["workers"]:
            before["split"] = now["split"]
        self._changes.update(name for name, value in now.items() if name in before and before[name] != value)
        self._decisions.update(event.decided)
        self._last = event

    def line(self, *, compiling: bool) -> str:
        """Return the summary: "adapted: global batch 64 → 1,024 in 2 changes; lr 0.1 → 0.05 in 1 change; asked for …".

        It is empty for a run without hooks and without changes.

        Args:
          compiling: whether kernels are still being compiled. Sizes do not change before theirs are there, so this may
            be why nothing changed.
        """
        if self._first is None or self._last is None:
            return ""
        began, ended = _sizes_of(self._first), _sizes_of(self._last)
        parts = []
        for name, count in sorted(self._changes.items(), key=lambda item: list(ended).index(item[0])):
            ends = "" if name == "split" else f" {_brief(began.get(name))} → {_brief(ended[name])}"
            parts.append(f"{name}{ends} in {count} change{'s' * (count != 1)}")
        hooks = {hook.name.partition("/")[2]: hook.why for hook in self._last.hooks}
        asked = ", ".join(f"{name} ({count})" for name in hooks if (count := self._decisions[name]))
        if parts:
            return f"adapted: {'; '.join(parts)}" + f"; asked for by {asked}" * bool(asked)
        if asked:
            why = "; kernels of other sizes are still being compiled" if compiling else ""
            return f"adapted: nothing, though asked for by {asked}{why}"
        silent = ", ".join(f"{name} ({why})" if why else name for name, why in hooks.items())
        return f"adapted: nothing; {silent} asked for no change" if silent else ""


def _sizes_of(event: StepEvent) -> dict[str, Any]:
    """Return what can change, by name."""
    report = event.report
    return {
        "global batch": report.global_batch,
        "split": report.batch_sizes,
        "workers": len(report.members),
        **report.hyperparameters,
    }


def _brief(value: Any) -> str:
    number = np.ndim(value) == 0 and value is not None
    return f"{value:,.4g}" if number and not isinstance(value, int) else f"{value:,}" if number else str(value)
