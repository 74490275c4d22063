"""Warnings on avoidable costs of a run, each logged once on rank 0 with a remedy.

The warnings use only data that every step has anyway, and go to the log "adaptive".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np

from adaptive.base.source_lines import at
from adaptive.control.hooks import Hooks
from adaptive.graph.plan import HookPlan, Plan

from .report import Report

STEPS = 50  # number of steps that are judged together
_INPUT = 0.2  # least share of the steps' time that is worth a warning
_COMPILER_SECONDS = 0.1  # total time that steps may wait for the compiler without a warning, after the first step

Inputs = Callable[[Sequence[np.ndarray]], np.ndarray]

_log = logging.getLogger("adaptive")


class RunWarnings:
    """Warnings of one program: on slow input, on hooks without measurements, and on steps that wait for the compiler.

    Args:
      plan: the plan of a step.
      hooks: the program's hooks.
      inputs: `Status.inputs`; `None` if examples are rows of arrays in memory, which cause no waiting.
      deterministic: whether the program waits for kernels so that no measured time decides when sizes change.
    """

    def __init__(self, plan: Plan, hooks: Hooks, inputs: Inputs | None, *, deterministic: bool):
        self._plan, self._hooks, self._inputs, self._deterministic = plan, hooks, inputs, deterministic
        self._said: set[object] = set()
        self._steps = 0
        self._seconds = self._input = 0.0
        self._heard: list[np.ndarray] = []
        self._waited: float | None = None

    def begin(self) -> None:
        """Start a run: the waits for the compiler until its first step are not counted."""
        self._waited = None

    def take(self, report: Report, heard: np.ndarray, beside_compiler: int) -> None:
        """Add a step that has ended; log the warnings that are due.

        Args:
          report: the step's report.
          heard: all workers' seconds, from the step's message: `Status.heard`.
          beside_compiler: number of consecutive steps, this one included, without compute seconds because a compiler
            ran beside them.
        """
        if self._waited is None:
            self._waited = report.waited_seconds
        elif report.waited_seconds - self._waited > _COMPILER_SECONDS:
            self._compiler(report, report.waited_seconds - self._waited)
        self._steps += 1
        self._seconds += report.seconds
        self._input += report.breakdown.input
        self._heard.append(heard)
        if self._steps == STEPS:
            self._judge(report.step, beside_compiler)
            self._steps, self._seconds, self._input = 0, 0.0, 0.0
            self._heard.clear()

    def _judge(self, step: int, beside_compiler: int) -> None:
        input_, worst = np.zeros(1), 0
        if self._inputs is not None:
            input_ = self._inputs(self._heard) if self._plan.messages else np.asarray([self._input])
            worst = int(input_.argmax())
        if self._seconds and input_[worst] > _INPUT * self._seconds:
            self._say(
                "input",
                f"worker {worst} has waited for input in {input_[worst] / self._seconds:.0%} of the last {STEPS} "
                f"steps' time ({1e3 * input_[worst] / STEPS:.1f} ms of {1e3 * self._seconds / STEPS:.1f} ms a step), "
                "and the others for it. If reading waits, read by several threads (num_threads=); else in reader "
                "processes (num_readers=), keep examples in arrays, or do less per example: see docs/input.md.",
            )
        for plan, unknown in zip(self._plan.hooks, self._hooks.unknown, strict=True):
            if unknown.values and unknown.steps >= STEPS:
                self._say(plan, self._idle(plan, sorted(unknown.values), unknown.steps, beside_compiler))

    def _idle(self, plan: HookPlan, values: Sequence[int], steps: int, beside_compiler: int) -> str:
        names = value_names(plan)
        missing = ", ".join(names[value] for value in values)
        if beside_compiler >= STEPS:
            why = (
                "because kernels were being compiled beside all of them. On fewer than four cores a compiler slows the "
                "steps down. Give each process more cores, or compile before the run:  program.warm_up()"
            )
        elif any(f"{names[value]}.scale" in plan.hook.leaf_names for value in values):
            why = (
                "because a noise scale compares groups of examples, and there were fewer than two in a step. Use more "
                "workers, or run a batch as several microbatches:  ad.Program(..., microbatch=)"
            )
        else:
            why = "where it was NaN: look at how the driver computes it."
        return (
            f"{plan.hook.name!r}{at(plan.line)} has no measurements yet: {missing} had no known value in any of "
            f"{steps} steps, {why}"
        )

    def _compiler(self, report: Report, seconds: float) -> None:
        if self._plan.unsplittable:
            why = (
                f"A batch of this driver is one microbatch ({self._plan.unsplittable[0]}), so each new size needs a "
                "kernel of its own: let sizes change less often, in larger steps."
            )
        elif self._deterministic:
            why = (
                "Deterministic programs wait for the kernels of a new size. Compile them before the run "
                "(program.warm_up()), or let sizes change when their kernels are ready (deterministic=False)."
            )
        else:
            why = "They needed kernels that were not compiled yet. Compile them before the run:  program.warm_up()"
        self._say("compiler", f"up to step {report.step} steps have waited {seconds:.1f} s for a compiler. {why}")

    def _say(self, about: object, line: str) -> None:
        if about not in self._said:
            self._said.add(about)
            _log.warning("%s", line)


def value_names(plan: HookPlan) -> list[str]:
    """Return the names of a hook's values."""
    names: dict[int, str] = {}
    hook = plan.hook
    numbered = jax.tree.unflatten(hook.tree, range(hook.tree.num_leaves))
    for leaf, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(numbered)):
        names.setdefault(path[0].idx, hook.leaf_names[leaf].split(".")[0].split("[")[0])
    return [names.get(value, "") for value in range(max(names, default=-1) + 1)]  # "" for a value without leaves
