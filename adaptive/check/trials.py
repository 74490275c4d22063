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
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.sources import Reading, Source
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels import KernelOptions
from adaptive.runtime.kernels.microbatches import Microbatches
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.step_context import StepContext

from .dependencies import Output
from .rounding import in_double, nudged
from .widen import paired, reduced, wide

Split = tuple[Microbatches, ...]  # each worker's microbatches


# --- splits -----------------------------------------------------------------------------------------------------------


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
    examples, n, found = sum(map(sum, even)), len(even), dict.fromkeys([even])
    if examples < plan.multiple * max(2, n):
        return ()
    unit = plan.multiple * (examples // plan.multiple // max(8, 2 * n) | 1)
    for _ in range(20 * count):
        split: list[Microbatches] = []
        for units in _random_parts(rng, examples // unit, n):
            calls = int(rng.integers(least, max(least, 3) + 1)) if plan.splittable else 1
            split.append(tuple(unit * part for part in _random_parts(rng, units, min(calls, units))))
        split[-1] = (*split[-1][:-1], split[-1][-1] + examples % unit)
        if plan.splittable and most is not None:
            cut = [[_even_parts(size, -(-size // most)) for size in own] for own in split]
            split = [tuple(part for parts in own for part in parts) for own in cut]
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


def _random_parts(rng: np.random.Generator, total: int, count: int) -> Microbatches:
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.array([], int)
    return tuple(np.diff([0, *cuts, total]).tolist())


def _even_parts(total: int, count: int) -> Microbatches:
    return tuple(total // count + (i < total % count) for i in range(count))


# --- outputs ----------------------------------------------------------------------------------------------------------


def outputs_of(plan: Plan) -> list[Output]:
    """Return all replicated outputs of the driver, in the order of `Result.outputs`."""
    graph = plan.graph
    state = [Output("state", graph.state_names[i], i, graph.new_state[i]) for i in _compared(plan)]
    op_states = [Output("op_state", f"operator state {s.name!r}", k, a) for k, s in _shared(plan) for a in s.new]
    hooks = []
    for n, h in enumerate(plan.hooks):
        paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(h.hook.tree, h.values))
        names = [f"hook {h.hook.name!r}, values{jax.tree_util.keystr(path)}" for path, _ in paths]
        hooks += [Output("hook", name, n, a) for name, a in zip(names, h.values, strict=True)]
    labels = zip(graph.metric_labels, graph.metrics, strict=False)  # there are more; see `widened`
    metrics = [Output("metric", label, n, a) for n, (label, a) in enumerate(labels)]
    return [*state, *op_states, *hooks, *metrics]


def _compared(plan: Plan) -> list[int]:
    return [i for i in plan.changed_state if i not in plan.local_state]


def _shared(plan: Plan) -> list[tuple[int, Any]]:
    return [(k, s) for k, s in enumerate(plan.op_states) if s.scope == Scope.ALL]


# --- trials -----------------------------------------------------------------------------------------------------------


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
        plan = plans.reference
        n, there = plan.graph.capacity, engine.workers.present
        leaves, tree = jax.tree.flatten(batch)
        pairs = zip(leaves, engine.plan.graph.batch_vars, strict=True)
        rows = [wide(np.asarray(leaf).astype(v.aval.dtype, copy=False)) for leaf, v in pairs]
        self.plan, self.batch, self._seed = plan, jax.tree.unflatten(tree, rows), seed
        self.outputs, world = outputs_of(plan), LocalWorld(n, engine.world.devices[0])
        world.local_mesh = engine.world.local_mesh
        of = [there[w % len(there)] for w in range(n)]  # this process's workers stand in for others
        self.start = Start(
            [[wide(leaf) for leaf in engine.states[i]] for i in of],
            [[[wide(a) for a in s] for s in engine.op_states[i]] for i in of],
        )
        options = KernelOptions(deterministic=True)
        context = StepContext(plans, list(self.start.states[0]), world, kernels=options)
        self._trial, feed = Engine(context), context.feed
        context.feed = replace(
            feed, floats=tuple(map(_held_fixed, feed.floats)), ints=tuple(map(_held_fixed, feed.ints))
        )

    def close(self) -> None:
        self._trial.close()

    def run(self, start: Start, split: Split, step: int, *, batch: Any = None) -> Result:
        """Run the step with number `step` in the microbatches of `split`. `batch` replaces the bench's examples."""
        trial, count, whole = self._trial, len(self.outputs), self.batch if batch is None else batch
        trial.workers.replace(start.states, start.op_states)
        trial.compile_microbatches(split)  # compiles only what is missing
        sizes = [sum(microbatches) for microbatches in split]
        starts = [sum(sizes[:w]) for w in range(len(sizes))]
        shares = list(zip(starts, sizes, strict=True))
        batches = tuple(jax.tree.map(lambda a, s=s, n=n: a[s : s + n], whole) for s, n in shares)
        taking_part = np.asarray(sizes) > 0
        readings = [
            Reading(step, self._seed, w, sum(sizes), size, size, 1, begins, 1.0, 1.0, taking_part)
            for w, (begins, size) in enumerate(shares)
        ]
        outcome = trial.step(Share(tuple(sizes), tuple(starts), batches), readings, microbatches=split)
        assert outcome is not None, "workers of one device have no fused steps"
        after = Start([list(s) for s in trial.states], [[list(s) for s in of_one] for of_one in trial.op_states])
        old, kept = self._kept(start), self._kept(after)
        reported = [numbers_of(a) for a in (*(a for h in outcome.hooks for a in h), *outcome.metrics)]
        outputs, shown = [*kept, *reported][:count], [*kept, *reported][count:]
        with np.errstate(all="ignore"):
            changes = [np.abs(in_double(new) - in_double(before)) for new, before in zip(kept, old, strict=True)]
        changes += [np.abs(in_double(value)) for value in outputs[len(kept) :]]
        gaps = len(shown) - len(paired(self.plan.graph))
        return Result(dict(zip(reduced(self.plan), shown[:gaps], strict=False)), outputs, changes, shown[gaps:], after)

    def _kept(self, start: Start) -> list[np.ndarray]:
        state = [start.states[0][i] for i in _compared(self.plan)]
        return [numbers_of(a) for a in (*state, *(a for k, _ in _shared(self.plan) for a in start.op_states[0][k]))]

    def nudged(self, start: Start, rng: np.random.Generator) -> tuple[Start, Any]:
        """Return the state and examples with each number perturbed by a rounding error.

        Zeros of the state are perturbed too. That breaks an optimizer's moments, so only the reduced values of a trial
        from here are valid.
        """
        first = [nudged(leaf, rng, whole=True) for leaf in start.states[0]]
        local = self.plan.local_state  # left alone, because it differs between workers
        states = [[leaf if i in local else first[i] for i, leaf in enumerate(leaves)] for leaves in start.states]
        return Start(states, start.op_states), jax.tree.map(lambda a: nudged(a, rng, whole=False), self.batch)


def _held_fixed(source: Source) -> Source:
    """Return a source with a fixed value if it measures the machine, because its readings vary."""
    try:
        measured = source.read(None)  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        return source
    return replace(source, read=lambda reading: measured)
