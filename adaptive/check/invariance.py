"""Checks that a step's result does not depend on the batch's split, as it does with batch norm or summed losses.

The check runs steps on one batch in double precision (`widen.py`), split into equal shares and into random uneven
ones of several microbatches: a few consecutive steps and, if the driver reads the step number, some later ones. Every
trial of a step starts from the same state, so rounding errors do not grow from step to step.

Reduced messages are compared first, then the state, metrics and hook values, all element by element, because many
optimizers treat elements separately. Optimizers such as Adam magnify rounding errors where gradients are near zero, so
a difference in an output counts only if a reduced value that it depends on differs by more than rounding
(`rounding.py`) too.

Some operators depend on the split by design. Metrics and hook values (not the state) may differ if all differing values
that they depend on are

    independent of examples         all_gather(compute_seconds()), ad.batch_size()
    gathered and not used further   all_gather(loss), a row for each worker
    statistics over microbatches    the noise scale, which reads the number of microbatches and their examples

If a reduced value differs, and nothing that follows from it does, the answer is "not known": a decision (a comparison
or argmax) gives the same until a threshold is crossed, and a learning rate of zero hides everything.

Where a monitor is given a local value and its mean over all examples, both must be equal in a single microbatch of one
worker; that is tried too. The last trials leave workers out, as an elastic world may: a state must not depend on their
number. A program with one worker is tried as if it had two.

Nothing is compared if local values differ between workers by design: averages over one worker's or some workers'
examples, or reductions in some steps only. Such a step depends on its split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import BatchSizeError
from adaptive.base.process.source_lines import at, line_of
from adaptive.base.reductions import Mixed
from adaptive.base.values.jaxprs import Var
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.batch_key import drawn_for_a_microbatch
from adaptive.operators.sources import STEP
from adaptive.runtime.engine import Engine

from .dependencies import DATA, Dependencies, named_steps
from .rounding import ROUNDING, beyond, differences, is_finite, is_noisy, norm
from .trials import Bench, Result, Split, Start, even_split, uneven_splits, with_fewer_workers
from .verdict import Invariance
from .widen import CannotWidenError, is_narrow, paired, widened

_SPLITS = 3
_STEPS_IN_A_ROW = 3
_LATER_STEPS = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
_MOST_NAMED = 8
_NUDGES = 2  # trials with perturbed inputs
_NEGLIGIBLE = 1e-9  # relative to the largest reduced value; smaller ones count as 0 with rounding errors
_NOT_THE_MEAN = 0.02  # relative to its norm
_ONE_SPLIT = "nothing to compare: a batch of {} cannot be split in another way."


def check_invariance(
    engine: Engine,
    batch: Any,
    *,
    seed: int,
    tolerance: float | None,
    step: int = 0,
    program_seed: int = 0,
) -> Invariance:
    """Compare steps of one batch under different splits, and gradients with their means. Changes nothing in `engine`.

    Args:
      seed: seed of the random splits.
      tolerance: relative to each element of a value. By default, 100 units in its last place.
      step: number of completed steps.
      program_seed: the program's seed, for `step_key`.

    Raises:
      BatchSizeError: the batch cannot be split over the workers.
    """
    examples, plans = len(jax.tree.leaves(batch)[0]), _for_several_workers(engine)
    plan = plans.reference
    if on_purpose := _each_workers_own(plan):
        return Invariance(on_purpose=on_purpose)
    if examples % plan.multiple:
        raise BatchSizeError(
            f"check: {examples} examples are no multiple of {plan.multiple}, as the driver's minibatches need."
        )
    if note := _why_not_compared(plan, examples, engine.world.devices[0]):
        return Invariance(note=note)
    limits: dict[str, Any] = {"least": engine.step_plan.min_microbatches, "most": engine.kernels.largest_microbatch}
    even, rng = even_split(examples, plan.graph.capacity, plan, **limits), np.random.default_rng(seed)
    splits = uneven_splits(rng, _SPLITS, even, plan, **limits)
    if not splits:
        return Invariance(note=_ONE_SPLIT.format(examples))
    try:
        with jax.enable_x64(True):
            bench = Bench(widened(plans), engine, batch, seed=program_seed)
            try:
                return _Comparison(bench, plan, even, splits, rng, tolerance).of_steps(step)
            finally:
                bench.close()
    except CannotWidenError as error:
        why = f"{error} works in its own dtypes only"
    except jax.errors.JaxRuntimeError as error:  # memory may not suffice
        why = str(error)
    return Invariance(note=f"the driver cannot be computed in double precision: {why}.")


def _why_not_compared(plan: Plan, examples: int, device: jax.Device) -> str:
    if device.platform == "tpu":
        return f"the driver cannot be computed in double precision: {device.device_kind} has none."
    for pairing in plan.graph.pairings:
        return f"the result of {pairing.line} depends on which values are published when."
    if not plan.splittable and plan.graph.capacity == 1:
        return f"nothing to compare on one worker: {plan.unsplittable[0]}."
    if plan.one_size:
        return f"nothing to compare: {plan.one_size}, so its size cannot change."
    if examples // plan.multiple < max(2, plan.graph.capacity):
        return _ONE_SPLIT.format(examples)
    return ""


def _for_several_workers(engine: Engine) -> Planner:
    """Return the driver's plans; for two worker slots if the program has one, and the driver can be traced for two."""
    own = engine.plan
    if engine.world.capacity > 1 or not own.splittable:
        return engine.plans
    with suppress(Exception):  # raised by the driver
        plans = engine.plans.for_capacity(2)
        shapes = [[[a.shape for a in s.init] for s in plan.op_states] for plan in (own, plans.reference)]
        if shapes[0] == shapes[1]:  # the trials start from the program's own values
            return plans
    return engine.plans


def _each_workers_own(plan: Plan) -> str:
    """Return a description of the collectives by which replicas differ on purpose; "" if there are none."""
    for c in (c for message in plan.messages for c in message):
        what = f"{c.how.about}{at(c.line)}"
        if c.when is not None:
            return f"{what} is sent in some steps only, and leaves each worker's own in the others"
        if isinstance(c.how.op, Mixed):
            return f"{what} averages with some other workers only"
        if not c.how.travels:
            return f"each worker's examples are averaged by themselves{at(c.line)}"
    return ""


class _Comparison:
    """The trials of one driver and what they have shown so far."""

    def __init__(
        self,
        bench: Bench,
        driver: Plan,
        even: Split,
        splits: tuple[Split, ...],
        rng: np.random.Generator,
        tolerance: float | None,
    ):
        self.bench, self.driver, self.even, self.rng = bench, driver, even, rng
        self.depend = Dependencies(bench.plan, bench.outputs)
        narrow = any(is_narrow(v.aval.dtype) for v in driver.graph.invars)
        self.eps = float(np.finfo(np.float32 if narrow else np.float64).eps)
        self.relative = ROUNDING * self.eps if tolerance is None else tolerance
        self.found = Invariance(splits=splits)
        self.counted: dict[str, None] = {}  # numbers of workers that are read, with a difference
        self.uncounted: dict[str, None] = {}  # and without one
        self.noisy: dict[str, None] = {}
        self.not_finite: dict[str, None] = {}
        self.trained = False  # whether a trial reduced other values than zeros, and changed state
        self.rounding: dict[Var, np.ndarray] = {}  # the largest change of each element by rounding so far

    def of_steps(self, first: int) -> Invariance:
        """Run and compare all trials. Stops at the first step whose state depends on the split."""
        start, in_a_row, tried, found = self.bench.start, range(first, first + _STEPS_IN_A_ROW), list[int](), self.found
        for step in dict.fromkeys([*in_a_row, *self._later_steps()]):
            if found.differences or (found.reports and step not in in_a_row):
                break
            tried.append(step)
            # All splits in the first step, one in each later step.
            splits = found.splits if step == first else [found.splits[len(tried) % len(found.splits)]]
            after = self._compare_step(start, step, splits)
            start = after if step in in_a_row else start
        if not (found.differences or found.reports):
            self._leave_workers_out(first)
        self._compare_means(first)
        graph = self.bench.plan.graph
        drawn = tuple(drawn_for_a_microbatch(graph.eqns, graph.examples))
        return replace(found, steps=tuple(tried), note=self._note(), drawn=drawn, counted=tuple(self.counted))

    def _later_steps(self) -> list[int]:
        if not any(s.name == STEP.name for s in self.bench.plan.sources):
            return []
        named = named_steps(self.bench.plan.graph)[:_MOST_NAMED]
        return [*_LATER_STEPS, *(n + d for n in named for d in (-1, 0, 1))]

    def _note(self) -> str:
        """Return why nothing more is known; "" if everything was compared."""
        if self.not_finite:
            return f"{_some(self.not_finite)} is not finite on this batch, so there is nothing to compare."
        if self.noisy:
            return f"rounding alone moves {_some(self.noisy)} by so much that it hides any difference."
        if self.found.reductions:
            return (
                f"{_some(self.found.reductions)} depends on the split, and nothing that follows from it shows it in "
                "these trials: a comparison, an argmax or a learning rate of zero may show it for another batch or a "
                "later state."
            )
        if not any(DATA in self.depend.sent(p) for p in self.depend.places):
            return "nothing to compare: the state, metrics and hook values do not depend on examples."
        if self.uncounted:
            return (
                f"the step reads {_some(self.uncounted)}. Fewer workers gave the same in the trials; other numbers of "
                "workers may not."
            )
        if self.depend.trained_by and not self.trained:
            return (
                "the state does not change, or all reduced values that it depends on are 0 in all trials, as if every "
                "example or step were skipped."
            )
        return ""

    # --- trials -------------------------------------------------------------------------------------------------------

    def _compare_step(self, start: Start, step: int, splits: Sequence[Split]) -> Start:
        """Compare one step. Return the start of the next step."""
        whole, *others = (self.bench.run(start, split, step) for split in (self.even, *splits))
        for place in filter(self.depend.is_reduced_data, self.depend.places):
            if not is_finite(whole.contributions[place]):
                self.not_finite[self.depend.label(place)] = None
        for output, value in zip(self.bench.outputs, whole.outputs, strict=True):
            if output.kind == "state" and not is_finite(value):
                self.not_finite[output.name] = None
        self.trained = self.trained or any(map(self._trains, (whole, *others)))
        suspect = next((i for i, other in enumerate(others) if self._differing(whole, other)), None)
        if suspect is not None:
            self._learn_rounding(start, step, {self.even: whole, splits[suspect]: others[suspect]})
        for other in others:
            self._follow(whole, other, self._differing(whole, other))
        return whole.after

    def _trains(self, result: Result) -> bool:
        """Return whether a trial reduced examples to other values than zeros, and changed state by them."""
        trained_by = self.depend.trained_by
        return any(result.contributions[p].any() for p in trained_by) and any(
            change.any() and self.depend.is_state(o) and any(self.depend.counts(p, o) for p in trained_by)
            for o, change in zip(self.bench.outputs, result.changes, strict=True)
        )

    def _learn_rounding(self, start: Start, step: int, trials: dict[Split, Result]) -> None:
        """Measure how reduced values change if inputs change by one unit in the last place."""
        for split, result in trials.items():
            for _ in range(_NUDGES):
                nudged, batch = self.bench.nudged(start, self.rng)
                again = self.bench.run(nudged, split, step, batch=batch)
                for place, value in result.contributions.items():
                    gaps = differences(value, again.contributions[place])
                    self.rounding[place] = np.maximum(gaps, self.rounding.get(place, 0.0))

    def _leave_workers_out(self, step: int) -> None:
        """Compare one step with the same step of fewer workers."""
        whole = self.bench.run(self.bench.start, self.even, step)
        for split in with_fewer_workers(self.even, self.bench.plan):
            other = self.bench.run(self.bench.start, split, step)
            found = self._differing(whole, other).items()
            self._follow(whole, other, {p: value for p, value in found if not self.depend.is_of_count(p)})
            for k, output in enumerate(self.bench.outputs):
                counted = self.depend.counted(output)
                ratio = self._difference(k, whole, other) if counted else None
                if ratio is None:
                    self.uncounted.update(dict.fromkeys(counted))
                else:
                    _raise_to(self.found.by_workers, output.name, ratio)
                    self.counted.update(dict.fromkeys(counted))

    def _compare_means(self, step: int) -> None:
        """Compare what monitors are given as a mean with what it is to be the mean of, in one microbatch."""
        pairs = paired(self.driver.graph)
        needed = {worker for message in self.bench.plan.messages for c in message for worker in c.how.needed}
        if not pairs or len(needed) > 1:
            return
        size = max(max(own) for own in self.even)
        split = tuple((size,) if w == min(needed, default=0) else () for w in range(len(self.even)))
        rows = jax.tree.map(lambda a: a[:size], self.bench.batch)
        gaps = self.bench.run(self.bench.start, split, step, batch=rows).gaps
        for (local, _), (gap, own, mean) in zip(pairs, gaps, strict=True):
            scale = max(own, mean)
            if 0 < scale < np.inf and gap > _NOT_THE_MEAN * scale:
                what = f"{local.params['what']}{at(line_of(local.source_info))}"
                _raise_to(self.found.wrong_means, what, float(gap / scale))

    # --- two results --------------------------------------------------------------------------------------------------

    def _differing(self, whole: Result, other: Result) -> dict[Var, float]:
        """Return relevant contributions that differ by more than rounding errors, with the relative difference."""
        found, largest = {}, max((norm(v[np.isfinite(v)]) for v in whole.contributions.values()), default=0.0)
        for place in self.depend.places:
            a, b = whole.contributions[place], other.contributions[place]
            value, floor = np.maximum(np.abs(a), np.abs(b)), self.rounding.get(place, 0.0)
            ratio = beyond(differences(a, b), value, self.relative * value, floor)
            if ratio is not None:
                found[place] = ratio
            elif is_noisy(value, floor) and norm(value) > _NEGLIGIBLE * largest:
                self.noisy[self.depend.label(place)] = None
        return found

    def _follow(self, whole: Result, other: Result, found: dict[Var, float]) -> None:
        """Record these contributions, if they are of examples, and the outputs that differ because of them."""
        for place, value in found.items():
            if DATA in self.depend.sent(place):
                _raise_to(self.found.reductions, self.depend.label(place), value)
        for k, output in enumerate(self.bench.outputs):
            through = any(self.depend.counts(p, output) for p in found)
            ratio = self._difference(k, whole, other) if through else None
            if ratio is not None:
                state = self.depend.is_state(output)
                _raise_to(self.found.differences if state else self.found.reports, output.name, ratio)

    def _difference(self, k: int, whole: Result, other: Result) -> float | None:
        """Return an output's difference relative to its change by the step; `None` if it is within rounding errors."""
        a, change = whole.outputs[k], whole.changes[k]
        allowed = self.relative * change + 4 * self.eps * np.abs(a)
        return beyond(differences(a, other.outputs[k]), change, allowed, 0.0)


def _raise_to(found: dict[str, float], key: str, value: float) -> None:
    found[key] = max(value, found.get(key, 0.0))


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} (and {len(others)} more)" if others else first
