"""Checks that a step's result does not depend on the batch's split, as it does with batch norm or summed losses.

The check runs steps on one batch, split into equal shares and into random uneven ones of several microbatches: a few
consecutive steps and, if the driver reads the step number, some later ones. Every trial of a step starts from the same
state, so rounding errors do not grow from step to step. Trials run in double precision (`widen.py`).

Reduced messages are compared first, because their rounding errors have known bounds; then the state, metrics and hook
values. Optimizers such as Adam magnify rounding errors where gradients are near zero, so a difference in an output
counts only if a reduced value that it depends on differs too. Values are compared element by element, because many
optimizers treat elements separately. Rounding errors are measured for each leaf: inputs are perturbed by one unit in
the last place, and changes of the size that this causes do not count.

Some operators depend on the split by design. Metrics and hook values (not the state) may differ if all differing values
that they depend on are

    independent of examples         all_gather(compute_seconds()), ad.batch_size()
    gathered and not used further   all_gather(loss), a row for each worker
    statistics over microbatches    the noise scale, which reads the number of microbatches and their examples

The batch's shape, such as len(batch), is none of these: it is the size of one microbatch.

If a reduced value differs, and nothing that follows from it does, the answer is "not known": a decision (a comparison
or argmax) gives the same until a threshold is crossed, and a learning rate of zero hides everything. So it is where the
driver cannot be computed in double precision.

Where a monitor is given a local value and its mean over all examples, it is also checked that one is the mean of the
other (`paired_means.py`).

The last trials leave workers out, as an elastic world may. A state must not depend on their number: a program with one
worker is tried as if it had two.

Nothing is compared if local values differ between workers by design: averages over one worker's or some workers'
examples, or reductions in some steps only. Such a step depends on its split.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import BatchSizeError
from adaptive.base.reductions import Mixed
from adaptive.base.source_lines import at
from adaptive.graph.plan import Plan
from adaptive.operators.batch_key import drawn_for_a_microbatch
from adaptive.operators.sources import STEP, Reading
from adaptive.runtime.engine import Engine
from adaptive.runtime.microbatch_segments import Plans

from .influence import Influence, Place, steps_named
from .paired_means import wrong_means
from .relevance import Relevance
from .rounding import ROUNDING, beyond, differences, in_double, is_finite, is_noisy, rms
from .trials import Bench, Result, Split, Start, even_split, uneven_splits, with_fewer_workers
from .verdict import Invariance
from .widen import CannotWidenError, is_narrow, widened

_SPLITS = 3
_STEPS_IN_A_ROW = 3
_LATER_STEPS = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
_MOST_NAMED = 8
_NUDGES = 2  # trials with perturbed inputs, of each kind
_NEGLIGIBLE = 1e-4  # relative to other reduced values; smaller values count as 0 with rounding errors


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
      tolerance: relative to the norm of a reduced value. By default, 100 units in the last place of each element.
      step: number of completed steps.
      program_seed: the program's seed, for `step_key`.

    Raises:
      BatchSizeError: the batch cannot be split over the workers.
    """
    plan, leaves = engine.plan, jax.tree.leaves(batch)
    size = min(plan.graph.examples, len(leaves[0]))
    reading = Reading(step, program_seed, 0, size, size, size, 1, 0, 1.0, 1.0, np.arange(engine.world.capacity) == 0)
    found = _of_splits(engine, batch, seed=seed, tolerance=tolerance, step=step, program_seed=program_seed)
    if found.on_purpose or size < plan.graph.examples:
        return found
    return replace(found, wrong_means=wrong_means(plan, engine.states[engine.workers.present[0]], leaves, reading))


def _of_splits(
    engine: Engine, batch: Any, *, seed: int, tolerance: float | None, step: int, program_seed: int
) -> Invariance:
    """Compare steps of one batch under different splits; arguments as for `check_invariance`."""
    examples, own_plans = len(jax.tree.leaves(batch)[0]), _for_several_workers(engine)
    plan = own_plans.reference
    n = plan.graph.capacity
    on_purpose = _each_workers_own(plan)
    if on_purpose:
        return Invariance({}, {}, (), on_purpose=on_purpose)
    if examples % plan.multiple:
        raise BatchSizeError(
            f"check: {examples} examples are no multiple of {plan.multiple}, as the driver's minibatches need."
        )
    for pairing in plan.graph.pairings:
        return Invariance({}, {}, (), note=f"the result of {pairing.line} depends on which values are published when.")
    if not plan.splittable and n == 1:
        return Invariance({}, {}, (), note=f"nothing to compare on one worker: {plan.unsplittable[0]}.")
    if plan.one_size:
        return Invariance({}, {}, (), note=f"nothing to compare: {plan.one_size}, so its size cannot change.")
    few = Invariance({}, {}, (), note=f"nothing to compare: a batch of {examples} cannot be split in another way.")
    if examples // plan.multiple < max(2, n):
        return few
    least, most, rng = engine.min_microbatches, engine.kernels.largest_microbatch, np.random.default_rng(seed)
    even = even_split(examples, n, plan, least=least, most=most)
    splits = uneven_splits(rng, _SPLITS, even, plan, least=least, most=most)
    if not splits:
        return few
    try:
        if engine.world.devices[0].platform == "tpu":
            raise CannotWidenError("float64")
        with jax.enable_x64(True):
            bench = Bench(widened(own_plans), engine, batch, seed=program_seed)
            try:
                return _Comparison(bench, plan, even, splits, rng, tolerance).of_steps(step)
            finally:
                bench.close()
    except CannotWidenError as error:
        why = f"{error} on this device, or in other dtypes than its own"
    except jax.errors.JaxRuntimeError as error:  # memory may not suffice
        why = str(error)
    return Invariance({}, {}, (), note=f"the driver cannot be computed in double precision: {why}.")


def _for_several_workers(engine: Engine) -> Plans:
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
    """The trials of one driver and their comparison so far."""

    def __init__(
        self,
        bench: Bench,
        driver: Plan,
        even: Split,
        splits: tuple[Split, ...],
        rng: np.random.Generator,
        tolerance: float | None,
    ):
        self.bench, self.even, self.splits, self.rng, self.tolerance = bench, even, splits, rng, tolerance
        self.plan, self.influence, self.outputs = bench.plan, Influence(bench.plan), bench.outputs
        self.relevance = Relevance(self.plan, self.influence, self.outputs)
        self.eps = float(
            np.finfo(np.float32 if any(is_narrow(v.aval.dtype) for v in driver.graph.invars) else float).eps
        )
        self.states: dict[str, float] = {}
        self.reports: dict[str, float] = {}
        self.by_workers: dict[str, float] = {}
        self.counted: dict[str, None] = {}
        self.uncounted: dict[str, None] = {}  # numbers of workers that are read, without a difference
        self.moved = self.contributed = False  # whether a trial changed state, and reduced other values than zeros
        self.differing: dict[Place, float] = {}
        self.noisy: dict[str, None] = {}
        self.not_finite: dict[str, None] = {}
        # The largest change of each element by rounding, in the trials so far; by contribution, and by output's index.
        self.rounding: dict[Place | int, np.ndarray] = {}

    def of_steps(self, first: int) -> Invariance:
        start, tried = self.bench.start, []
        for step in range(first, first + _STEPS_IN_A_ROW):
            # All splits in the first step, one in each later step.
            splits = self.splits if step == first else [self.splits[step % len(self.splits)]]
            tried.append(step)
            start = self._of_step(start, step, splits)
            if self.states:
                break
        for step in [] if self.states or self.reports else self._later_steps(tried):
            tried.append(step)
            self._of_step(start, step, [self.splits[len(tried) % len(self.splits)]])
        if not (self.states or self.reports):
            self._leave_workers_out(first)
        return Invariance(
            self.states,
            {self.relevance.label(p): value for p, value in self._differing_by_data().items()},
            self.splits,
            self.reports,
            tuple(tried),
            self._note(),
            self._drawn(),
            by_workers=self.by_workers,
            counted=tuple(self.counted),
        )

    def _drawn(self) -> tuple[str, ...]:
        graph = self.plan.graph
        return tuple(drawn_for_a_microbatch(graph.eqns, graph.examples))

    def _later_steps(self, tried: Sequence[int]) -> list[int]:
        if not any(s.name == STEP.name for s in self.plan.sources):
            return []
        named = [n + d for n in steps_named(self.plan, STEP.name)[:_MOST_NAMED] for d in (-1, 0, 1)]
        return [s for s in dict.fromkeys([*_LATER_STEPS, *named]) if s not in tried]

    def _note(self) -> str:
        if self.not_finite:
            return f"{_some(self.not_finite)} is not finite on this batch, so there is nothing to compare."
        if self.noisy:
            return f"rounding alone moves {_some(self.noisy)} by so much that it hides any difference."
        if differing := self._differing_by_data():
            labels = dict.fromkeys(map(self.relevance.label, differing))
            return (
                f"{_some(labels)} depends on the split, and nothing that follows from it shows it in these trials: a "
                "comparison, an argmax or a learning rate of zero may show it for another batch or a later state."
            )
        if not any(self.relevance.facts(p).of_data for p in self.relevance.places):
            return "nothing to compare: the state, metrics and hook values do not depend on examples."
        if self.uncounted:
            return (
                f"the step reads {_some(self.uncounted)}. Fewer workers gave the same in the trials; other numbers of "
                "workers may not."
            )
        if self._of_data() and not self.contributed:
            return "all reduced values that the state depends on are 0 in all trials, as if every example were skipped."
        if self._of_data() and not self.moved:
            return "no trial changed the state, as if every step were skipped."
        return ""

    def _of_data(self) -> list[Place]:
        """Return the reductions of examples on which the state depends."""
        rel = self.relevance
        reduced = [p for p in rel.places if rel.contribution(p).how.reduces and rel.facts(p).of_data]
        return [p for p in reduced if rel.reaches_state(p)]

    # --- one step -----------------------------------------------------------------------------------------------------

    def _of_step(self, start: Start, step: int, splits: Sequence[Split]) -> Start:
        """Compare one step. Return the start of the next step."""
        whole = self.bench.run(start, self.even, step)
        self._look_for_what_is_not_finite(whole)
        others = [self.bench.run(start, split, step) for split in splits]
        for result in (whole, *others):
            self._look_for_changes(result)
        suspect = next((i for i, other in enumerate(others) if self._differing(whole, other)), None)
        if suspect is not None:
            self._learn_rounding(start, step, {self.even: whole, splits[suspect]: others[suspect]})
        for other in others:
            found = self._differing(whole, other)
            self._follow(whole, other, found)
        return whole.after

    def _leave_workers_out(self, step: int) -> None:
        """Compare one step with the same step of fewer workers."""
        start, rel = self.bench.start, self.relevance
        whole = self.bench.run(start, self.even, step)
        for split in with_fewer_workers(self.even, self.plan):
            other = self.bench.run(start, split, step)
            found = {p: value for p, value in self._differing(whole, other).items() if not rel.is_of_count(p)}
            self._follow(whole, other, found)
            for k, output in enumerate(self.outputs):
                counted = rel.counted(output)
                ratio = self._difference(k, whole, other) if counted else None
                if ratio is not None:
                    _raise_to(self.by_workers, output.name, ratio)
                    self.counted.update(dict.fromkeys(counted))
                else:
                    self.uncounted.update(dict.fromkeys(counted))

    def _look_for_changes(self, result: Result) -> None:
        places = self._of_data()
        self.contributed = self.contributed or any(result.contributions[p].any() for p in places)
        self.moved = self.moved or any(
            _changes(result, k).any()
            for k, output in enumerate(self.outputs)
            if self.relevance.is_state(output) and any(self.relevance.counts(p, output) for p in places)
        )

    def _look_for_what_is_not_finite(self, result: Result) -> None:
        for place in self.relevance.places:
            c = self.relevance.contribution(place)
            if c.how.reduces and self.relevance.facts(place).of_data and not is_finite(result.contributions[place]):
                self.not_finite[self.relevance.label(place)] = None
        for output, value in zip(self.outputs, result.outputs, strict=True):
            if output.kind == "state" and not is_finite(value) and self.influence.of(output.atom).through:
                self.not_finite[output.name] = None

    def _differing(self, whole: Result, other: Result) -> dict[Place, float]:
        """Return relevant contributions that differ by more than rounding errors, with the relative difference."""
        found = {}
        for place in self.relevance.places:
            a, b = whole.contributions[place], other.contributions[place]
            value, floor = np.maximum(np.abs(a), np.abs(b)), self.rounding.get(place, 0.0)
            ratio = self._beyond(differences(a, b), value, self._relative * value, floor)
            if ratio is not None:
                found[place] = ratio
            elif is_noisy(value, floor) and not self._is_negligible(place, whole):
                self.noisy[self.relevance.label(place)] = None
        return found

    def _follow(self, whole: Result, other: Result, found: dict[Place, float]) -> None:
        """Record these contributions, and the outputs that differ because of them."""
        for place, value in found.items():
            _raise_to(self.differing, place, value)
        for k, output in enumerate(self.outputs):
            through = [p for p in found if self.relevance.counts(p, output)]
            ratio = self._difference(k, whole, other) if through else None
            if ratio is None:
                continue
            noted = self.states if self.relevance.is_state(output) else self.reports
            _raise_to(noted, output.name, ratio)

    def _difference(self, k: int, whole: Result, other: Result) -> float | None:
        """Return an output's difference relative to its change by the step; `None` if it is within rounding errors."""
        a, change = whole.outputs[k], _changes(whole, k)
        allowed = self._relative * change + 4 * self.eps * np.abs(a)
        return self._beyond(differences(a, other.outputs[k]), change, allowed, self.rounding.get(k, 0.0))

    def _beyond(self, gaps: np.ndarray, value: np.ndarray, allowed: np.ndarray, floor: Any) -> float | None:
        return beyond(gaps, value, allowed, floor, by_element=self.tolerance is None)

    @property
    def _relative(self) -> float:
        return self.tolerance if self.tolerance is not None else ROUNDING * self.eps

    # --- rounding -----------------------------------------------------------------------------------------------------

    def _learn_rounding(self, start: Start, step: int, trials: dict[Split, Result]) -> None:
        """Measure how values change if inputs change by one unit in the last place."""
        for split, result in trials.items():
            for whole in (False, True) * _NUDGES:
                nudged, batch = self.bench.nudged(start, self.rng, whole=whole)
                again = self.bench.run(nudged, split, step, batch=batch)
                for place, value in result.contributions.items():
                    self._add_rounding(place, value, again.contributions[place])
                for k, value in enumerate([] if whole else result.outputs):
                    self._add_rounding(k, value, again.outputs[k])

    def _add_rounding(self, key: Place | int, a: np.ndarray, b: np.ndarray) -> None:
        self.rounding[key] = np.maximum(differences(a, b), self.rounding.get(key, 0.0))

    def _is_negligible(self, place: Place, result: Result) -> bool:
        """Return whether a contribution's elements are so small that they must be rounding errors.

        They are compared with other contributions to the same kind of output: the state, or metrics.
        """
        of_state = self.relevance.reaches_state(place)
        peers = [p for p in self.relevance.places if self.relevance.reaches_state(p) == of_state]
        largest = max(rms(result.contributions[p]) for p in peers)
        return rms(result.contributions[place]) <= _NEGLIGIBLE * largest

    def _differing_by_data(self) -> dict[Place, float]:
        """Return the contributions of examples that differed, with the relative difference."""
        return {p: value for p, value in self.differing.items() if self.relevance.facts(p).of_data}


def _raise_to(found: dict, key: Any, value: float) -> None:
    found[key] = max(value, found.get(key, 0.0))


def _some(names: dict[str, Any]) -> str:
    first, *others = names
    return f"{first} (and {len(others)} more)" if others else first


def _changes(result: Result, k: int) -> np.ndarray:
    """Return an output's change by the step, in double precision; for metrics and hook values, their value."""
    before, after = result.before[k], in_double(result.outputs[k])
    return np.abs(after if before is None else after - in_double(before))
