"""Data and objects that all steps of an engine share, computed once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from adaptive.base.activity import Activity
from adaptive.base.channel import Channel
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner

from .finite import FiniteCheck
from .kernels import Kernels
from .message import Layout, lay_out_all
from .neutral import NeutralContributions
from .placement import Placement
from .programs import Programs
from .segment import Feed
from .worker_state import WorkerState


class StatusLike(Protocol):
    """The status that processes exchange in each step, with its last message."""

    length: int  # elements in the message
    own_seconds: tuple[float, Sequence[float], Sequence[float]]  # seconds of this process: see `Activity.of_workers`

    def encode(self) -> np.ndarray:
        """Return this process's part of the status; shape=(length,)."""
        ...

    def decode(self, elements: np.ndarray) -> None:
        """Apply the status, summed over all processes; shape=(length,). May raise an error that ends the run."""
        ...


class NoStatus:
    """A status without elements."""

    length = 0
    own_seconds: tuple[float, Sequence[float], Sequence[float]] = 0.0, (), ()

    def encode(self) -> np.ndarray:
        return np.zeros(0)

    def decode(self, elements: np.ndarray) -> None:
        del elements


class StepPlan:
    """Data that is the same in every step of a plan.

    Args:
      plans: the driver's plans, for any number of examples. Everything except kernels comes from their reference.
      status: number of elements of the status.
      finite: whether values that are not finite prevent a commit.
      name: the program's name.

    Attributes:
      plan: the reference plan.
      label: prefix of the names of compiled programs, in profiles.
      feed: the layout of sources in the segments' inputs.
      layouts: the layout of each message.
      finite_checks: one for each message; empty without `finite`.
      part_slices: for each message, its parts among those of its level.
      hooks, metrics: for each hook, and for the metrics, a slice of `Plan.final_outputs`.
      status_message: the number of the message that carries the status; -1 if there is none.
    """

    def __init__(self, plans: Planner, world: World, *, status: int, finite: bool, name: str):
        self.plans, self.plan, self.name = plans, plans.reference, name
        plan = self.plan
        self.label = re.sub(r"\W+", "_", plan.graph.name).strip("_") + "_"
        self.feed = Feed.of(plan)
        self.layouts = lay_out_all(plan.messages, capacity=world.capacity, status=status)
        platform = world.devices[0].platform if world.local_mesh is None else "mesh"
        self.finite_checks = [FiniteCheck(layout, platform) for layout in self.layouts] if finite else []
        self.part_slices = part_slices(plan, self.layouts)
        of_hooks = [len(hook.values) for hook in plan.hooks]
        first = len(plan.final_outputs) - sum(of_hooks) - len(plan.graph.metrics)
        ends = list(accumulate(of_hooks, initial=first))
        self.hooks, self.metrics = [slice(*found) for found in pairwise(ends)], slice(ends[-1], None)
        self.status_message = next((n for n, layout in enumerate(self.layouts) if layout.status), -1)

    def about(self, number: int, step: int) -> str:
        """Return the name of a message in errors."""
        return f"message {number + 1} of step {step} of {self.name}"


@dataclass(eq=False)
class StepContext:
    """The parts that run the steps of one plan, shared by the engine and all forms of steps.

    Attributes:
      placements: where each worker of this process computes.
      neutral: contributions of workers without examples.
      channels: one for each message.
      waiters: threads that wait for the end of microbatches, one per device, if these run on several; else `None`.
    """

    step_plan: StepPlan
    world: World
    workers: WorkerState
    kernels: Kernels
    programs: Programs
    placements: Sequence[Placement]
    neutral: NeutralContributions
    channels: list[Channel]
    status: StatusLike
    activity: Activity
    waiters: ThreadPoolExecutor | None


Prefetch = Callable[[Sequence[int]], None]  # starts to fetch the examples of a next step with these sizes


def bytes_per_execution(plan: Plan, layouts: Sequence[Layout]) -> int:
    """Return the bytes of the parts that a microbatch writes, at the level with most of them."""
    of_messages = [sum(math.prod(p.shape) * p.dtype.itemsize for p in layout.parts) for layout in layouts]
    return max((sum(of_messages[number] for number in plan.sent_at(level)) for level in plan.microbatches), default=0)


def part_slices(plan: Plan, layouts: Sequence[Layout]) -> list[slice]:
    """Return for each message the slice of its parts among those of its level."""
    places: dict[int, slice] = {}
    for level in range(plan.levels):
        sent = plan.sent_at(level)
        ends = accumulate((len(layouts[number].parts) for number in sent), initial=0)
        places.update((number, slice(*found)) for number, found in zip(sent, pairwise(ends), strict=True))
    return [places[number] for number in range(len(layouts))]
