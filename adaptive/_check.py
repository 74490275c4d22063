"""Is a step the same however its batch is split? Batch norm, summed losses and coupled examples are not.

The step is run on one batch by one worker in one call, and again with random uneven splits into workers and calls.
What is
compared first are the results of the reductions, where rounding is well understood, and only then the state: an
optimizer such as Adam magnifies rounding where gradients are near zero, so a difference in the state counts only
where it comes from a reduction that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from ._agreement import tail_length
from ._data import Share
from ._engine import Engine, copied
from ._errors import BatchSizeError
from ._local import LocalWorld
from ._message import unpack
from ._pieces import Pieces
from ._plan import Plan
from ._trace import operands_of
from ._where import at
from .operators import Reading

_SPLITS = 3


@dataclass(frozen=True)
class Invariance:
    """What `Program.check` found. True where the step does not depend on the split.

    Attributes:
      differences: state leaves that come out differently, by name, with the largest difference found, relative to the
        step's change of that leaf.
      reductions: where they come from: "grads['kernel'] (driver.py:15)", with the largest difference relative to
        the value.
      splits: what was tried: per split, each worker's calls.
      note: why nothing could be compared, if so.
    """

    differences: dict[str, float]
    reductions: dict[str, float]
    splits: tuple[tuple[Pieces, ...], ...]
    note: str = field(default="")

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.note:
            return self.note
        tried = f"{len(self.splits)} random splits of {sum(map(sum, self.splits[0]))} examples"
        if self:
            return f"split-invariant: {tried} gave the same step as one worker on the whole batch."
        lines = [f"not split-invariant: with {tried}, these leaves come out differently:"]
        lines += [f"  {name}   by {value:.2g} of its change" for name, value in self.differences.items()]
        lines += ["through these reductions:"]
        lines += [f"  {name}   by {value:.2g} of its value" for name, value in self.reductions.items()]
        lines += [
            "Usual causes: batch normalisation, a loss that is summed and not averaged over examples, losses that"
        ]
        lines += ["couple examples of a batch, several steps on a local batch. See docs/sharp_bits.md."]
        return "\n".join(lines)


def check_invariance(
    plan_for: Callable[[int], Plan], engine: Engine, batch: Any, *, seed: int, tolerance: float | None
) -> Invariance:
    """Compare steps of one batch under different splits. Changes nothing in `engine`.

    Args:
      tolerance: relative; by default 1e-3, or 1e-9 where all that is reduced is in double precision, or 16 units in
        the last place of a half precision where anything is computed in one.
    """
    examples, n = len(jax.tree.leaves(batch)[0]), engine.world.size
    plan = engine.plan
    if examples % plan.multiple:
        raise BatchSizeError(f"check: {examples} examples are no multiple of the driver's {plan.multiple} minibatches.")
    if not plan.splittable and n == 1:
        return Invariance({}, {}, (), note=f"nothing to compare on one worker: {plan.unsplittable[0]}.")
    if examples // plan.multiple < max(2, n):
        return Invariance({}, {}, (), note=f"nothing to compare: a batch of {examples} cannot be split.")
    eps = _eps(plan)
    if tolerance is None:
        tolerance = 1e-9 if eps < 1e-12 else max(1e-3, 16 * eps)
    rng = np.random.default_rng(seed)
    splits = tuple(_random_split(rng, examples, n, plan) for _ in range(_SPLITS))
    alone = _trial(plan_for, engine, 1)
    split_up = alone if n == 1 else _trial(plan_for, engine, n)
    try:
        whole = _run(alone, engine, batch, ((examples,),))
        others = [_run(split_up, engine, batch, split) for split in splits]
    finally:
        alone.close()
        split_up.close()
    state_differs: dict[str, float] = {}
    reductions: dict[str, float] = {}
    for other in others:
        differences = _differences(plan, whole.reduced, other.reduced, floor=min(1.0, 16 * eps / tolerance))
        found = {place: d for place, d in differences.items() if not d <= tolerance}
        for leaf, names in _reached(plan, found).items():
            before = np.asarray(_plain(engine.states[0][leaf]), np.float64)
            change = _norm(whole.state[leaf] - before)
            difference = _norm(other.state[leaf] - whole.state[leaf]) / (change or 1.0)
            if not difference <= tolerance:
                name = plan.graph.state_names[leaf]
                state_differs[name] = max(difference, state_differs.get(name, 0.0))
                reductions.update({n: max(v, reductions.get(n, 0.0)) for n, v in names.items()})
    return Invariance(state_differs, reductions, splits)


@dataclass
class _Result:
    reduced: dict[tuple[int, int], np.ndarray]  # by message and contribution
    state: list[np.ndarray]


def _random_split(rng: np.random.Generator, examples: int, workers: int, plan: Plan) -> tuple[Pieces, ...]:
    """Sizes of all kinds, but of few different ones: each has to be compiled."""
    unit = plan.multiple * max(1, examples // plan.multiple // max(8, 2 * workers))
    parts = list(_random_parts(rng, examples // unit, workers))
    least = 2 if workers == 1 else 1  # one call of one worker would be compared with itself
    split = [[unit * p for p in _random_parts(rng, n, int(rng.integers(least, min(3, n) + 1)))] for n in parts]
    split[-1][-1] += examples % unit
    return tuple(tuple(calls) if plan.splittable else (sum(calls),) for calls in split)


def _random_parts(rng: np.random.Generator, total: int, count: int) -> Pieces:
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.array([], int)
    return tuple(int(p) for p in np.diff(np.concatenate([[0], cuts, [total]])))


def _trial(plan_for: Callable[[int], Plan], engine: Engine, workers: int) -> Engine:
    """An engine of stand-in workers, to run the steps that are compared."""
    return Engine(
        plan_for,
        engine.plan,
        engine.states[0],
        LocalWorld(workers, engine.world.devices[0]),
        tail=tail_length(engine.world.size),
        workers=engine.world.size,
        kernels={"largest_call": None, "timed": False},
    )


def _run(trial: Engine, engine: Engine, batch: Any, split: Sequence[Pieces]) -> _Result:
    """One step from the engine's state, in the calls of `split`."""
    trial.states = [[copied(leaf, d) for leaf in engine.states[0]] for d in trial.world.devices]
    trial.slots = [[[jax.numpy.copy(a) for a in slot] for slot in engine.slots[0]] for _ in split]
    sizes = [sum(pieces) for pieces in split]
    trial.compile(sizes, pieces=split)  # what is there already is not compiled again
    starts = np.concatenate([[0], np.cumsum(sizes)])
    batches = tuple(jax.tree.map(lambda a, s=s, e=e: np.asarray(a)[s:e], batch) for s, e in pairwise(starts))
    readings = [
        Reading(0, 0, w, sum(sizes), size, size, 1, int(start), 1.0, 1.0)
        for w, (size, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    share = Share(tuple(sizes), tuple(int(s) for s in starts[:-1]), batches)
    tail = trial.layouts[0].tail if trial.layouts else 0
    outcome = trial.step(share, readings, lambda: np.zeros(tail), lambda tail: None, pieces=split)
    reduced = {}
    for level, layout in enumerate(trial.layouts):
        comparable = [
            i for i, c in enumerate(layout.contributions) if c.kind == "reduce" and _is_float(c.value.aval.dtype)
        ]
        values = unpack(layout, outcome.reduced[level][0], comparable)
        reduced.update({(level, i): np.asarray(v, np.float64) for i, v in zip(comparable, values, strict=True)})
    return _Result(reduced, [np.asarray(_plain(leaf), np.float64) for leaf in trial.states[0]])


def _differences(plan: Plan, a: dict, b: dict, floor: float) -> dict[tuple[int, int], float]:
    """How far what was reduced is apart, relative to its norm; to `floor` times the norm of the largest leaf of the
    driver's line, where it has less. A gradient that is zero but for rounding differs by all it is.
    """
    norms = {place: max(_norm(a[place]), _norm(b[place])) for place in a}
    largest: dict[str, float] = {}
    for (level, i), norm in norms.items():
        line = plan.messages[level][i].line
        largest[line] = max(norm, largest.get(line, 0.0))
    scales = {(level, i): max(n, floor * largest[plan.messages[level][i].line]) for (level, i), n in norms.items()}
    return {place: _norm(a[place] - b[place]) / (scales[place] or 1.0) for place in a}


def _eps(plan: Plan) -> float:
    """The distance from 1 to the next number, in the least precision that anything is computed in; in double precision
    if all that is reduced is double.
    """
    if all(c.value.aval.dtype == np.float64 for m in plan.messages for c in m if c.kind == "reduce"):
        return float(np.finfo(np.float64).eps)
    dtypes = {v.aval.dtype for eqn in _all(plan.graph.eqns) for v in eqn.outvars if hasattr(v.aval, "dtype")}
    halves = [float(jax.numpy.finfo(d).eps) for d in dtypes if _is_float(d) and d.itemsize <= 2]
    return max([float(np.finfo(np.float32).eps), *halves])


def _all(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Equations and those nested in them, however deep."""
    for eqn in eqns:
        yield eqn
        for nested in jaxprs_in_params(eqn.params):
            yield from _all(nested.eqns)


def _reached(plan: Plan, places: dict[tuple[int, int], float]) -> dict[int, dict[str, float]]:
    """State leaves that depend on some contributions, and through which they do."""
    graph = plan.graph
    names: dict[Var, dict[str, float]] = {}
    for (level, i), value in places.items():
        c = plan.messages[level][i]
        names[c.result] = {f"{c.name or 'a value'}{at(c.line)}": value}
    for eqn in graph.eqns:
        found: dict[str, float] = {}
        for atom in operands_of(eqn):
            found |= names.get(atom, {}) if isinstance(atom, Var) else {}
        if found:
            for var in eqn.outvars:
                names.setdefault(var, found)
    return {i: names[a] for i, a in enumerate(graph.new_state) if isinstance(a, Var) and a in names}


def _is_float(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)


def _plain(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(x))))
