"""The costliest causes of a run's time beside training, as sentences with figures and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive.observe.ledger import CAUSES

from .columns import Columns
from .formatting import duration, listed, percent, workers
from .slow_workers import SlowPhase, slow_phases

_LEAST = 0.01  # findings that cost a smaller share of the run are left out
_MUCH_EXCHANGE = 0.3  # of the run

_ADVICE = {
    "input": "Read ahead with num_threads= or num_readers=, or make examples cheaper.",
    "exchanging": "A larger batch has fewer exchanges for its examples.",
    "hooks": "A larger every= calls them less often.",
    "tracing and compiling": "program.warm_up() compiles sizes before the run.",
    "checkpoints": "Write them less often.",
    "repeated steps": "More frequent checkpoints repeat fewer.",
    "other": "A larger batch has fewer steps.",
}


class Finding(NamedTuple):
    """A sentence of the report, with the seconds that it is about."""

    text: str
    seconds: float


def findings(run: Columns) -> list[Finding]:
    """Return what cost at least a hundredth of the run, the most expensive first."""
    total = run.ledger.wall
    found = list(_waiting(run, total))
    for name, seconds in run.ledger.seconds.items():
        share = seconds / total
        text = f"{name.capitalize()} took {percent(share)} of the run: {CAUSES[name]}. {_ADVICE.get(name, '')}"
        if name not in ("computing", "waiting") and (name != "exchanging" or share > _MUCH_EXCHANGE):
            found.append(Finding(text.rstrip(), seconds))
    return sorted((f for f in found if f.seconds >= _LEAST * total), key=lambda f: -f.seconds)


def _waiting(run: Columns, total: float) -> Iterator[Finding]:
    phases = [phase for phase in slow_phases(run) if phase.saved >= _LEAST * total]
    for phase in phases:
        less = f"{duration(phase.saved)} ({percent(phase.saved / total)})"
        them = "it" if len(phase.workers) == 1 else "they"
        text = (
            f"The others waited for {workers(phase.workers)} {_when(run, phase.first, phase.end)}{_why(run, phase)}. "
            f"Had {them} been as fast as the others, the run would have taken {less} less."
        )
        yield Finding(text, phase.saved)
    waiting = run.ledger.seconds["waiting"]
    rest = waiting - sum(phase.saved for phase in phases)
    of_it = f"{duration(max(rest, 0.0))} of it " if phases else ""
    share = percent(waiting / total)  # the only share of waiting on the page
    yield Finding(f"Workers waited {share} of the run for one another, {of_it}with none steadily slower.", rest)


def _when(run: Columns, first: int, end: int) -> str:
    """Format an interval: "from step 400 to 900", or "throughout"."""
    if end - first >= 0.95 * len(run):
        return "throughout"
    return f"from step {run.step[first]:,} to {run.step[end - 1]:,}"


def _why(run: Columns, phase: SlowPhase) -> str:
    """Return the reason why workers were slow: speed, number of examples, input, or something else."""
    rows, mine = slice(phase.first, phase.end), np.isin(np.arange(run.n), phase.workers)
    sizes = np.where(run.sizes[rows] > 0, run.sizes[rows], np.nan)
    numbers = {name: values[rows] for name, values in run.workers.items()} | {"size": sizes}
    means = {name: (float(np.nanmean(v[:, mine])), float(np.nanmean(v[:, ~mine]))) for name, v in numbers.items()}
    more = {name: means[name][0] - means[name][1] for name in ("computing", "input", "busy")}
    if more["input"] > 0.5 * more["busy"]:
        here, there = map(duration, means["input"])
        return f", for their input: {here} a step, against {there} of the others"
    if more["computing"] < 0.5 * more["busy"]:
        rest = duration(more["busy"] - more["computing"] - more["input"])
        return f", which spent {rest} a step more on neither computing nor input (the script's own code, a compiler)"
    larger = means["size"][0] / means["size"][1]
    slower = means["computing"][0] / means["computing"][1] / larger
    reasons = [f"an example took {slower:.1f} times as long"] if slower >= 1.1 else []
    reasons += [f"{larger:.1f} times as many examples"] if larger >= 1.1 else []
    return f": {listed(reasons)}" if reasons else ""
