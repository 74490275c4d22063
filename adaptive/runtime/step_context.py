"""What all steps of an engine share, and what a step returns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.activity import Activity
from adaptive.base.process.signals import Interrupts
from adaptive.base.revision import Revision
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.sources import MICROBATCHES

from .finite import FiniteCheck, Trouble
from .kernels import KernelOptions, Kernels
from .kernels.microbatches import Microbatches
from .kernels.programs import Programs
from .message import Layout, lay_out_all
from .placement import Placement, placements_of
from .segment import Feed, microbatch_functions
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


class StepContext:
    """What all steps of a plan share, computed once.

    Args:
      state: leaves of the initial state; see `WorkerState`.
      finite: whether values that are not finite prevent a commit.
      name: the program's name, which distinguishes its messages from those of other programs.
      revision: incremented when steps must be prepared again.

    Attributes:
      plan: the reference plan, from which everything except kernels comes.
      finite_checks: one for each message; empty without `finite`.
      shown: slices of `Plan.final_outputs`: one for each hook, and that of the metrics.
      status_message: the number of the message that carries the status; -1 if there is none.
      placements: of each worker of this process.
      waiters: threads that wait for kernels, one per device, if there are several.
    """

    def __init__(
        self,
        plans: Planner,
        state: list[Any],
        world: World,
        *,
        kernels: KernelOptions = KernelOptions(),  # noqa: B008  (it is frozen)
        status: StepStatus | None = None,
        finite: bool = False,
        name: str = "",
        activity: Activity | None = None,
        revision: Revision | None = None,
    ):
        revision, plan = revision or Revision(), plans.reference
        self.plans, self.plan, self.world, self.name = plans, plan, world, name
        self.status, self.activity = status or StepStatus(), activity or Activity(world)
        self.interrupts = Interrupts()
        self.label = re.sub(r"\W+", "_", plan.graph.name).strip("_") + "_"  # of compiled programs, in profiles
        self.feed = feed = Feed.of(plan)
        elements = self.status.length
        self.layouts = lay_out_all(plan.messages, capacity=world.capacity, status=elements)
        platform = world.devices[0].platform if world.local_mesh is None else "mesh"
        self.finite_checks = [FiniteCheck(layout, platform) for layout in self.layouts] if finite else []
        of_hooks = [len(hook.values) for hook in plan.hooks]
        first = len(plan.final_outputs) - sum(of_hooks) - len(plan.graph.metrics)
        ends = list(accumulate(of_hooks, initial=first))
        self.shown = [slice(*found) for found in pairwise(ends)], slice(ends[-1], None)
        self.status_message = next((n for n, layout in enumerate(self.layouts) if layout.status), -1)
        self._compares_groups = any(source.name == MICROBATCHES.name for source in plan.sources)
        self.placements = placements_of(world, plan, self.layouts, state)
        self.kernels = Kernels(
            lambda examples: microbatch_functions(plans(examples), feed, elements),  # does not hold this object
            self.placements,
            splittable=plan.splittable,
            min_microbatches=self.min_microbatches_of(1, world.capacity),
            microbatch_bytes=bytes_per_execution(plan, self.layouts, self.placements[0]),
            options=kernels,
            name=self.label,
            revision=revision,
        )
        self.workers = WorkerState(plan, state, self.placements, revision)
        constants = self.kernels.compiled.constants
        self.programs = Programs(plan, feed, self.layouts, self.placements, constants, label=self.label)
        self.channels = [
            world.channel(self.placements[0].specs(number, layout), layout.status, (name, number))
            for number, layout in enumerate(self.layouts)
        ]
        self.waiters = ThreadPoolExecutor(len(world.devices)) if len(world.devices) > 1 else None

    def min_microbatches_of(self, size: int, global_batch: int) -> int:
        """Return the minimum number of microbatches of a worker: two if it has all examples and the driver compares
        groups of examples, as a noise scale does.
        """
        return 2 if size == global_batch and self._compares_groups else 1


class Outcome(NamedTuple):
    """The result of one step. Hook values and metrics are replicated, and on the first worker's device."""

    shown: tuple[list[slice], slice]  # see `StepContext`
    results: list[Any]  # of the final segment (`Plan.final_outputs`); empty if the step was not committed
    compute_seconds: list[float]  # by local index; NaN if the step ended before its last message
    microbatches: list[Microbatches]  # by local index
    messages: int
    message_bytes: int
    trouble: Trouble | None = None  # why the step was not committed

    @property
    def hooks(self) -> list[list[jax.Array]]:
        """The leaves of each hook's values."""
        return [self.results[place] for place in self.shown[0]]

    @property
    def metrics(self) -> list[jax.Array]:
        """The leaves of the metrics."""
        return self.results[self.shown[1]]


Prefetch = Callable[[Sequence[int]], None]  # starts to fetch the examples of a next step with these sizes


def bytes_on_device(placement: Placement, number: int, layout: Layout) -> int:
    """Return the bytes of a message's parts on one device of a worker."""
    shapes = [placement.sharding(("part", number, j), p.shape).shard_shape(p.shape) for j, p in enumerate(layout.parts)]
    return sum(math.prod(shape) * p.dtype.itemsize for shape, p in zip(shapes, layout.parts, strict=True))


def bytes_per_execution(plan: Plan, layouts: Sequence[Layout], placement: Placement) -> int:
    """Return the bytes of the parts that a microbatch writes on a device, at the level with most of them."""
    of_messages = [bytes_on_device(placement, number, layout) for number, layout in enumerate(layouts)]
    return max((sum(of_messages[number] for number in plan.sent_at(level)) for level in plan.microbatches), default=0)
