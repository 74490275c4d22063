"""Checks that a step's result does not depend on how its batch is split, as it does with batch norm or summed losses.

The check runs steps on one batch in double precision (`widen.py`), in equal shares, in random uneven ones of several
microbatches, and over fewer workers, and compares element by element. Every trial of a step starts from the same state.

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
_MEASURED = 100  # tolerance, as a multiple of their effect
_NOISY = 0.03  # a value with a larger relative rounding error cannot be compared
_NEGLIGIBLE = 1e-9  # relative to the largest reduced value; smaller ones count as 0 with rounding errors
_NOT_THE_MEAN = 0.02  # relative to its norm
_IN_DOUBLE = "the driver cannot be computed in double precision: {}."


def check_invariance(
    engine: Engine, batch: Any, *, seed: int, tolerance: float | None, step: int = 0, program_seed: int = 0
) -> Invariance:
    """Compare steps from number `step` on, of one batch under different splits, and gradients with their means.
    Changes nothing in `engine`. Arguments as of `Program.check`.

    Raises:
      BatchSizeError: the batch cannot be split over the workers.
    """
    examples, plans = len(jax.tree.leaves(batch)[0]), _for_several_workers(engine)
    plan, rng = plans.reference, np.random.default_rng(seed)
    for c in (c for message in plan.messages for c in message):
        if c.when is not None or isinstance(c.how.op, Mixed) or not c.how.travels:
            return Invariance("no", note=_ON_PURPOSE.format(f"{c.how.about}{at(c.line)}"))
    if examples % plan.multiple:
        raise BatchSizeError(
            f"check: {examples} examples are no multiple of {plan.multiple}, as the driver's minibatches need."
        )
    least = engine.context.min_microbatches_of(1, engine.world.capacity)
    limits: dict[str, Any] = {"least": least, "most": engine.kernels.largest_microbatch}
    even = even_split(examples, plan.graph.capacity, plan, **limits)
    splits = uneven_splits(rng, _SPLITS, even, plan, **limits)
    note = _why_not_compared(plan, engine.world.devices[0])
    if not note and not splits:
        note = f"nothing to compare: a batch of {examples} cannot be split in another way."
    if note:
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
    return f"nothing to compare: {plan.one_size}, so its size cannot change." if plan.one_size else ""


def _for_several_workers(engine: Engine) -> Planner:
    """Return the driver's plans; for two worker slots if the program has one, and the driver can be traced for two."""
    own = engine.plan
    if engine.world.capacity == 1 and own.splittable:
        with suppress(Exception):  # raised by the driver
            plans = engine.plans.for_capacity(2)
            shapes = [[[a.shape for a in s.init] for s in plan.op_states] for plan in (own, plans.reference)]
            if shapes[0] == shapes[1]:  # the trials start from the program's own values
                return plans
    return engine.plans


class _Comparison:
    """The trials of one driver, whose plan in its own precision is `driver`, and what they have shown so far.

    The first of `splits` has equal shares, and the other ones are compared with it.
    """

    def __init__(
        self, bench: Bench, driver: Plan, splits: Sequence[Split], rng: np.random.Generator, tolerance: float | None
    ):
        self.bench, self.driver, self.rng = bench, driver, rng
        self.even, *self.uneven = splits
        self.depend = depend = Dependencies(bench.plan)
        narrow = any(is_narrow(v.aval.dtype) for v in driver.graph.invars)
        self.eps = float(np.finfo(np.float32 if narrow else np.float64).eps)
        self.relative = _ROUNDING * self.eps if tolerance is None else tolerance
        self.found = Invariance("yes", splits=tuple(self.uneven))
        self.unknown: dict[str, None] = {}  # reasons why nothing more is known
        self.counted: dict[str, None] = {}  # where numbers of workers are read, with a difference
        self.rounding: dict[Var, Any] = {}  # the largest change of each element by rounding so far
        self.reduced = [p for p in depend.places if depend.is_reduced_data(p)]
        trained = [(k, o) for k, o in enumerate(bench.outputs) if depend.is_state(o)]
        # Reductions of examples that have not changed the indexed part of the state, as they must.
        self.idle = [(p, k) for p in self.reduced for k, o in trained if depend.counts(p, o)]

    def of_steps(self, first: int) -> Invariance:
        """Run and compare all trials. Stops at the first step in which something depends on the split."""
        bench, found, tried, start = self.bench, self.found, list[int](), self.bench.start
        steps = [*range(first, first + _STEPS_IN_A_ROW)]
        if any(s.name == STEP.name for s in bench.plan.sources):
            named = named_steps(bench.plan.graph)[:_MOST_NAMED]
            steps += [*_LATER_STEPS, *(n + d for n in named for d in (-1, 0, 1))]
        for step in dict.fromkeys(steps):
            tried.append(step)
            # All splits in the first step, one in each later step.
            fewer = with_fewer_workers(self.even, bench.plan)
            splits = [*self.uneven, *fewer] if step == first else [self.uneven[len(tried) % len(self.uneven)]]
            after = self._compare_step(start, step, splits)
            start = after if len(tried) <= _STEPS_IN_A_ROW else start
            if found.differences or found.reports:
                break
        self._compare_means(first)
        if found.differences or found.reports or found.wrong_means:
            counted = [_COUNTED.format(", ".join(self.counted))] if self.counted else []
            hints = (*counted, *notes_on_draws(self.driver))
            return replace(found, verdict="no", steps=tuple(tried), hints=hints)
        if not any(DATA in self.depend.sent(p) for p in self.depend.places):
            self.unknown[_NO_EXAMPLES] = None
        if self.idle:
            self.unknown[_IDLE] = None
        note = next(iter(self.unknown), "")
        return replace(found, verdict="not known" if note else "yes", steps=tuple(tried), note=note)

    def _compare_step(self, start: Start, step: int, splits: Sequence[Split]) -> Start:
        """Compare one step. Return the start of the next step."""
        whole, *others = trials = [self.bench.run(start, split, step) for split in (self.even, *splits)]
        if any(t.contributions[p].any() and t.changes[k].any() for t in trials for p, k in self.idle):
            self.idle = []
        if any(self._differing(whole, other) for other in others):
            for _ in range(_NUDGES):
                again = self.bench.run_nudged(start, self.even, step, self.rng)
                for place, value in whole.contributions.items():
                    gaps = differences(value, again.contributions[place])
                    self.rounding[place] = np.maximum(gaps, self.rounding.get(place, 0.0))
        self._note_what_hides(whole)
        for split, other in zip(splits, others, strict=True):
            self._follow(whole, other, fewer=() in split)
        return whole.after

    def _note_what_hides(self, whole: Result) -> None:
        """Note the values that are not finite, and those that rounding hides."""
        state = [(o.name, v) for o, v in zip(self.bench.outputs, whole.outputs, strict=True) if o.kind == "state"]
        for name, value in [*((self.depend.label(p), whole.contributions[p]) for p in self.reduced), *state]:
            if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
                self.unknown[f"{name} is not finite on this batch, so there is nothing to compare."] = None
        largest = max((norm(v[np.isfinite(v)]) for v in whole.contributions.values()), default=0.0)
        for place in (p for p in self.depend.places if p in self.rounding):
            size = norm(whole.contributions[place])
            if norm(self.rounding[place]) > _NOISY * size and size > _NEGLIGIBLE * largest:
                text = f"rounding alone moves {self.depend.label(place)} by so much that it hides any difference."
                self.unknown[text] = None

    def _differing(self, whole: Result, other: Result) -> dict[Var, float]:
        """Return relevant contributions that differ by more than rounding errors, with the relative difference."""
        found = {}
        for place in self.depend.places:
            a, b = whole.contributions[place], other.contributions[place]
            value = np.maximum(np.abs(a), np.abs(b))
            allowed = self.relative * value + _MEASURED * self.rounding.get(place, 0.0)
            ratio = beyond(differences(a, b), value, allowed)
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
        for place in (p for p in places if DATA in depend.sent(p)):
            _raise_to(self.found.reductions, depend.label(place), places[place])
            if not shown:
                self.unknown[_HIDDEN.format(depend.label(place))] = None

    def _compare_means(self, step: int) -> None:
        """Compare what monitors are given as a mean with what it is to be the mean of, in one microbatch."""
        pairs = paired(self.driver.graph)
        needed = {worker for message in self.bench.plan.messages for c in message for worker in c.how.needed}
        if not pairs or len(needed) > 1:
            return
        size = max(max(own) for own in self.even)
        split = tuple((size,) if w == min(needed, default=0) else () for w in range(len(self.even)))
        rows = jax.tree.map(lambda a: a[:size], self.bench.batch)
        for (local, _), gap in zip(pairs, self.bench.run(self.bench.start, split, step, rows).gaps, strict=True):
            if gap > _NOT_THE_MEAN:
                _raise_to(self.found.wrong_means, f"{local.params['what']}{at(line_of(local.source_info))}", float(gap))


def _raise_to(found: dict[str, float], key: str, value: float) -> None:
    found[key] = max(value, found.get(key, 0.0))


_ON_PURPOSE = """on purpose: {} combines the values of some workers, or of all in some steps only.
The step uses local values that differ between workers, so it depends on how its batch is split.
Nothing was compared. To check the model itself, use synchronous SGD:
    strategy = sync.synchronous(optimizer)"""

_NO_EXAMPLES = "nothing to compare: the state, metrics and hook values do not depend on examples."

_IDLE = (
    "the state does not change, or all reduced values that it depends on are 0 in all trials, as if every example or "
    "step were skipped."
)

_HIDDEN = (
    "{} depends on the split, and nothing that follows from it shows it in these trials: a comparison, an argmax or a "
    "learning rate of zero may show it for another batch or a later state."
)

_COUNTED = """The step depends on the number of workers, through {}.
If that is on purpose, the result changes whenever workers join or leave. If not: comm.all_reduce(x)
is the mean over all examples already, a reduced value must not be summed again, and a learning rate can follow
ad.global_batch()."""
