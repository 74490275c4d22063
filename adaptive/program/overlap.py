"""The decision whether to split the backward pass into stages, so that gradients are sent while others are computed.

Stages cost time: one more message each, and values that a single program would not have to store. They pay if messages
are slow, as between hosts. So when a program is built on several hosts, it measures the time of a message of this size.
On one host, where a message is a copy in memory, nothing is measured.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import DriverError
from adaptive.base.world import World
from adaptive.base.world_messages import retry_on_members_changed
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.graph.stages import Groups, always_sent, choose
from adaptive.runtime.message import lay_out

Wanted = bool | int | Literal["auto"]

LEAST_SECONDS = 0.01  # least time of an exchange for which stages pay; a stage costs some 0.1 ms
MOST_STAGES = 4
_LEAST_BYTES = 64 << 10  # smaller messages are not measured: at 50 Mbit/s they take `LEAST_SECONDS`
_SAMPLE_BYTES = 4 << 20
_ROUNDS = 4


class Overlap(NamedTuple):
    """The decision on overlap, and its reason. Replicated."""

    stages: Groups
    why: str

    @property
    def in_words(self) -> str:
        """The decision for `explain`; "" if there is nothing to say."""
        return self.why and f"{'on' if self.stages else 'off'}: {self.why}"


def checked(overlap: Any) -> Wanted:
    """Return the argument `overlap`, checked.

    Raises:
      DriverError: it is neither "auto", a bool, nor a number of stages.
    """
    if overlap == "auto" or isinstance(overlap, bool):
        return overlap
    if isinstance(overlap, int | np.integer) and overlap >= 2:
        return int(overlap)
    raise DriverError(
        f'overlap={overlap!r} must be "auto", True, False, or a number of stages, 2 or more: the number of programs '
        "into which the backward pass is cut, so that gradients are sent while others are computed."
    )


def overlapped(
    planner: Planner, world: World, wanted: Wanted, *, hosts: int, deterministic: bool, about: str
) -> Overlap:
    """Decide on overlap, equally on all processes, and partition the plan into stages. Communicates if it measures.

    Args:
      hosts: number of hosts of the world's processes.
      deterministic: whether results must not depend on measured times.
      about: the measured message, for errors.
    """
    plan = planner.reference
    if wanted is False:
        return Overlap({}, "overlap=False")
    if wanted == "auto":
        found = _where_it_pays(plan, world, hosts, deterministic, about)
    else:
        most = MOST_STAGES if wanted is True else int(wanted)
        found = _cut(plan, most, f"overlap={wanted}")
    if found.stages:
        planner.cut_in_stages(found.stages)
    return found


def _cut(plan: Plan, most: int, why: str) -> Overlap:
    groups = choose(plan, most)
    if not groups:
        why += ", but the driver has no stages: no message is known long before the others"
    return Overlap(groups, why)


def _where_it_pays(plan: Plan, world: World, hosts: int, deterministic: bool, about: str) -> Overlap:
    nbytes = max((_nbytes(plan, level, world.capacity) for level in plan.microbatches), default=0)
    for off, why in (
        (world.processes == 1, ""),
        (hosts == 1, "all processes are on one host"),
        (world.spawns, "processes that are spawned later could not take part in the measurement"),
        (deterministic, "deterministic=True, and the decision would depend on measured time"),
        (nbytes < _LEAST_BYTES, "messages are small"),
    ):
        if off:
            return Overlap({}, why)
    if not choose(plan, 2):
        return _cut(plan, 2, f"{hosts} hosts")
    seconds = measured(world, nbytes, about)
    why = f"{nbytes / 1e6:,.1f} MB take about {1e3 * seconds:,.0f} ms between {hosts} hosts"
    if seconds < LEAST_SECONDS:
        return Overlap({}, why)
    return _cut(plan, stages_for(seconds), why)


def stages_for(seconds: float) -> int:
    """Return the number of stages for an exchange of this duration. If more than two, each takes `LEAST_SECONDS`."""
    return min(MOST_STAGES, max(2, int(seconds / LEAST_SECONDS)))


def _nbytes(plan: Plan, level: int, capacity: int) -> int:
    message = always_sent(plan, level)
    return 0 if message is None else lay_out(message.contributions, capacity=capacity, status=0).nbytes


def measured(world: World, nbytes: int, about: str) -> float:
    """Return the seconds of a message on the slowest process. Communicates."""
    count = min(nbytes, _SAMPLE_BYTES) // 4
    parts = [[jax.device_put(np.zeros(n, np.float32), d) for n in (1, count)] for d in world.devices]
    jax.block_until_ready(parts)
    least = float("inf")
    for _ in range(_ROUNDS):  # the first ones create buffers and connections
        world.barrier()
        began = time.perf_counter()
        retry_on_members_changed(
            lambda: world.exchange(parts, ["sum", "sum"], np.zeros(0, np.float32), "overlap", f"measuring {about}")
        )
        least = min(least, time.perf_counter() - began)
    everyone = world.all_gather_bytes(json.dumps(least).encode(), f"what {about} takes")
    return max(map(json.loads, everyone)) * nbytes / (4 * count)
