"""Data and objects that all steps of an engine share, computed once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.activity import Activity
from adaptive.base.channel import Channel
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.sources import MICROBATCHES

from .finite import FiniteCheck, Trouble
from .kernels import Kernels
from .kernels.microbatches import Microbatches
from .kernels.programs import Programs
from .message import Layout, lay_out_all
from .placement import Placement
from .segment import Feed
from .worker_state import WorkerState


class StepStatus:
    """What processes exchange in each step, with its last message: by default, nothing.

    Attributes:
      length: elements in the message.
      own_seconds: seconds of this process: see `Activity.of_workers`.
    """

    length = 0
    own_seconds: tuple[float, Sequence[float], Sequence[float]] = 0.0, (), ()

    def encode(self) -> np.ndarray:
        """Return this process's part of the status; shape=(length,)."""
        return np.zeros(0)

    def decode(self, elements: np.ndarray) -> None:
        """Apply the status, summed over all processes; shape=(length,). May raise an error that ends the run."""


class StepPlan:
    """Data that is the same in every step of a plan.

    Args:
      status: number of elements of the status.
      finite: whether values that are not finite prevent a commit.

    Attributes:
      plan: the reference plan, from which everything except kernels comes.
      label: prefix of the names of compiled programs, in profiles.
      feed: the layout of sources in the segments' inputs.
      layouts: the layout of each message.
      finite_checks: one for each message; empty without `finite`.
      hooks, metrics: for each hook, and for the metrics, a slice of `Plan.final_outputs`.
      status_message: the number of the message that carries the status; -1 if there is none.
      min_microbatches: the minimum number of microbatches of every step.
    """

    def __init__(self, plans: Planner, world: World, *, status: int, finite: bool, name: str):
        self.plans, self.plan, self.name = plans, plans.reference, name
        plan = self.plan
        self.label = re.sub(r"\W+", "_", plan.graph.name).strip("_") + "_"
        self.feed = Feed.of(plan)
        self.layouts = lay_out_all(plan.messages, capacity=world.capacity, status=status)
        platform = world.devices[0].platform if world.local_mesh is None else "mesh"
        self.finite_checks = [FiniteCheck(layout, platform) for layout in self.layouts] if finite else []
        of_hooks = [len(hook.values) for hook in plan.hooks]
        first = len(plan.final_outputs) - sum(of_hooks) - len(plan.graph.metrics)
        ends = list(accumulate(of_hooks, initial=first))
        self.hooks, self.metrics = [slice(*found) for found in pairwise(ends)], slice(ends[-1], None)
        self.status_message = next((n for n, layout in enumerate(self.layouts) if layout.status), -1)
        self._compares_groups = any(source.name == MICROBATCHES.name for source in plan.sources)
        self.min_microbatches = self.min_microbatches_of(1, 1) if world.capacity == 1 else 1

    def min_microbatches_of(self, size: int, global_batch: int) -> int:
        """Return the minimum number of microbatches of a worker: two if it has all examples and the driver compares
        groups of examples, as a noise scale does.
        """
        return 2 if size == global_batch and self._compares_groups else 1


class Outcome(NamedTuple):
    """The result of one step. Hook values and metrics are replicated, and on the first worker's device.

    Attributes:
      results: those of the final segment (`Plan.final_outputs`); empty if the step was not committed.
      compute_seconds: by local index; NaN if the step ended before its last message.
      microbatches: sizes of microbatches, by local index.
      trouble: why the step was not committed, or `None`.
    """

    steps: StepPlan
    results: list[Any]
    compute_seconds: list[float]
    microbatches: list[Microbatches]
    messages: int
    message_bytes: int
    trouble: Trouble | None = None

    @property
    def hooks(self) -> list[list[jax.Array]]:
        """The leaves of each hook's values."""
        return [self.results[place] for place in self.steps.hooks]

    @property
    def metrics(self) -> list[jax.Array]:
        """The leaves of the metrics."""
        return self.results[self.steps.metrics]

    @property
    def committed(self) -> bool:
        """Whether the step has changed the state."""
        return self.trouble is None


@dataclass(eq=False)
class StepContext:
    """The parts that run the steps of one plan, shared by the engine and all forms of steps.

    Attributes:
      placements: where each worker of this process computes.
      channels: one for each message.
      waiters: threads that wait for the end of microbatches, one per device, if these run on several; else `None`.
    """

    step_plan: StepPlan
    world: World
    workers: WorkerState
    kernels: Kernels
    programs: Programs
    placements: Sequence[Placement]
    channels: list[Channel]
    status: StepStatus
    activity: Activity
    waiters: ThreadPoolExecutor | None


Prefetch = Callable[[Sequence[int]], None]  # starts to fetch the examples of a next step with these sizes


def bytes_on_device(placement: Placement, number: int, layout: Layout) -> int:
    """Return the bytes of a message's parts on one device of a worker."""
    shapes = [placement.sharding(("part", number, j), p.shape).shard_shape(p.shape) for j, p in enumerate(layout.parts)]
    return sum(math.prod(shape) * p.dtype.itemsize for shape, p in zip(shapes, layout.parts, strict=True))


def bytes_per_execution(plan: Plan, layouts: Sequence[Layout], placement: Placement) -> int:
    """Return the bytes of the parts that a microbatch writes on a device, at the level with most of them."""
    of_messages = [bytes_on_device(placement, number, layout) for number, layout in enumerate(layouts)]
    return max((sum(of_messages[number] for number in plan.sent_at(level)) for level in plan.microbatches), default=0)
