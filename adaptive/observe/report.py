"""The report of a step, for the user of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax

from adaptive.base.activity import Breakdown
from adaptive.base.decision import Decision
from adaptive.base.values.arrays import numbers_of
from adaptive.base.world import Loss
from adaptive.runtime.kernels.microbatches import Microbatches

Metrics = TypeVar("Metrics")  # what the driver returns beside its state

_SHOWN = 4  # metrics in the line of `repr`


def report_of(fields: dict[str, Any]) -> Report[Any]:
    """Return a report with all of its fields given. Faster than `Report(...)`; every step creates one."""
    report = object.__new__(Report)
    object.__setattr__(report, "__dict__", fields)
    return report


@dataclass(frozen=True, repr=False)
class Report(Generic[Metrics]):
    """One step, as `Program.step` and `Program.run` report it.

    Attributes:
      step: number of steps done, this one included. Replicated.
      epoch: whole epochs of data consumed. Replicated.
      examples: examples consumed since the beginning. Replicated.
      metrics: the driver's metrics: a pytree of scalars and arrays. Replicated. NaN if the step was skipped.
      batch_sizes: examples per worker in this step; 0 for workers that take no part. Replicated.
      global_batch: the sum of `batch_sizes`. Replicated.
      messages: exchanges in this step. Replicated.
      message_bytes: bytes that each worker sent in this step's exchanges. Replicated.
      seconds: wall time from the start of this step to its end, hooks included. Local.
      breakdown: `seconds` by cause: input, computing, exchanging, waiting, hooks, compiling and other. Local.
      compute_seconds: per worker of this process, without waiting for others and without input; NaN for a worker
        without examples. Local.
      microbatches: per worker of this process, the sizes of the microbatches that made up its batch; empty for a worker
        without examples. Local.
      kernels: microbatch kernels compiled so far. Local.
      compile_seconds: time spent compiling kernels, most of it in the background. Local.
      waited_seconds: time that steps have waited for the compiler so far, including the start. Local.
      decision: the merged requests of this step's hooks, or `None`. Replicated.
      skipped: whether the step was skipped because a reduced value is not finite; `notes` say why. Replicated. Records
        also count steps in which a driver keeps its state and returns a metric "skipped" that is true.
      notes: lines on clipped requests, skipped steps, decisions, joins and leaves. Replicated, except for notes on
        failed listeners and checkpoints, which only rank 0 has.
      members: the workers of this step. Replicated.
      joined: the workers that joined since the step before. Replicated.
      lost: the processes that were lost since the step before. If one was lost during this step, the others repeated
        it on the same examples. Replicated.
      hyperparameters: the driver's `ad.hyperparameter`s in this step, by name: numbers, and lists of them. Replicated.
      epoch_ended: whether this step took the last examples of an epoch. Replicated.
    """

    step: int
    epoch: int
    examples: int
    metrics: Metrics
    batch_sizes: tuple[int, ...]
    global_batch: int
    messages: int
    message_bytes: int
    seconds: float
    breakdown: Breakdown
    compute_seconds: tuple[float, ...]
    microbatches: tuple[Microbatches, ...]
    kernels: int
    compile_seconds: float
    waited_seconds: float
    decision: Decision | None = None
    skipped: bool = False
    notes: tuple[str, ...] = field(default=())
    members: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    lost: tuple[Loss, ...] = ()
    epoch_ended: bool = False
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def examples_per_second(self) -> float:
        """Examples of all workers per second of this process's `seconds`. Local."""
        return self.global_batch / self.seconds if self.seconds > 0 else 0.0

    def __repr__(self) -> str:
        """Return one line with the main fields."""
        parts = [f"step={self.step}", f"epoch={self.epoch}", f"global_batch={self.global_batch}", *self._metrics()]
        parts.append(f"seconds={self.seconds:.3g}")
        parts += ["skipped=True"] if self.skipped else []
        parts += [f"notes={len(self.notes)}"] if self.notes else []
        return f"Report({', '.join(parts)})"

    def _metrics(self) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(self.metrics)
        shown = []
        for path, leaf in leaves[:_SHOWN]:
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "metrics"
            value = numbers_of(leaf)
            shown.append(f"{name}={f'{value.dtype}{list(value.shape)}' if value.ndim else f'{value.item():.5g}'}")
        return shown + ["…"] * (len(leaves) > _SHOWN)
