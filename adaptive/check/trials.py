"""Trials for `Program.check`: one batch under different splits, run by simulated workers on one device.

Everything else is fixed, including measurements of the machine, so that trials differ only by the split and rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.values.arrays import numbers_of
from adaptive.base.values.jaxprs import Var
from adaptive.data.stream import Share
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.sources import Reading, Source
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels import KernelOptions
from adaptive.runtime.kernels.microbatches import Microbatches
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.step_context import StepContext

from .dependencies import compared, outputs_of, shared
from .rounding import in_double, nudged
from .widen import paired, results_of_collectives, wide

Split = tuple[Microbatches, ...]  # each worker's microbatches


def even_split(examples: int, workers: int, plan: Plan, *, least: int = 1, most: int | None = None) -> Split:
    """Return equal shares, each in as few microbatches as possible: at least `least`, of at most `most` examples."""
    sizes = [plan.multiple * n for n in _even_parts(examples // plan.multiple, workers)]
    if not plan.splittable:
        return tuple((size,) for size in sizes)
    return tuple(_even_parts(size, min(size, max(least, -(-size // (most or size or 1))))) for size in sizes)


def uneven_splits(
    rng: np.random.Generator, count: int, even: Split, plan: Plan, *, least: int = 1, most: int | None = None
) -> tuple[Split, ...]:
    """Return up to `count` random splits, distinct and different from the even one.

    Sizes are multiples of an odd unit, but for the last one, so that there are few of them to compile, odd and even.
    """
    examples, n, found = sum(map(sum, even)), len(even), {even: None}
    if examples < plan.multiple * max(2, n):
        return ()
    unit = plan.multiple * (examples // plan.multiple // max(8, 2 * n) | 1)
    for _ in range(20 * count):
        split = []
        for size in _random_parts(rng, examples, n, unit):
            calls = int(rng.integers(least, max(least, 3) + 1)) if plan.splittable else 1
            own = _random_parts(rng, size, min(calls, size // unit), unit)
            bound = most if plan.splittable and most else examples
            split.append(tuple(part for call in own for part in _even_parts(call, -(-call // bound))))
        if len(found) <= count:
            found[tuple(split)] = None
    return tuple(found)[1:]


def with_fewer_workers(split: Split, plan: Plan) -> list[Split]:
    """Return the same microbatches on one worker fewer, and on a single worker. A split with one worker has none.

    The others get no examples, like free worker slots; the workers that the driver's collectives need keep theirs.
    Microbatches stay as they are, because in one the batch of all workers may exceed one worker's memory.
    """
    n, needed = len(split), {slot for message in plan.messages for c in message for slot in c.how.needed}
    order = sorted(range(n), key=lambda slot: (slot not in needed, -slot))
    microbatches, found = [size for own in split for size in own], []
    for count in dict.fromkeys([n - 1, 1] if plan.splittable else [n - 1]):
        if max(1, len(needed)) <= count < n:
            own = {slot: tuple(microbatches[i::count]) for i, slot in enumerate(order[:count])}
            whole = {slot: sizes if plan.splittable else (sum(sizes),) for slot, sizes in own.items()}
            found.append(tuple(whole.get(slot, ()) for slot in range(n)))
    return found


def _random_parts(rng: np.random.Generator, total: int, count: int, unit: int) -> Microbatches:
    """Return `count` random numbers with this sum, all but the last multiples of `unit`."""
    cuts = np.sort(rng.choice(total // unit - 1, count - 1, replace=False)) + 1 if count > 1 else np.array([], int)
    return tuple(np.diff([0, *(unit * cuts), total]).tolist())


def _even_parts(total: int, count: int) -> Microbatches:
    return tuple(total // count + (i < total % count) for i in range(count))


class Start(NamedTuple):
    """The start of a step: state and operator states of every worker."""

    states: list[list[Any]]
    op_states: list[list[list[Any]]]


class Result(NamedTuple):
    """The result of a step."""

    contributions: dict[Var, np.ndarray]  # reduced values, by the variable of their result
    outputs: list[np.ndarray]
    changes: list[np.ndarray]  # absolute change of each output by the step; for metrics and hook values, their value
    gaps: list[np.ndarray]  # of what monitors are given as means; see `widened`
    after: Start


class Bench:
    """Runs trials of `plans`, the driver's in double precision, from the state of `engine`, which is not changed."""

    def __init__(self, plans: Planner, engine: Engine, batch: Any, *, seed: int):
        self.plan, self.outputs, self._seed = plans.reference, outputs_of(plans.reference), seed
        n, there = self.plan.graph.capacity, engine.workers.present
        leaves, tree = jax.tree.flatten(batch)
        pairs = zip(leaves, engine.plan.graph.batch_vars, strict=True)
        self.batch = tree.unflatten(wide(np.asarray(leaf).astype(v.aval.dtype, copy=False)) for leaf, v in pairs)
        world = LocalWorld(n, engine.world.devices[0])
        world.local_mesh = engine.world.local_mesh
        of = [there[w % len(there)] for w in range(n)]  # this process's workers stand in for others
        self.start = Start(
            [[wide(leaf) for leaf in engine.states[i]] for i in of],
            [[[wide(a) for a in s] for s in engine.op_states[i]] for i in of],
        )
        context = StepContext(plans, list(self.start.states[0]), world, kernels=KernelOptions(deterministic=True))
        self._trial, feed = Engine(context), context.feed
        context.feed = replace(
            feed, floats=tuple(map(_held_fixed, feed.floats)), ints=tuple(map(_held_fixed, feed.ints))
        )

    def close(self) -> None:
        self._trial.close()

    def run(self, start: Start, split: Split, step: int, batch: Any = None) -> Result:
        """Run the step with number `step` in the microbatches of `split`. `batch` replaces the bench's examples."""
        trial, whole = self._trial, self.batch if batch is None else batch
        trial.workers.replace(start.states, start.op_states)
        trial.compile_microbatches(split)  # compiles only what is missing
        sizes = tuple(map(sum, split))
        starts = tuple(sum(sizes[:w]) for w in range(len(sizes)))
        shares = list(zip(starts, sizes, strict=True))
        batches = tuple(jax.tree.map(lambda a, s=s, n=n: a[s : s + n], whole) for s, n in shares)
        taking_part = np.asarray(sizes) > 0
        readings = [
            Reading(step, self._seed, w, sum(sizes), size, size, 1, begins, 1.0, 1.0, taking_part)
            for w, (begins, size) in enumerate(shares)
        ]
        outcome = trial.step(Share(sizes, starts, batches), readings, microbatches=split)
        assert outcome is not None, "workers of one device have no fused steps"
        after = Start([list(s) for s in trial.states], [[list(s) for s in of_one] for of_one in trial.op_states])
        old, kept = self._kept(start), self._kept(after)
        values = [*kept, *(numbers_of(a) for a in (*(a for h in outcome.hooks for a in h), *outcome.metrics))]
        outputs, shown = values[: len(self.outputs)], values[len(self.outputs) :]
        with np.errstate(all="ignore"):
            changes = [np.abs(in_double(new) - in_double(before)) for new, before in zip(kept, old, strict=True)]
        changes += [np.abs(in_double(value)) for value in outputs[len(kept) :]]
        gaps = len(shown) - len(paired(self.plan.graph))
        found = dict(zip(results_of_collectives(self.plan.graph), shown[:gaps], strict=False))
        return Result(found, outputs, changes, shown[gaps:], after)

    def _kept(self, start: Start) -> list[np.ndarray]:
        state = [start.states[0][i] for i in compared(self.plan)]
        return [numbers_of(a) for a in (*state, *(a for k, _ in shared(self.plan) for a in start.op_states[0][k]))]

    def run_nudged(self, start: Start, split: Split, step: int, rng: np.random.Generator) -> Result:
        """Run a step in which each number of the state and the examples is perturbed by a rounding error.

        Zeros of the state are perturbed too. That breaks an optimizer's moments, so only the reduced values are valid.
        """
        first = [nudged(leaf, rng, whole=True) for leaf in start.states[0]]
        local = self.plan.local_state  # left alone, because it differs between workers
        states = [[leaf if i in local else first[i] for i, leaf in enumerate(leaves)] for leaves in start.states]
        batch = jax.tree.map(lambda a: nudged(a, rng, whole=False), self.batch)
        return self.run(Start(states, start.op_states), split, step, batch)


def _held_fixed(source: Source) -> Source:
    """Return a source with a fixed value if it measures the machine, because its readings vary."""
    try:
        measured = source.read(None)  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        return source
    return replace(source, read=lambda reading: measured)
