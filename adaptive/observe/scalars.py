"""The scalars of a step by name, for sinks and the progress line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from adaptive.base.activity import Breakdown
from adaptive.control.requests import Request

from .events import StepEvent

FEW = 8  # up to this number of workers, each one's numbers are shown
NOISE = ("scale", "lower", "upper")  # fields of `mon.NoiseScale`: a value that has them is a noise scale


class Noise(NamedTuple):
    """A noise scale with its confidence bounds, in examples; NaN if unknown."""

    scale: float
    lower: float
    upper: float


def noise_of(event: StepEvent) -> Noise | None:
    """Return the first noise scale among the hooks' values or the metrics; `None` if there is none."""
    for hook in event.hooks:
        for root in noise_roots(hook.names):
            return Noise(*[float(hook.values[root + field]) if hook.values else math.nan for field in NOISE])
    scalars = event.scalars
    for root in noise_roots(tuple(scalars)):
        return Noise(*[scalars[root + field] for field in NOISE])
    name = next((name for name in scalars if name in ("noise", "noise_scale") or name.endswith("noise.scale")), None)
    return None if name is None else Noise(scalars[name], math.nan, math.nan)


@lru_cache(maxsize=64)
def noise_roots(names: Sequence[str]) -> list[str]:
    """Return what the names of a noise scale's fields begin with, "noise.", for each noise scale among these values."""
    roots = (name.removesuffix("scale") for name in names if name.rpartition(".")[2] == "scale")
    return [root for root in roots if all(root + field in names for field in NOISE)]


def scalars(event: StepEvent) -> dict[str, float]:
    """Return all numbers of a step that are worth a curve, by name. Metrics keep the names that the driver gives them.

    After the metrics follow `epoch`, `examples`, `seconds`, `examples_per_second`, `global_batch`, `workers`,
    `batch_size/0` and so on for each worker slot, `seconds/input` and the other parts of the breakdown,
    `hyperparameter/lr` and so on, and `noise/scale`, `noise/lower` and `noise/upper`, if a hook or the metrics have a
    noise scale; and what `program.log` and `program.evaluate(log=…)` added to this step.
    """
    report = event.report
    found = event.scalars | {
        "epoch": event.epoch,
        "examples": report.examples,
        "seconds": report.seconds,
        "examples_per_second": report.examples_per_second,
        "global_batch": report.global_batch,
        "workers": len(report.members),
    }
    found.update(zip(_worker_slots(len(report.batch_sizes)), report.batch_sizes, strict=True))
    found.update(zip(_PARTS, report.breakdown, strict=True))
    single = {name: value for name, value in report.hyperparameters.items() if not isinstance(value, list)}
    found.update((f"hyperparameter/{name}", value) for name, value in single.items())
    noise = noise_of(event) or ()
    found.update((f"noise/{name}", value) for name, value in zip(NOISE, noise, strict=False) if value == value)
    return {**found, **event.logged}


_PARTS = tuple(f"seconds/{part}" for part in Breakdown._fields)


@lru_cache(maxsize=64)
def _worker_slots(number: int) -> tuple[str, ...]:
    return tuple(f"batch_size/{slot}" for slot in range(number))


def describe(event: StepEvent) -> list[str]:
    """Return a line for each decision, join, loss and note of a step. Most steps have none."""
    report, decision = event.report, event.report.decision
    asked = "" if decision is None else request_in_words(Request("", report.step, decision).fields())
    lines = [f"decision: {asked}"] if asked else []
    lines += [f"a worker has joined in worker slot {slot}" for slot in report.joined]
    lines += [f"lost: {loss}" for loss in report.lost]
    return [*lines, *report.notes]


def request_in_words(fields: Mapping[str, Any]) -> str:
    """Describe the fields of a request: "a global batch of 112 and a split of 57 % : 43 %"; "" if there are none."""
    found = [counted(fields["workers"], "worker")] if fields.get("workers") is not None else []
    found += [f"a global batch of {fields['global_batch']:,}"] if fields.get("global_batch") is not None else []
    if (shares := fields.get("shares")) is not None:
        each = " : ".join(f"{100 * share / max(sum(shares), 1e-12):.0f} %" for share in shares)
        found.append(f"a split of {each}" if len(shares) <= FEW else "another split")
    found += [f"{name} = {value}" for name, value in (fields.get("hyperparameters") or {}).items()]
    return listed(found + ["the end of the run"] * bool(fields.get("stop")))


def listed(items: Sequence[str]) -> str:
    """Join items as a list in prose: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]])) if items else ""


def counted(count: int, what: str) -> str:
    """Format a count with its noun: "1 step", "2,000 steps"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def sizes_in_words(sizes: Sequence[int]) -> str:
    """Format batch sizes: "64 + 32 + – = 96"; "64 × 28…36 = 2,048" for many workers."""
    some = [int(size) for size in sizes if size]
    if len(sizes) == 1 or not some:
        return f"{sum(some):,}"
    if len(sizes) <= FEW:
        return " + ".join(f"{int(size):,}" if size else "–" for size in sizes) + f" = {sum(some):,}"
    each = f"{min(some):,}" if min(some) == max(some) else f"{min(some):,}…{max(some):,}"
    return f"{len(some)} × {each} = {sum(some):,}"
