"""What a step was, for the program's user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from adaptive.base.activity import Breakdown
from adaptive.base.arrays import numbers_of
from adaptive.base.decision import Decision
from adaptive.base.world import Loss
from adaptive.runtime.microbatches import Microbatches

_SHOWN = 4  # metrics in one line


def report_of(fields: dict[str, Any]) -> Report:
    """Return a report of these fields, which are all it has: faster than the initialiser, as every step makes one."""
    report = object.__new__(Report)
    object.__setattr__(report, "__dict__", fields)
    return report


@dataclass(frozen=True, repr=False)
class Report:
    """One step, as `Program.step` and `Program.run` report it.

    Attributes:
      step: steps done, this one included. Replicated.
      epoch: whole epochs of data consumed. Replicated.
      examples: examples consumed since the beginning. Replicated.
      metrics: the driver's metrics: a pytree of scalars and arrays. Replicated. NaN where the step was skipped.
      batch_sizes: examples per worker in this step; 0 for those that take no part. Replicated.
      global_batch: their sum. Replicated.
      messages: exchanges in this step. Replicated.
      message_bytes: what each worker put into them. Replicated.
      seconds: wall time from the start of this step to its end, hooks included. Local.
      breakdown: where they went: input, computing, exchanging, waiting for others, hooks, compiling, and other. Local.
      compute_seconds: per worker of this process, without waiting for others and without input; NaN for one without
        examples. Local.
      microbatches: per worker of this process, the sizes of the kernel calls that made up its batch; none for one
        without examples. Local.
      kernels: call kernels compiled so far. Local.
      compile_seconds: what they took, most of it behind the steps. Local.
      waited_seconds: that the program has stood still for a compiler so far; the start counts. Local.
      decision: what the hooks of this step asked for, or `None`. Replicated.
      skipped: whether the step was given up because what was reduced is not finite; `notes` say why. Replicated.
      notes: lines on what was clipped, skipped, or decided, and on who has left or joined. Replicated, but for those on
        listeners that have failed, and on checkpoints that could not be written: these are rank 0's.
      members: the seats with a worker on them in this step. Replicated.
      joined: those with another worker than in the step before. Replicated.
      lost: the processes that were lost since the step before, or in the course of this one: then it was taken again,
        on the same examples, by those who are left. Replicated.
      hyperparameters: the driver's `ad.hyperparameter`s in this step, by name: numbers, and lists of them. Replicated.
      epoch_ended: whether this step took the last examples of an epoch. Replicated.
    """

    step: int
    epoch: int
    examples: int
    metrics: Any
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
        """Of all workers, by this process's `seconds`. Local."""
        return self.global_batch / self.seconds if self.seconds > 0 else 0.0

    def __repr__(self) -> str:
        """One line: what a reader of a REPL wants to see. Everything else is an attribute."""
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
