"""Helpers: traces and plans of small drivers, handlers for hooks, and the lines that errors name."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
from adaptive.base.activity import Breakdown, WorkerSeconds
from adaptive.base.decision import Decision, Limits, Observation
from adaptive.graph.partition import plan
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.graph.trace import Graph, trace
from adaptive.observe.events import Asked, HookValues, StepEvent
from adaptive.observe.report import Report
from adaptive.runtime.kernels import Kernels
from adaptive.runtime.kernels import compiled as _kernels
from adaptive.runtime.kernels.background_compiler import Job, KernelJob

FEATURES = 3
HERE = Path(__file__).parent


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.asarray(a).dtype), tree)


def batch_of(examples: int) -> dict[str, jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((examples, FEATURES), jnp.float32)
    return {"x": x, "y": jax.ShapeDtypeStruct((examples,), jnp.float32)}


def traced(driver: Callable, state: Any, examples: int = 4, *, workers: int = 2) -> Graph:
    return trace(driver, shapes(state), batch_of(examples), capacity=workers)


def planned(
    driver: Callable, state: Any, examples: int = 4, *, workers: int = 2, local_state: Sequence[int] = ()
) -> Plan:
    return plan(traced(driver, state, examples, workers=workers), local_state=local_state)


def planner(driver: Callable, state: Any, *, workers: int = 2) -> Planner:
    return Planner(driver, shapes(state), batch_of, capacity=workers)


def make_data(examples: int = 24, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows for a linear model: `y = x @ (1, -2, 0.5)`, and noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, FEATURES)).astype(np.float32)
    y = x @ np.array([1, -2, 0.5], np.float32) + rng.normal(scale=0.1, size=examples)
    return {"x": x, "y": y.astype(np.float32)}


def mean_loss(w: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


class Recorder:
    """A hook's handler that records its observations, and requests what the test sets."""

    def __init__(self, decide: Callable[[Observation], Decision | None] = lambda o: None, *, every_step: bool = False):
        self.every_step = every_step
        self.seen: list[Observation] = []
        self._decide = decide

    def init(self, n_workers: int) -> int:
        del n_workers
        return 0

    def __call__(self, observation: Observation, state: int) -> tuple[Decision | None, int]:
        self.seen.append(observation)
        return self._decide(observation), state + 1


def pointed_at(error: BaseException) -> list[str]:
    """The source lines of these tests that an error's text names, as `(test_x.py:15)`."""
    found = re.findall(r"\(((?:test_\w+|drivers)\.py):(\d+)\)", str(error))
    return [linecache.getline(str(next(HERE.rglob(file))), int(line)).strip() for file, line in found]


def sizes_of(reports: Sequence[ad.Report]) -> list[tuple[int, ...]]:
    return [r.batch_sizes for r in reports]


class HeldCompiler:
    """Stands in for the background compiler: keeps requested kernels, as (local index, size), until they are released.

    Other jobs are left out.
    """

    def __init__(self, kernels: Kernels):
        self.kernels, self.asked, self.error = kernels, [], None
        self._was_busy = False
        kernels._compiler = self

    def put(self, job: Job, *, urgent: bool = False) -> None:
        del urgent
        if isinstance(job, KernelJob) and (job.local_index, job.size) not in self.asked:
            self.asked.append((job.local_index, job.size))

    def drop(self, job: KernelJob) -> None:
        if (job.local_index, job.size) in self.asked:
            self.asked.remove((job.local_index, job.size))

    @property
    def idle(self) -> bool:
        return not self.asked

    def step_ended(self) -> bool:
        beside, self._was_busy = self._was_busy or bool(self.asked), bool(self.asked)
        return beside

    def close(self) -> None:
        self.asked.clear()

    def compile(self, *sizes: int) -> None:
        """Compile those sizes, or all that are requested."""
        for local, size in [a for a in self.asked if not sizes or a[1] in sizes]:
            self.asked.remove((local, size))
            self.kernels.compiled.compile(local, size)


def uncompiled(monkeypatch: Any) -> None:
    """Run segments operation by operation, because compiling would take most of the time."""
    monkeypatch.setattr(_kernels, "compile_segment", lambda function, shapes, device, **options: function)


def two_statuses(status: np.ndarray) -> np.ndarray:
    """What two processes of one worker each say, of whom one says `status`, and the other the same."""
    total = status.copy()
    if len(total):  # or it is a message without
        own = int(np.argmax(total[:2]))
        total[1 - own] = total[own]
        total[2:] *= 2
    return total


def event(
    step: int = 1,
    metrics: Any = None,
    hooks: Sequence[HookValues] = (),
    notes: Sequence[str] = (),
    sizes: tuple[int, ...] = (2, 2),
    workers: WorkerSeconds | None = None,
    run_id: str = "0123456789ab",
    **report: Any,
) -> StepEvent:
    """One step, made up."""
    fields: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "examples": 4 * step,
        "metrics": {"loss": np.float32(step)} if metrics is None else metrics,
        "batch_sizes": sizes,
        "global_batch": sum(sizes),
        "messages": 1,
        "message_bytes": 8,
        "seconds": 0.5,
        "breakdown": Breakdown(0.1, 0.2, 0.1, 0.05, 0.0, 0.0, 0.05),
        "compute_seconds": (0.2,),
        "microbatches": ((2,),),
        "kernels": 1,
        "compile_seconds": 0.0,
        "waited_seconds": 0.0,
        "notes": tuple(notes),
        "members": tuple(range(len(sizes))),
    }
    made = Report(**{**fields, **report})
    seconds = workers or WorkerSeconds(*[np.ones(len(sizes))] * 4)
    limits = Limits((1,) * len(sizes), (9,) * len(sizes))
    asked = Asked(sum(sizes), made.members, (len(sizes),) * 3)
    return StepEvent(made, step / 10, sizes, limits, 0, tuple(hooks), asked, (), seconds, run_id=run_id)
