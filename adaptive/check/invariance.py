"""Checks that a step's result does not depend on how its batch is split, as it does with batch norm or summed losses.

The check runs steps on one batch in double precision (`widen.py`), in equal shares, in random uneven ones of several
microbatches, and over fewer workers. Every trial of a step starts from the same state, so rounding errors do not grow.
All is compared element by element, because many optimizers treat elements separately.

Optimizers such as Adam magnify rounding errors where gradients are near zero. So a difference in an output counts only
if the output depends on a number of workers, or on a reduced value that differs by more than rounding (`rounding.py`).
If a reduced value differs, and nothing that follows from it does, the answer is "not known": a comparison or argmax
gives the same until a threshold is crossed, and a learning rate of zero hides everything.

Where a monitor is given a local value and its mean over all examples, both must be equal in a single microbatch of one
worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import BatchSizeError
from adaptive.base.process.source_lines import at, line_of
from adaptive.base.reductions import Mixed
from adaptive.base.values.jaxprs import Var
from adaptive.graph.draws import notes_on_draws
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.sources import STEP
from adaptive.runtime.engine import Engine

from .dependencies import DATA, Dependencies, named_steps
from .rounding import beyond, differences, norm
from .trials import Bench, Result, Split, Start, even_split, uneven_splits, with_fewer_workers
from .verdict import Invariance
from .widen import CannotWidenError, is_narrow, paired, widened

_SPLITS = 3
_STEPS_IN_A_ROW = 3
_LATER_STEPS = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
_MOST_NAMED = 8
_ROUNDING = 100  # the default tolerance, relative to an element, in units in the last place of the driver's precision
_NUDGES = 4  # trials with perturbed inputs
_NOISY = 0.03  # a value with a larger relative rounding error cannot be compared
_NEGLIGIBLE = 1e-9  # relative to the largest reduced value; smaller ones count as 0 with rounding errors
_NOT_THE_MEAN = 0.02  # relative to its norm
_IN_DOUBLE = "the driver cannot be computed in double precision: {}."


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
    plan, rng = plans.reference, np.random.default_rng(seed)
    if on_purpose := _each_workers_own(plan):
        return Invariance("no", note=_ON_PURPOSE.format(on_purpose))
    if examples % plan.multiple:
        raise BatchSizeError(
            f"check: {examples} examples are no multiple of {plan.multiple}, as the driver's minibatches need."
        )
    if note := _why_not_compared(plan, engine.world.devices[0]):
        return Invariance("not known", note=note)
    limits: dict[str, Any] = {"least": engine.context.min_microbatches, "most": engine.kernels.largest_microbatch}
    even = even_split(examples, plan.graph.capacity, plan, **limits)
    splits = uneven_splits(rng, _SPLITS, even, plan, **limits)
    if not splits:
        note = f"nothing to compare: a batch of {examples} cannot be split in another way."
        return Invariance("not known", note=note)
    try:
        with jax.enable_x64(True), closing(Bench(widened(plans), engine, batch, seed=program_seed)) as bench:
            return _Comparison(bench, plan, [even, *splits], rng, tolerance).of_steps(step)
    except CannotWidenError as error:
        note = f"{error} works in its own dtypes only"
    except jax.errors.JaxRuntimeError as error:  # memory may not suffice
        note = str(error)
    return Invariance("not known", note=_IN_DOUBLE.format(note))


def _why_not_compared(plan: Plan, device: jax.Device) -> str:
    if device.platform == "tpu":
        return _IN_DOUBLE.format(f"{device.device_kind} has none")
    for pairing in plan.graph.pairings:
        return f"the result of {pairing.line} depends on which values are published when."
    if not plan.splittable and plan.graph.capacity == 1:
        return f"nothing to compare on one worker: {plan.unsplittable[0]}."
    if plan.one_size:
        return f"nothing to compare: {plan.one_size}, so its size cannot change."
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
        if c.when is not None or isinstance(c.how.op, Mixed) or not c.how.travels:
            return f"{c.how.about}{at(c.line)} combines the values of some workers, or of all in some steps only"
    return ""


class _Comparison:
    """The trials of one driver, whose plan in its own precision is `driver`, and what they have shown so far.

    Of `splits`, the first has equal shares. The other ones are compared with it.
    """

    def __init__(
        self, bench: Bench, driver: Plan, splits: Sequence[Split], rng: np.random.Generator, tolerance: float | None
    ):
        self.bench, self.driver, self.rng = bench, driver, rng
        self.even, *self.uneven = splits
        self.depend = Dependencies(bench.plan, bench.outputs)
        narrow = any(is_narrow(v.aval.dtype) for v in driver.graph.invars)
        self.eps = float(np.finfo(np.float32 if narrow else np.float64).eps)
        self.relative = _ROUNDING * self.eps if tolerance is None else tolerance
        self.found = Invariance("yes", splits=tuple(self.uneven))
        self.unknown: dict[str, None] = {}  # reasons why nothing more is known
        self.counted: dict[str, None] = {}  # where numbers of workers are read, with a difference
        # Reductions of examples, and the indices of the outputs that they must train.
        self.training = [
            (p, k)
            for p in filter(self.depend.is_reduced_data, self.depend.places)
            for k, o in enumerate(bench.outputs)
            if self.depend.is_state(o) and self.depend.counts(p, o)
        ]
        self.trained = False  # whether one of them was not zero, and changed the state
        self.rounding: dict[Var, Any] = {}  # the largest change of each element by rounding so far

    def of_steps(self, first: int) -> Invariance:
        """Run and compare all trials. Stops at the first step in which something depends on the split."""
        start, in_a_row, tried, found = self.bench.start, range(first, first + _STEPS_IN_A_ROW), list[int](), self.found
        for step in dict.fromkeys([*in_a_row, *self._later_steps()]):
            tried.append(step)
            # All splits in the first step, one in each later step.
            fewer = with_fewer_workers(self.even, self.bench.plan)
            splits = [*self.uneven, *fewer] if step == first else [self.uneven[len(tried) % len(self.uneven)]]
            after = self._compare_step(start, step, splits)
            start = after if step in in_a_row else start
            if found.differences or found.reports:
                break
        self._compare_means(first)
        return self._judged(tried)

    def _later_steps(self) -> list[int]:
        if not any(s.name == STEP.name for s in self.bench.plan.sources):
            return []
        named = named_steps(self.bench.plan.graph)[:_MOST_NAMED]
        return [*_LATER_STEPS, *(n + d for n in named for d in (-1, 0, 1))]

    def _judged(self, tried: list[int]) -> Invariance:
        found, unknown = self.found, [*self.unknown]
        if found.differences or found.reports or found.wrong_means:
            counted = [_COUNTED.format(", ".join(self.counted))] if self.counted else []
            hints = (*counted, *notes_on_draws(self.driver))
            return replace(found, verdict="no", steps=tuple(tried), hints=hints)
        if not any(DATA in self.depend.sent(p) for p in self.depend.places):
            unknown.append("nothing to compare: the state, metrics and hook values do not depend on examples.")
        if self.training and not self.trained:
            unknown.append(
                "the state does not change, or all reduced values that it depends on are 0 in all trials, as if every "
                "example or step were skipped."
            )
        return replace(found, verdict="not known" if unknown else "yes", steps=tuple(tried), note=" ".join(unknown[:1]))

    # --- trials -------------------------------------------------------------------------------------------------------

    def _compare_step(self, start: Start, step: int, splits: Sequence[Split]) -> Start:
        """Compare one step. Return the start of the next step."""
        whole, *others = (self.bench.run(start, split, step) for split in (self.even, *splits))
        self.trained = self.trained or any(
            t.contributions[p].any() and t.changes[k].any() for t in (whole, *others) for p, k in self.training
        )
        if any(self._differing(whole, other) for other in others):
            self._learn_rounding(start, step, whole)
        self._note_what_hides(whole)
        for split, other in zip(splits, others, strict=True):
            self._follow(whole, other, fewer=() in split)
        return whole.after

    def _note_what_hides(self, whole: Result) -> None:
        """Note the values that are not finite, and those that rounding hides."""
        places = [p for p in self.depend.places if self.depend.is_reduced_data(p)]
        state = [(o.name, v) for o, v in zip(self.bench.outputs, whole.outputs, strict=True) if o.kind == "state"]
        for name, value in [*((self.depend.label(p), whole.contributions[p]) for p in places), *state]:
            if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
                self.unknown[f"{name} is not finite on this batch, so there is nothing to compare."] = None
        largest = max((norm(v[np.isfinite(v)]) for v in whole.contributions.values()), default=0.0)
        for place, floor in self.rounding.items():
            size = norm(whole.contributions[place])
            if place in self.depend.places and norm(floor) > _NOISY * size and size > _NEGLIGIBLE * largest:
                text = f"rounding alone moves {self.depend.label(place)} by so much that it hides any difference."
                self.unknown[text] = None

    def _learn_rounding(self, start: Start, step: int, whole: Result) -> None:
        """Measure how reduced values change if inputs change by one unit in the last place."""
        for _ in range(_NUDGES):
            nudged, batch = self.bench.nudged(start, self.rng)
            again = self.bench.run(nudged, self.even, step, batch=batch)
            for place, value in whole.contributions.items():
                gaps = differences(value, again.contributions[place])
                self.rounding[place] = np.maximum(gaps, self.rounding.get(place, 0.0))

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
        for (local, _), gap in zip(pairs, gaps, strict=True):
            if gap > _NOT_THE_MEAN:
                _raise_to(self.found.wrong_means, f"{local.params['what']}{at(line_of(local.source_info))}", float(gap))

    # --- two results --------------------------------------------------------------------------------------------------

    def _differing(self, whole: Result, other: Result) -> dict[Var, float]:
        """Return relevant contributions that differ by more than rounding errors, with the relative difference."""
        found = {}
        for place in self.depend.places:
            a, b = whole.contributions[place], other.contributions[place]
            value = np.maximum(np.abs(a), np.abs(b))
            ratio = beyond(differences(a, b), value, self.relative * value, self.rounding.get(place, 0.0))
            if ratio is not None:
                found[place] = ratio
        return found

    def _follow(self, whole: Result, other: Result, *, fewer: bool) -> None:
        """Record the reductions of examples that differ, and the outputs that differ because of them or, in a trial
        with fewer workers, because of a number of workers.
        """
        shown, places, depend = False, self._differing(whole, other), self.depend
        for k, output in enumerate(self.bench.outputs):
            counted = depend.counted(output) if fewer else []
            if not counted and not any(depend.counts(p, output) for p in places):
                continue
            a, change = whole.outputs[k], whole.changes[k]
            allowed = self.relative * change + 4 * self.eps * np.abs(a)
            ratio = beyond(differences(a, other.outputs[k]), change, allowed)
            if ratio is not None:
                shown = True
                _raise_to(self.found.differences if depend.is_state(output) else self.found.reports, output.name, ratio)
                self.counted.update(dict.fromkeys(counted))
            elif counted:
                text = f"the step reads {counted[0]}. Fewer workers gave the same in the trials; other numbers may not."
                self.unknown[text] = None
        for place, value in places.items():
            if DATA in depend.sent(place):
                label = depend.label(place)
                _raise_to(self.found.reductions, label, value)
                if not shown:
                    self.unknown[_HIDDEN.format(label)] = None


def _raise_to(found: dict[str, float], key: str, value: float) -> None:
    found[key] = max(value, found.get(key, 0.0))


_ON_PURPOSE = """on purpose: {}.
The step uses local values that differ between workers, so it depends on how its batch is split.
Nothing was compared. To check the model itself, use synchronous SGD:
    strategy = sync.synchronous(optimizer)"""

_HIDDEN = (
    "{} depends on the split, and nothing that follows from it shows it in these trials: a comparison, an argmax or a "
    "learning rate of zero may show it for another batch or a later state."
)

_COUNTED = """The step depends on the number of workers, through {}.
If that is on purpose, the result changes whenever workers join or leave. If not: comm.all_reduce(x)
is the mean over all examples already, a reduced value must not be summed again, and a learning rate can follow
ad.global_batch()."""
