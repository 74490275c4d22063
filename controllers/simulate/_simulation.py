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
        """Examples per second times their statistical efficiency, relative to batches of one example; NaN without a
        noise scale of the cluster.
        """
        scale = None if self.cluster is None else self.cluster.noise_scale
        if scale is None:
            return float("nan")
        batches = self.global_batch
        consumed = np.cumsum(batches)
        taught = [batch * efficiency(scale(done), batch) for done, batch in zip(consumed, batches, strict=True)]
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

    The program's own code (`adaptive/control`) merges, clips, rounds and applies the decisions; only the steps are
    simulated. As in a program, a policy receives the seconds of the previous step.

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
      Sizes, seconds and decisions of all steps, and the best possible ones.

    Raises:
      ValueError: the number of workers is unknown, or `sizes` and the cluster disagree about it.
    """
    if isinstance(times, Cluster):
        function, cluster = None, times
    elif isinstance(sizes, Sequence):
        function, cluster = times, Cluster(BatchTime(np.ones(len(sizes))))
    else:
        raise ValueError("simulate: the number of workers is unknown: give an initial size per worker, or a Cluster.")
    n = cluster.workers
    if isinstance(sizes, Sequence) and len(sizes) != n:
        raise ValueError(f"simulate: {len(sizes)} initial sizes for {n} workers.")
    hooks = [Hooked(policy, values, every)] if isinstance(policy, Policy) else list(policy)
    draw = np.random.default_rng(seed)
    noise = 1 + jitter * np.clip(draw.standard_normal((steps, n)), -3, 3)
    if cluster.noise:
        noise = noise * cluster.noise(draw, steps, n)
    quantum = limits.quantum if limits else cluster.quantum
    return _Run(hooks, cluster, function, limits or cluster.limits, quantum, noise, seed).run(sizes, steps)


class _Run:
    """One simulation in progress."""

    def __init__(
        self,
        hooks: Sequence[Hooked],
        cluster: Cluster,
        function: Callable[[int, np.ndarray], np.ndarray] | None,
        limits: Limits,
        quantum: int | None,
        noise: np.ndarray,
        seed: int,
    ):
        n = noise.shape[1]
        self._hooks, self._limits, self._noise, self._quantum = hooks, limits, noise, quantum
        self._function, self._cluster = function, cluster
        self._sensors = np.random.default_rng([seed, 1])
        self._clock, self._consumed, self._slowdown = 0.0, 0, np.ones(n)
        self._measured, self._iteration = np.full(n, np.nan), float("nan")
        self._states: Hooks | None = None
        self._workers = Workers(n, cluster.first, cluster.present, cluster.join_after, cluster.respawn)
        self._membership = Membership(self._workers)
        self._joined_in: dict[int, int] = {}

    def run(self, first: Sequence[int] | int, steps: int) -> Simulation:
        n, cluster = len(self._measured), self._cluster
        sizes, seconds = np.zeros((steps, n), np.int64), np.zeros((steps, n))
        slowdown, starts, there = np.ones((steps, n)), np.empty(steps), np.zeros((steps, n), bool)
        overhead = np.zeros(steps)
        decisions: list[tuple[int, Decision]] = []
        for k in range(steps):
            self._change_members(k + 1, first if k == 0 else None)
            there[k, list(self._sizes.members)] = True
            starts[k], sizes[k] = self._clock, self._sizes.current
            busy = sizes[k] > 0
            if cluster.slowdown:
                slowdown[k] = self._slowdown = cluster.slowdown(k + 1, self._clock)
            took = self._function(k + 1, sizes[k]) if self._function else cluster.times(sizes[k]) * slowdown[k]
            seconds[k] = np.where(busy, took * self._noise[k], 0.0)
            slowest, members = float(seconds[k].max()), self._sizes.members
            overhead[k] = cluster.overhead_of(len(members))
            decision = self._run_hooks(k + 1)
            if decision:
                decisions.append((k + 1, decision))
            self._measured = np.where(busy, seconds[k], np.nan)
            self._iteration = slowest + overhead[k]
            self._clock += self._iteration
        known = None if self._function else cluster
        rows = sizes, seconds, decisions, starts, known, slowdown, self._noise, self._limits, there, overhead
        return Simulation(*rows)

    def _change_members(self, step: int, first: Sequence[int] | int | None) -> None:
        """Apply losses, leaves and joins before a step; before the first one, set the `first` sizes."""
        self._workers.begin(step)
        self._membership.change()
        before, members = self._joined_in, self._workers.members
        self._joined_in = dict(zip(members, self._workers.joined_in_generation, strict=True))
        if first is not None:
            total = first if isinstance(first, int) else sum(first)
            shares = None if isinstance(first, int) else [float(size) for size in first]
            limits = self._limits._replace(quantum=1, examples=max(EXAMPLES, total))
            self._sizes = BatchSizes(total, shares, limits, quantum=self._quantum, members=members)
        elif self._joined_in != before:
            joined = [slot for slot, since in self._joined_in.items() if before.get(slot) != since]
            assert self._states is not None, "created after the first step"
            self._states.change_members(joined, self._sizes)
            self._sizes.change_members(members, joined)

    def _run_hooks(self, step: int) -> Decision | None:
        """Run the hooks after a step, and apply their decision to the next sizes and members."""
        sizes = self._sizes
        ran = sizes.current, sizes.previous
        self._consumed += sum(sizes.current)
        values = [self._read(hook.signals, step) for hook in self._hooks]
        if self._states is None:
            plans = [_plan(*pair, len(ran[0])) for pair in zip(self._hooks, values, strict=True)]
            self._states = Hooks(plans, len(ran[0]), self._membership)
        sizes.on_agreed(can_make_pending=sizes.can_make_pending, can_make_any=sizes.can_make_any)
        sizes.step_done()
        taken = TakenStep(step, self._consumed / EXAMPLES, ran, sizes.members, self._consumed)
        decision, _, requests = self._states.run(taken, [jax.tree.leaves(v) for v in values], sizes)
        if decision is not None:
            apply_decision(decision, sizes, self._membership, requests)
        return decision

    def _read(self, reads: tuple[str, ...] | Reader, step: int) -> tuple[Any, ...]:
        if callable(reads):
            return reads(step, self._measured)
        return tuple(self._signal(name, step) for name in reads)

    def _signal(self, name: str, step: int) -> Any:
        """Return a value that a driver could read in this step: times of the previous step, the machine's state now."""
        cluster = self._cluster
        match name:
            case "seconds":
                return self._measured
            case "iteration_seconds":
                return np.asarray(self._iteration)
            case "cpu_available":
                return self._sensed(cluster.cpu, np.minimum(1 / self._slowdown, 1.0), step)
            case "memory_available":
                return self._sensed(cluster.memory, np.full(len(self._measured), 1e9), step)
            case "noise_scale":
                scale = cluster.noise_scale(self._consumed) if cluster.noise_scale else float("nan")
                return Bounds(scale, 0.9 * scale, 1.1 * scale)
            case "capacities":
                return cluster.capacities
        raise ValueError(f"simulate: unknown value {name!r}; the known ones are {', '.join(SIGNALS)}.")

    def _sensed(self, trace: Trace | None, default: np.ndarray, step: int) -> np.ndarray:
        values = trace(step, self._clock) if trace else default
        values = np.where(np.isin(np.arange(len(values)), self._sizes.members), values, np.nan)
        if not self._cluster.sensor_noise:
            return values
        return values * (1 + self._cluster.sensor_noise * self._sensors.standard_normal(len(values)))


def _plan(hook: Hooked, values: tuple[Any, ...], n_workers: int) -> HookPlan:
    handler = PolicyHandler(hook.policy, hook.policy.name, "")
    handler.check(values, n_workers)
    return HookPlan(Hook(hook.policy.name, handler, hook.every, jax.tree.structure(values)), (), "")


def _best(total: int, times: BatchTime, slowdown: np.ndarray, here: np.ndarray, limits: Limits) -> np.ndarray:
    """Return the exact best split over the present workers; 0 for the others."""
    n = len(here)
    now = BatchTime(*(np.broadcast_to(np.asarray(part, np.float64), n)[here] * slowdown[here] for part in times))
    sizes = np.zeros(n, np.int64)
    sizes[here] = fill(total, now, np.asarray(limits.lower)[here], np.asarray(limits.upper)[here])
    return sizes
