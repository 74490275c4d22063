"""Simulation of a cluster under a virtual clock: runs policies on workers with known step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.decision import Decision, Limits
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decisions import apply_decision
from adaptive.control.hooks import Hooks, TakenStep
from adaptive.control.membership import Membership
from adaptive.graph.plan import HookPlan
from adaptive.operators.hooks import Hook
from controllers._hook import PolicyHandler
from controllers._policy import Policy
from controllers.policies.noise import Bounds
from controllers.timing._allocate import fill
from controllers.timing._batch_time import BatchTime
from controllers.timing._efficiency import efficiency

from ._cluster import Cluster, Trace
from ._workers import Workers

EXAMPLES = 1_000_000  # in the data set, to count epochs
SIGNALS = ("seconds", "iteration_seconds", "cpu_available", "memory_available", "noise_scale", "capacities")

Reader = Callable[[int, np.ndarray], tuple[Any, ...]]
"""`reader(step, seconds) -> values`: the policy's values after a step, from the seconds of the previous step."""


class Hooked(NamedTuple):
    """A policy and its values, as in `ctrl.hook(policy, *values, every=…)`."""

    policy: Policy
    reads: tuple[str, ...] | Reader | None = None  # names from SIGNALS, or a function; by default see `signals`
    every: int = 1

    @property
    def signals(self) -> tuple[str, ...] | Reader:
        """What the policy reads: `reads`; by default those of `Policy.reads` that are in SIGNALS, or the seconds."""
        named = tuple(name for name in self.policy.reads if name in SIGNALS)
        return (named or SIGNALS[:1]) if self.reads is None else self.reads


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation, step by step. An absent worker has size 0 and takes no time."""

    sizes: np.ndarray  # shape=(steps, n), examples per worker
    seconds: np.ndarray  # shape=(steps, n), compute seconds per worker
    decisions: list[tuple[int, Decision]]  # (step, the decision made after it)
    starts: np.ndarray  # shape=(steps,), seconds on the virtual clock when each step began
    cluster: Cluster | None  # None if the times were a function
    slowdown: np.ndarray  # shape=(steps, n), in each step
    noise: np.ndarray  # shape=(steps, n)
    limits: Limits
    members: np.ndarray  # shape=(steps, n), bool: the members of each step
    overhead: np.ndarray  # shape=(steps,), seconds of each step in which no worker computes

    @property
    def step_seconds(self) -> np.ndarray:
        """Seconds of each step: those of the slowest worker and the cluster's overhead; shape=(steps,)."""
        return self.seconds.max(axis=1) + self.overhead

    @property
    def global_batch(self) -> np.ndarray:
        """Examples per step over all workers; shape=(steps,)."""
        return self.sizes.sum(axis=1)

    @property
    def workers(self) -> np.ndarray:
        """Number of members in each step; shape=(steps,)."""
        return self.members.sum(axis=1)

    @property
    def changes(self) -> np.ndarray:
        """The steps before which sizes changed, for any reason."""
        return 1 + np.flatnonzero((np.diff(self.sizes, axis=0) != 0).any(axis=1))

    @property
    def adjustments(self) -> np.ndarray:
        """The steps before which the split was changed by a decision about it."""
        asked = {step for step, decision in self.decisions if decision.shares is not None}
        return np.array([step for step in self.changes.tolist() if step in asked], np.int64)

    @property
    def worker_seconds(self) -> float:
        """Worker-seconds of all members, waiting included: the cost of the run."""
        return float(self.step_seconds @ self.workers)

    @property
    def goodput(self) -> float:
        """Examples per second times their efficiency relative to single examples; NaN without a noise scale."""
        if self.cluster is None or self.cluster.noise_scale is None:
            return float("nan")
        batches, scale = self.global_batch, self.cluster.noise_scale
        taught = [b * efficiency(scale(done), b) for done, b in zip(np.cumsum(batches), batches, strict=True)]
        return float(sum(taught)) / self.total_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole simulation, on the virtual clock."""
        return float(self.step_seconds.sum())

    def seconds_to(self, examples: float) -> float:
        """Return the virtual time at which `examples` were processed, interpolated within a step; NaN if fewer were."""
        done = np.concatenate([[0], np.cumsum(self.global_batch)])
        if examples > done[-1]:
            return float("nan")
        ends = np.concatenate([self.starts, [self.starts[-1] + self.step_seconds[-1]]])
        return float(np.interp(examples, done, ends))

    @cached_property
    def ideal_sizes(self) -> np.ndarray:
        """The best split of each step's batch, for the true times and slowdowns of that step; shape=(steps, n)."""
        times, rows = self._true_times, np.zeros_like(self.sizes)
        known: dict[bytes, np.ndarray] = {}
        for k, (sizes, slow) in enumerate(zip(self.sizes, self.slowdown, strict=True)):
            here, total = sizes > 0, int(sizes.sum())
            key = slow.tobytes() + here.tobytes() + total.to_bytes(8, "little")
            if key not in known:
                known[key] = _best(total, times, slow, here, self.limits)
            rows[k] = known[key]
        return rows

    @cached_property
    def ideal_seconds(self) -> np.ndarray:
        """Seconds of the steps with `ideal_sizes`, under the same noise; shape=(steps,)."""
        return self._seconds_of(self.ideal_sizes, self.noise)

    @cached_property
    def over_ideal(self) -> np.ndarray:
        """Seconds of each step relative to the best split, without noise; shape=(steps,), 1 is best."""
        return self._seconds_of(self.sizes, 1.0) / self._seconds_of(self.ideal_sizes, 1.0)

    def _seconds_of(self, sizes: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
        seconds = np.where(sizes > 0, self._true_times(sizes) * self.slowdown * noise, 0.0)
        return seconds.max(axis=1) + self.overhead

    @property
    def _true_times(self) -> BatchTime:
        if self.cluster is None:
            raise ValueError("the best split is known only for a Cluster, but simulate() received a function of times.")
        return self.cluster.times


def simulate(
    policy: Policy | Sequence[Hooked],
    times: Cluster | Callable[[int, np.ndarray], np.ndarray],
    sizes: Sequence[int] | int,
    steps: int,
    *,
    every: int = 1,
    jitter: float = 0.0,
    seed: int = 0,
    limits: Limits | None = None,
    values: Reader | None = None,
) -> Simulation:
    """Run policies as a program would, on workers with given step times.

    The program's own code merges, clips, rounds and applies the decisions; only the steps are simulated. As in a
    program, a policy receives the seconds of the previous step.

    Args:
      policy: one policy; or several with what they read, in the driver's order.
      times: the cluster; or a function `times(step, sizes) -> seconds`, shape=(n,).
      sizes: examples per worker in the first step; or their sum, split equally.
      steps: number of steps.
      every: as for `hook`.
      jitter: relative standard deviation of the times, in addition to the cluster's noise.
      seed: of all random numbers, which do not depend on the policy.
      limits: by default the cluster's; for a function, at least one example per worker, without an upper bound.
      values: `values(step, seconds)`: the policy's values, instead of those that it names: see `Hooked`.

    Returns:
      Sizes, seconds and decisions of all steps.

    Raises:
      ValueError: the number of workers is unknown, or `sizes` and the cluster disagree about it.
    """
    first = np.asarray(sizes)
    if isinstance(times, Cluster):
        function, cluster = None, times
    elif first.ndim:
        function, cluster = times, Cluster(BatchTime(np.ones(len(first))))
    else:
        raise ValueError("simulate: the number of workers is unknown: give an initial size per worker, or a Cluster.")
    n = cluster.workers
    if first.ndim and len(first) != n:
        raise ValueError(f"simulate: {len(first)} initial sizes for {n} workers.")
    hooks = [Hooked(policy, values, every)] if isinstance(policy, Policy) else list(policy)
    draw = np.random.default_rng(seed)
    noise = 1 + jitter * np.clip(draw.standard_normal((steps, n)), -3, 3)
    if cluster.noise:
        noise = noise * cluster.noise(draw, steps, n)
    bounds = limits or cluster.limits
    run = _Run(hooks, cluster, bounds, limits.quantum if limits else cluster.quantum, first, seed)
    rows: list[tuple[Any, ...]] = []
    decisions: list[tuple[int, Decision]] = []
    for step in range(1, steps + 1):
        run.begin(step)
        starts, current, members = run.clock, np.array(run.sizes.current), run.sizes.members
        slowdown = np.ones(n) * (cluster.slowdown(step, starts) if cluster.slowdown else 1.0)
        took = function(step, current) if function else cluster.times(current) * slowdown
        seconds = np.where(current > 0, took * noise[step - 1], 0.0)
        overhead = cluster.overhead_of(len(members))
        if decision := run.hooks_after(step, slowdown, seconds, float(seconds.max()) + overhead):
            decisions.append((step, decision))
        rows.append((current, seconds, starts, slowdown, np.isin(np.arange(n), members), overhead))
    split, took, begun, slow, there, others = map(np.array, zip(*rows, strict=True))
    return Simulation(split, took, decisions, begun, None if function else cluster, slow, noise, bounds, there, others)


class _Run:
    """The program's own code between the steps of a simulation."""

    def __init__(
        self,
        hooks: Sequence[Hooked],
        cluster: Cluster,
        limits: Limits,
        quantum: int | None,
        first: np.ndarray,
        seed: int,
    ):
        self._hooks, self._cluster = hooks, cluster
        self._sensors = np.random.default_rng([seed, 1])
        self.clock, self._consumed = 0.0, 0
        self._measured, self._iteration = np.full(cluster.workers, np.nan), float("nan")
        self._states: Hooks | None = None
        self._workers = Workers(cluster)
        self._membership = Membership(self._workers)
        self._joined_in = self._generations()
        total, shares = first.sum().item(), first.tolist() if first.ndim else None
        limits = limits._replace(quantum=1, examples=max(EXAMPLES, total))
        self.sizes = BatchSizes(total, shares, limits, quantum=quantum, members=self._workers.members)

    def _generations(self) -> dict[int, int]:
        return dict(zip(self._workers.members, self._workers.joined_in_generation, strict=True))

    def begin(self, step: int) -> None:
        """Apply losses, leaves and joins before a step."""
        self._workers.begin(step)
        self._membership.change()
        before, self._joined_in = self._joined_in, self._generations()
        if self._joined_in != before and self._states is not None:
            joined = [slot for slot, since in self._joined_in.items() if before.get(slot) != since]
            self._states.change_members(joined, self.sizes)
            self.sizes.change_members(self._workers.members, joined)

    def hooks_after(self, step: int, slowdown: np.ndarray, seconds: np.ndarray, iteration: float) -> Decision | None:
        """Run the hooks after a step, and apply their decision to the next sizes and members."""
        sizes = self.sizes
        ran = sizes.current, sizes.previous
        self._consumed += sum(sizes.current)
        values = [self._read(hook.signals, step, slowdown) for hook in self._hooks]
        if self._states is None:
            plans = [_plan(*pair, len(ran[0])) for pair in zip(self._hooks, values, strict=True)]
            self._states = Hooks(plans, len(ran[0]), self._membership)
        sizes.on_agreed(can_make_pending=sizes.can_make_pending, can_make_any=sizes.can_make_any)
        sizes.step_done()
        taken = TakenStep(step, self._consumed / EXAMPLES, ran, sizes.members, self._consumed)
        decision, _, requests = self._states.run(taken, [jax.tree.leaves(v) for v in values], sizes)
        if decision is not None:
            apply_decision(decision, sizes, self._membership, requests)
        self._measured, self._iteration = np.where(np.array(ran[0]) > 0, seconds, np.nan), iteration
        self.clock += iteration
        return decision

    def _read(self, reads: tuple[str, ...] | Reader, step: int, slowdown: np.ndarray) -> tuple[Any, ...]:
        if callable(reads):
            return reads(step, self._measured)
        return tuple(self._signal(name, step, slowdown) for name in reads)

    def _signal(self, name: str, step: int, slowdown: np.ndarray) -> Any:
        """Return a value that a driver could read in this step: times of the previous step, the machine's state now."""
        cluster = self._cluster
        match name:
            case "seconds":
                return self._measured
            case "iteration_seconds":
                return np.asarray(self._iteration)
            case "cpu_available":
                return self._sensed(cluster.cpu, np.minimum(1 / slowdown, 1.0), step)
            case "memory_available":
                return self._sensed(cluster.memory, np.full(len(self._measured), 1e9), step)
            case "noise_scale":
                scale = cluster.noise_scale(self._consumed) if cluster.noise_scale else float("nan")
                return Bounds(scale, 0.9 * scale, 1.1 * scale)
            case "capacities":
                return cluster.capacities
        raise ValueError(f"simulate: unknown value {name!r}; the known ones are {', '.join(SIGNALS)}.")

    def _sensed(self, trace: Trace | None, default: np.ndarray, step: int) -> np.ndarray:
        values = trace(step, self.clock) if trace else default
        values = np.where(np.isin(np.arange(len(values)), self.sizes.members), values, np.nan)
        if not self._cluster.sensor_noise:
            return values
        return values * (1 + self._cluster.sensor_noise * self._sensors.standard_normal(len(values)))


def _plan(hook: Hooked, values: tuple[Any, ...], n_workers: int) -> HookPlan:
    handler = PolicyHandler(hook.policy, hook.policy.name, "")
    handler.check(values, n_workers)
    return HookPlan(Hook(hook.policy.name, handler, hook.every, jax.tree.structure(values)), (), "")


def _best(total: int, times: BatchTime, slowdown: np.ndarray, here: np.ndarray, limits: Limits) -> np.ndarray:
    """Return the exact best split over the present workers; 0 for the others."""
    now = BatchTime(*((np.asarray(part, np.float64) * slowdown)[here] for part in times))
    sizes = np.zeros(len(here), np.int64)
    sizes[here] = fill(total, now, np.asarray(limits.lower)[here], np.asarray(limits.upper)[here])
    return sizes
