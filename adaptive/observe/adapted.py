"""The summary line of a run: changes of batch sizes, split, workers and hyperparameters, and the hooks that asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
        if self._last is not None:
            self._compare(self._last, event)
        self._last = event
        self._decisions.update(event.decided)

    def _compare(self, last: StepEvent, event: StepEvent) -> None:
        before, now = last.report, event.report
        if before.global_batch != now.global_batch:
            self._changes["global batch"] += 1
        elif before.batch_sizes != now.batch_sizes and before.members == now.members:
            self._changes["split"] += 1
        self._changes["workers"] += before.members != now.members
        old = before.hyperparameters
        self._changes.update(
            f"{name}="
            for name, value in now.hyperparameters.items()
            if name in old and not np.array_equal(old[name], value)
        )

    def line(self, *, compiling: bool) -> str:
        """Return the summary: "adapted: global batch 64 → 1,024 in 2 changes; lr 0.1 → 0.05 in 1 change; asked for …".

        It is empty for a run without hooks and without changes.

        Args:
          compiling: whether kernels are still being compiled. Sizes do not change before theirs are there, so this may
            be why nothing changed.
        """
        if self._first is None or self._last is None:
            return ""
        parts = _changes(self._changes, self._first, self._last)
        names = dict.fromkeys(hook.name.partition("/")[2] for hook in self._last.hooks)
        asked = [f"{name} {_times(self._decisions[name])}" for name in names if self._decisions[name]]
        if parts:
            return "adapted: " + "; ".join([*parts, *([f"asked for by {', '.join(asked)}"] if asked else [])])
        if not names:
            return ""
        if not asked:
            return f"adapted: nothing; {', '.join(names)} asked for no change"
        why = "; kernels of other sizes are still being compiled" if compiling else ""
        return f"adapted: nothing, though asked for by {', '.join(asked)}{why}"


def _changes(changes: Mapping[str, int], first: StepEvent, last: StepEvent) -> list[str]:
    began, ended = first.report, last.report
    parts = []
    if changes["global batch"]:
        parts.append(
            f"global batch {began.global_batch:,} → {ended.global_batch:,} in {_counted(changes['global batch'])}"
        )
    if changes["split"]:
        parts.append(f"its split among workers in {_counted(changes['split'])}")
    if changes["workers"]:
        parts.append(f"workers {len(began.members)} → {len(ended.members)} in {_counted(changes['workers'])}")
    for name in ended.hyperparameters:
        if count := changes[f"{name}="]:
            old, new = (_brief(report.hyperparameters.get(name)) for report in (began, ended))
            parts.append(f"{name} {old} → {new} in {_counted(count)}")
    return parts


def _brief(value: Any) -> str:
    array = np.asarray(value)
    return f"{array.item():.4g}" if array.ndim == 0 and array.dtype.kind in "iuf" else str(value)


def _counted(number: int) -> str:
    return f"{number} change{'s' * (number != 1)}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
